"""Every kind of target goes the whole road: train, resume, evaluate without loss, export, load."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import tiny_targets
from tests.trainer.conftest import (
    END_TOKEN_ID,
    NUM_WORDS,
    VOCABULARY,
    write_word_tokenizer,
)
from tests.trainer.method.conftest import END as END_BYTE_ID
from tests.trainer.method.conftest import MASK as MASK_BYTE_ID
from tests.trainer.method.conftest import VOCAB as BYTES
from tests.trainer.method.conftest import make_byte_tokenizer
from trainer import checkpoint
from trainer.__main__ import main
from trainer.evaluate import decode_plain
from trainer.export import load_export
from trainer.model.target import Target

MakeRun = Callable[..., Path]
BATCHING = {"llama": "packed", "moe": "packed", "hybrid": "rows", "smollm2": "packed"}
NUM_ANSWER = 32


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Evaluation and export run in this thread, beside others on the machine."""
    torch.set_num_threads(1)


def save(made: Any, path: Path, *, end: int = END_TOKEN_ID) -> Path:
    made.config.get_text_config().eos_token_id = end
    made.generation_config.eos_token_id = end
    made.save_pretrained(path)
    return path


def command(run_dir: Path, name: str, *options: str) -> int:
    return main([name, "--run-dir", str(run_dir), *options])


def masters(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    found = checkpoint.load(run_dir / "checkpoints" / f"step_{step:08d}").masters
    return {name: tensor.clone() for name, tensor in found.items()}  # not a map of the file


def target_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "manifest.json").read_text())["config"]["target"]["path"])


def evaluation(run_dir: Path, prompts: Path, *options: str) -> dict[str, Any]:
    assert command(run_dir, "evaluate", "--prompts", str(prompts), *options) == 0
    return dict(json.loads((run_dir / "evaluation.json").read_text()))


def goes_the_whole_road(run_dir: Path, prompts: Path, steps: tuple[int, int]) -> None:
    """Train to the last step, again from the checkpoint before, evaluate, export and load."""
    before, last = steps
    assert command(run_dir, "train") == 0
    straight = masters(run_dir, last)
    (run_dir / "checkpoints" / f"step_{last:08d}" / "COMPLETE.json").unlink()
    assert checkpoint.load(run_dir / "checkpoints" / f"step_{before:08d}").step == before
    assert command(run_dir, "train", "--resume") == 0
    resumed = masters(run_dir, last)
    assert [name for name in straight if not torch.equal(straight[name], resumed[name])] == []
    found = evaluation(run_dir, prompts, "--num-prompts", "3", "--max-new-tokens", "10")
    assert (found["draft"], found["target_dtype"]) == ("export", "float32")
    assert (found["num_prompts"], found["num_equal"], found["lossless"]) == (3, 3, True)
    assert 1.0 <= found["acceptance_length"] <= found["block_size"]
    assert command(run_dir, "export") == 0
    loaded = dict(load_export(run_dir / "export").named_parameters())
    assert loaded.keys() == resumed.keys()
    assert torch.equal(loaded["norm.weight"], resumed["norm.weight"])
    assert main(["validate", str(run_dir / "export"), "--target", target_of(run_dir)]) == 0


@pytest.mark.parametrize("kind", ["llama", "moe", "hybrid"])
def test_a_tiny_target_trains_resumes_evaluates_and_exports(
    kind: str,
    make_run: MakeRun,
    tiny_chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Bytes for all: transformers gives Qwen3.5 its own splitting into words whatever the files say.
    target = save(tiny_targets.KINDS[kind](vocab_size=BYTES), tmp_path / kind, end=END_BYTE_ID)
    make_byte_tokenizer().save_pretrained(target)
    run_dir = make_run(
        target={"path": str(target)},
        data={"max_length": 96, "token_budget": 192},
        draft={"target_layer_ids": [0, 2], "mask_token_id": MASK_BYTE_ID},
        optim={"max_steps": 8},
    )
    goes_the_whole_road(run_dir, tiny_chats, (4, 8))
    assert f"target batching {BATCHING[kind]}: a document differs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smollm2_trains_resumes_evaluates_and_exports(
    make_run: MakeRun, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (files("dflashctl.demo") / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(sorted(lines, key=len)[:8]) + "\n")
    run_dir = make_run(
        target={"path": str(smollm2), "cache_bytes": 1 << 28},
        data={"path": str(chats), "max_length": 96, "token_budget": 192, "max_batch_size": 2},
        draft={"num_taps": 5, "mask_token_id": 16, "intermediate_size": 256},
        optim={"max_steps": 4, "lr": 0.001},
        run={"checkpoint_every_steps": 2},
    )
    goes_the_whole_road(run_dir, chats, (2, 4))
    assert f"target batching {BATCHING['smollm2']}: a document" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_samples_learnt_by_heart_are_accepted_more_than_three_at_a_time(
    make_run: MakeRun, tmp_path: Path
) -> None:
    made = tiny_targets.llama(vocab_size=VOCABULARY, initializer_range=0.4)
    made.lm_head.weight.data[NUM_WORDS:] = 0  # it answers in words alone, and never ends
    target = save(made, tmp_path / "target")
    write_word_tokenizer(target)
    chats = tmp_path / "own.jsonl"
    chats.write_text("".join(own_answer(Target(made, (0, 3)), number) for number in range(10)))
    run_dir = make_run(
        target={"path": str(target)},
        data={
            "path": str(chats),
            "max_length": 48,
            "token_budget": 480,
            "max_batch_size": 10,
            "max_anchors": 32,
        },
        draft={"block_size": 8, "target_layer_ids": [0, 3], "intermediate_size": 96},
        loss={"position_decay": None},
        optim={"max_steps": 120, "epochs": 120.0, "lr": 0.02},
        run={"checkpoint_every_steps": 120},
    )
    assert command(run_dir, "train") == 0
    found = evaluation(run_dir, chats, "--max-new-tokens", str(NUM_ANSWER))
    assert (found["num_prompts"], found["block_size"]) == (10, 8)
    assert found["lossless"] is True
    assert found["acceptance_length"] > 3.0


def own_answer(target: Target, number: int) -> str:
    """One chat whose answer the target itself gives to the prompt, as a line of JSON."""
    words = [f"w{(number * 7 + i * 3) % NUM_WORDS}" for i in range(3)]
    user, assistant, end = (NUM_WORDS + i for i in range(3))
    prompt = [user, *(int(word[1:]) for word in words), end, assistant]
    answer = decode_plain(target, prompt, NUM_ANSWER).tokens
    assert len(answer) == NUM_ANSWER
    assert len(set(answer)) >= 8  # no loop over a few words, which any draft would learn
    messages = [
        {"role": "user", "content": " ".join(words)},
        {"role": "assistant", "content": " ".join(f"w{token}" for token in answer)},
    ]
    return json.dumps({"id": f"own-{number}", "messages": messages}) + "\n"
