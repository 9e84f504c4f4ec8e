"""The whole trainer on the devices at hand: warm-up, a run, a resume, an evaluation, in figures.

    python -m benchmarks.whole_run --directory DIR [--device cuda] [--drafters 2] [--steps 60]

Builds a random Qwen3 target of the given size (no weights are fetched) and chats of random words,
then runs ``python -m trainer`` as the runner would, each step under its own time limit. With fewer
GPUs than roles several roles share a GPU. Prints one JSON line a stage; logs stay in DIR.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.contract.config import TrainConfig
from trainer.contract.manifest import Gpu, Manifest

_NUM_WORDS = 31_990
_SPECIALS = ("<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|pad|>", "<|unk|>")
MASK_TOKEN_ID = _NUM_WORDS + _SPECIALS.index("<|mask|>")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_SIZES = {  # hidden, feed-forward, layers, heads, kv heads
    "tiny": (128, 256, 12, 4, 2),
    "small": (1024, 3072, 16, 16, 8),
    "8b": (4096, 12288, 36, 32, 8),
}


def build_target(path: Path, size: str, device: str) -> None:
    """Write a random target and a word tokenizer below ``path``; done once."""
    if (path / "config.json").exists():
        return
    vocabulary = {f"w{i}": i for i in range(_NUM_WORDS)}
    vocabulary |= {name: _NUM_WORDS + i for i, name in enumerate(_SPECIALS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    hidden, inner, layers, heads, kv_heads = _SIZES[size]
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=vocabulary["<|pad|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)


def write_chats(path: Path, count: int, longest: int) -> None:
    """Write chats whose answers repeat a short cycle of words."""
    draw = random.Random(1)
    lines = []
    for number in range(count):
        cycle = [f"w{draw.randrange(_NUM_WORDS)}" for _ in range(draw.randrange(2, 9))]
        answer = " ".join(
            cycle[i % len(cycle)] for i in range(draw.randrange(longest // 4, longest))
        )
        messages = [
            {"role": "user", "content": " ".join(cycle)},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"id": f"c{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def gpus(device: str, num_targets: int, num_drafters: int) -> tuple[Gpu, ...]:
    """Give every role entry a GPU, the same one again when there are too few."""
    roles = ["target"] * num_targets + ["drafter"] * num_drafters
    if device == "cpu":
        return tuple(Gpu(role, None, None, None) for role in roles)
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    text = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    cards = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    found = [cards[i % len(cards)] for i in range(len(roles))]
    return tuple(
        Gpu(role, int(card[0]), card[1], card[2]) for role, card in zip(roles, found, strict=True)
    )


def manifest_of(run_dir: Path, config: TrainConfig, cards: tuple[Gpu, ...]) -> Manifest:
    """Return the manifest of a run in ``ROOT/runs/TAG``."""
    root, tag = run_dir.parents[1], run_dir.name
    return Manifest(
        run_id=f"{tag}-benchmark",
        tag=tag,
        created_unix_s=time.time(),
        dflashctl_version="0.1.0",
        release="0" * 64,
        git_commit=None,
        git_dirty=None,
        packages={"torch": torch.__version__},
        host="here",
        vmid=None,
        gpus=cards,
        python=sys.executable,
        workspace=str(root),
        log_path=str(run_dir / f"train_stdout_{tag}.log"),
        cache_dir=str(root / "cache"),
        target_revision="random",
        dataset_sha256=hashlib.sha256(Path(config.data.path).read_bytes()).hexdigest(),
        config=config.to_dict(),
        seed=config.seed,
        argv=tuple(sys.argv),
    )


def write_manifest(options: argparse.Namespace) -> Path:
    """Write the manifest of a run; returns its directory."""
    root: Path = options.directory
    config = TrainConfig.from_dict(
        {
            "target": {"path": str(root / "target"), "dtype": "bfloat16"},
            "data": {
                "path": str(root / "chats.jsonl"),
                "max_length": options.longest * 2,
                "token_budget": options.token_budget,
                "max_anchors": options.anchors,
            },
            "draft": {
                "num_draft_layers": options.layers,
                "block_size": 16,
                "mask_token_id": MASK_TOKEN_ID,
            },
            "optim": {"max_steps": options.steps, "epochs": 1000.0},
            "run": {"device": options.device, "checkpoint_every_steps": max(1, options.steps // 2)},
            "compile": {"limit_s": 240.0},
        }
    )
    run_dir = root / "runs" / options.tag
    run_dir.mkdir(parents=True)
    cards = gpus(options.device, options.targets, options.drafters)
    manifest = manifest_of(run_dir, config, cards)
    (run_dir / "manifest.json").write_text(manifest.to_json())
    return run_dir


def stage(name: str, run_dir: Path, arguments: list[str], limit_s: float) -> int:
    """Run one trainer command under a time limit; print what it took and, if it failed, its end."""
    manifest = Manifest.from_json((run_dir / "manifest.json").read_text())
    cards = dict.fromkeys(gpu.uuid for gpu in manifest.gpus if gpu.uuid)
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(cards),
        "TORCHINDUCTOR_CACHE_DIR": f"{manifest.cache_dir}/inductor",
        "TRITON_CACHE_DIR": f"{manifest.cache_dir}/triton",
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    log = run_dir / f"{name}.log"
    with log.open("wb") as out:
        try:
            status = subprocess.run(
                [sys.executable, "-m", "trainer", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -9
    show(stage=name, status=status, elapsed_s=round(time.monotonic() - began, 1))
    tail = log.read_text(errors="replace").splitlines()
    print("\n".join(tail[-25:] if status else tail[-4:]), flush=True)
    return status


def figures(run_dir: Path, skip: int) -> dict[str, Any]:
    """Median rates of the steps after the first ``skip``, and the compiles."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["kind"] == "step"][skip:]
    compiles = [e for e in events if e["kind"] == "compile"]
    if not steps:
        return {"num_steps": 0}
    middle = sorted(steps, key=lambda e: e["step_s"])[len(steps) // 2]
    return {
        "num_steps": len(steps),
        "step_s": middle["step_s"],
        "tokens_per_s": middle["tokens_per_s"],
        "anchors_per_s": middle["anchors_per_s"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
        "num_compile_events": len(compiles),
    }


def show(**values: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(values), flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--tag", default="bench1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(_SIZES), default="small")
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--limit-s", type=float, default=240.0)
    return parser.parse_args()


def main() -> int:
    """Run every stage; the status is that of the first that failed."""
    options = parse()
    options.directory.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    show(torch=torch.__version__, card=card, **{k: str(v) for k, v in vars(options).items()})
    build_target(options.directory / "target", options.size, options.device)
    chats = options.directory / "chats.jsonl"
    write_chats(chats, options.samples, options.longest)
    run_dir = write_manifest(options)
    place = ["--run-dir", str(run_dir)]
    for name, arguments in (
        ("warmup", ["warmup", *place]),
        ("train", ["train", *place]),
        (
            "evaluate",
            [
                "evaluate",
                *place,
                "--prompts",
                str(chats),
                "--num-prompts",
                "2",
                "--max-new-tokens",
                "32",
            ],
        ),
    ):
        status = stage(name, run_dir, arguments, options.limit_s)
        if status:
            return status
        if name == "train":
            show(**figures(run_dir, options.steps // 3))
    show(evaluation=json.loads((run_dir / "evaluation.json").read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
