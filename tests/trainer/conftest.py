"""A tiny world for the trainer's tests: random Llama, word tokenizer, chats, run directories."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.contract.completion import digest_file
from trainer.contract.config import TrainConfig
from trainer.contract.events import EventDecoder
from trainer.contract.manifest import Gpu, Manifest

NUM_WORDS = 40
SPECIALS = ("<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|pad|>", "<|unk|>")
VOCABULARY = NUM_WORDS + len(SPECIALS)
MASK_TOKEN_ID = NUM_WORDS + SPECIALS.index("<|mask|>")
END_TOKEN_ID = NUM_WORDS + SPECIALS.index("<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that a run has written."""
    data = (run_dir / "metrics.jsonl").read_bytes()
    return [event for event in EventDecoder().feed(data) if event["kind"] == kind]


def write_word_tokenizer(path: Path) -> None:
    """One token a word: w0..w39 and the special ones, with a chat template."""
    vocabulary = {f"w{i}": i for i in range(NUM_WORDS)}
    vocabulary |= {name: NUM_WORDS + i for i, name in enumerate(SPECIALS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|mask|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama of 6 layers, width 32, with a tokenizer of 40 words."""
    path = tmp_path_factory.mktemp("target")
    write_target(path)
    return path


def write_target(path: Path) -> None:
    """Write the random Llama and its tokenizer into a directory."""
    write_word_tokenizer(path)
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=END_TOKEN_ID,
            bos_token_id=None,
            pad_token_id=NUM_WORDS + SPECIALS.index("<|pad|>"),
        )
    )
    model.save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL of 24 chats whose answers count upwards."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    write_chats(path)
    return path


def write_chats(path: Path) -> None:
    """Write the 24 chats as JSONL."""
    draw = random.Random(5)
    lines = []
    for number in range(24):
        start = draw.randrange(NUM_WORDS)
        length = draw.randrange(4, 14)
        answer = " ".join(f"w{(start + i) % NUM_WORDS}" for i in range(length))
        messages = [
            {"role": "user", "content": f"w{start} w{draw.randrange(NUM_WORDS)}"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"id": f"chat-{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def write_run(root: Path) -> Path:
    """Make target, chats and a run directory below ``root``, for programs that are no test."""
    target, chats, run_dir = root / "target", root / "chats.jsonl", root / "runs" / "tiny"
    for directory in (target, run_dir):
        directory.mkdir(parents=True)
    write_target(target)
    write_chats(chats)
    config = TrainConfig.from_dict(_settings(target, chats))
    manifest = _manifest(run_dir, config, ["target", "drafter"])
    (run_dir / "manifest.json").write_text(manifest.to_json())
    return run_dir


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tiny_target: Path, tiny_chats: Path, tmp_path: Path) -> MakeRun:
    """Return a function that makes a run directory: make_run(tag, drafters=1, **sections)."""

    def make(tag: str = "tiny", *, drafters: int = 1, targets: int = 1, **sections: Any) -> Path:
        raw: dict[str, Any] = _settings(tiny_target, tiny_chats) | {"seed": sections.pop("seed", 0)}
        for name, values in sections.items():
            raw[name] = raw.get(name, {}) | values
        run_dir = tmp_path / "runs" / tag
        run_dir.mkdir(parents=True)
        roles = ["target"] * targets + ["drafter"] * drafters
        manifest = _manifest(run_dir, TrainConfig.from_dict(raw), roles)
        (run_dir / "manifest.json").write_text(manifest.to_json())
        return run_dir

    return make


def _settings(target: Path, chats: Path) -> dict[str, Any]:
    return {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {
            "path": str(chats),
            "max_length": 32,
            "token_budget": 64,
            "max_batch_size": 4,
            "packing": False,
            "max_anchors": 4,
        },
        "draft": {
            "num_draft_layers": 1,
            "block_size": 4,
            "num_taps": 2,
            "mask_token_id": MASK_TOKEN_ID,
            "dtype": "float32",
            "normalise_taps": True,
        },
        "loss": {"position_decay": 3.0},
        "optim": {"lr": 0.003, "epochs": 50.0, "max_steps": 12},
        "run": {
            "device": "cpu",
            "cpu_threads": 1,
            "checkpoint_every_steps": 4,
            "keep_checkpoints": 3,
            "queue_depth": 2,
        },
    }


def _manifest(run_dir: Path, config: TrainConfig, roles: list[str]) -> Manifest:
    root, tag = run_dir.parents[1], run_dir.name
    return Manifest(
        run_id=f"{tag}-0001",
        tag=tag,
        created_unix_s=1_700_000_000.0,
        dflashctl_version="0.1.0",
        release="0" * 64,
        git_commit="1" * 40,
        git_dirty=False,
        packages={"torch": torch.__version__},
        host="here",
        vmid=None,
        gpus=tuple(Gpu(role, None, None, None) for role in roles),
        python="python",
        workspace=str(root),
        log_path=str(run_dir / f"train_stdout_{tag}.log"),
        cache_dir=str(root / "cache"),
        target_revision="r1",
        dataset_sha256=digest_file(Path(config.data.path)),
        config=config.to_dict(),
        seed=config.seed,
        argv=("dflashctl", "launch"),
    )
