"""Whole training runs on an NVIDIA GPU: flex attention compiled through the gate, real threads.

One GPU is enough: it then stands in every role, as two drafter threads on the same card do.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import events_of
from trainer.contract.exit_record import TrainerExit
from trainer.session import Session
from trainer.warmup import warm_up

MakeRun = Callable[..., Path]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # the first compile of a process takes most of a minute
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _on_gpus(run_dir: Path) -> Path:
    """Give the roles of a run the GPUs of this machine, one after another, all in turn."""
    manifest = json.loads((run_dir / "manifest.json").read_text())
    for number, gpu in enumerate(manifest["gpus"]):
        index = number % torch.cuda.device_count()
        gpu.update(uuid=f"GPU-{index}", index=index)
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    return run_dir


def _session(run_dir: Path, *, resume: bool = False) -> Session:
    """Return a session that begins without graphs, as in a process of its own."""
    torch._dynamo.reset()
    return Session(run_dir, resume=resume)


CUDA: dict[str, Any] = {
    "run": {"device": "cuda"},
    "draft": {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
}
PACKED: dict[str, Any] = {"data": {"packing": True, "token_budget": 256, "max_anchors": 32}}


def test_evaluation_in_training_compiles_nothing_and_stops_no_thread(
    make_run: MakeRun, tiny_chats: Path
) -> None:
    evaluation = {"every_steps": 4, "prompts": str(tiny_chats), "num_prompts": 3}
    sections: dict[str, Any] = {"evaluation": evaluation, "optim": {"ema_decay": 0.9}}
    run_dir = _on_gpus(make_run(drafters=2, targets=2, **CUDA, **PACKED, **sections))
    session = _session(run_dir)
    assert session.train() is TrainerExit.FINISHED
    assert [event["step"] for event in events_of(run_dir, "eval")] == [4, 8, 12]
    assert all(event["ema"]["acceptance_length"] >= 1 for event in events_of(run_dir, "eval"))
    assert {event["thread"] for event in events_of(run_dir, "compile")} == {"MainThread"}
    first, second = (replica.draft.state_dict() for replica in session.replicas)
    assert all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first)


def test_packed_run_compiles_in_its_warm_up_alone(make_run: MakeRun) -> None:
    run_dir = _on_gpus(make_run(drafters=2, **CUDA, **PACKED))
    assert _session(run_dir).train() is TrainerExit.FINISHED
    compiles = events_of(run_dir, "compile")
    assert compiles
    assert {event["thread"] for event in compiles} == {"MainThread"}
    assert all(event["expected"] for event in compiles)
    seqs = {event["phase"]: event["seq"] for event in events_of(run_dir, "phase")}
    # The target's layers before the warm-up, with their self-test, and the draft in it.
    assert all(event["seq"] < seqs["train"] for event in compiles)
    assert any(event["seq"] > seqs["warmup"] for event in compiles)
    assert all(value > 0 for value in events_of(run_dir, "step")[-1]["memory_bytes"].values())


def test_flex_on_the_gpu_takes_the_same_steps_as_sdpa_on_the_cpu(make_run: MakeRun) -> None:
    on_gpu = _on_gpus(make_run("gpu", **CUDA, **PACKED))
    on_cpu = make_run("cpu", draft=CUDA["draft"], **PACKED)
    for run_dir in (on_gpu, on_cpu):
        _session(run_dir).train()
    losses = [[event["loss"] for event in events_of(r, "step")] for r in (on_gpu, on_cpu)]
    # The first weights are drawn on the device, so runs differ; a loss far off would still tell.
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_rows_of_many_lengths_compile_one_at_a_time_while_others_train(make_run: MakeRun) -> None:
    rows = {"data": {"max_length": 32, "token_budget": 128, "max_batch_size": 3}}
    run_dir = _on_gpus(make_run(drafters=2, targets=2, **CUDA, **rows))
    assert _session(run_dir).train() is TrainerExit.FINISHED
    compiles = events_of(run_dir, "compile")
    assert len(compiles) >= 2
    assert all(event["expected"] for event in compiles)


def test_declared_row_lengths_compile_in_the_warm_up_alone(make_run: MakeRun) -> None:
    rows = {"max_length": 32, "token_budget": 128, "max_batch_size": 3, "row_lengths": [12, 32]}
    run_dir = _on_gpus(make_run(**CUDA, data=rows))
    assert _session(run_dir).train() is TrainerExit.FINISHED
    compiles = events_of(run_dir, "compile")
    assert {event["thread"] for event in compiles} == {"MainThread"}
    assert not any(event["sealed"] or event["fallback"] for event in compiles)
    cards = {f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))}
    assert {event["device"] for event in compiles} == cards  # one role each, if there are two
    (started,) = events_of(run_dir, "started")
    assert started["num_compiles"] == sum(event["num_graphs"] for event in compiles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafters_keep_identical_replicas(make_run: MakeRun, dtype: str) -> None:
    draft = CUDA["draft"] | {"dtype": dtype}
    run_dir = _on_gpus(make_run(drafters=3, targets=2, run=CUDA["run"], draft=draft, **PACKED))
    session = _session(run_dir)
    session.train()
    first, *others = (replica.draft.cpu().state_dict() for replica in session.replicas)
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_bf16_run_stops_and_resumes(make_run: MakeRun) -> None:
    draft = CUDA["draft"] | {"dtype": "bfloat16"}
    run_dir = _on_gpus(
        make_run(run=CUDA["run"], draft=draft, target={"dtype": "bfloat16"}, **PACKED)
    )
    assert _session(run_dir).train() is TrainerExit.FINISHED
    (run_dir / "checkpoints" / "step_00000012" / "COMPLETE.json").unlink()
    assert _session(run_dir, resume=True).train() is TrainerExit.FINISHED
    losses: dict[int, list[float]] = {}
    for event in events_of(run_dir, "step"):
        losses.setdefault(event["step"], []).append(event["loss"])
    for step in range(9, 13):
        first, again = losses[step]
        assert again == pytest.approx(first, rel=2e-2)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with FP8 products",
)
def test_head_in_fp8_is_tested_told_and_trains_as_bfloat16_does(make_run: MakeRun) -> None:
    draft = CUDA["draft"] | {"dtype": "bfloat16"}
    losses = []
    for products in ("off", "logits", "both"):
        loss = {"head_fp8": products}
        run_dir = _on_gpus(
            make_run(products, drafters=2, run=CUDA["run"], draft=draft, loss=loss, **PACKED)
        )
        session = _session(run_dir)
        assert session.train() is TrainerExit.FINISHED
        losses.append([event["loss"] for event in events_of(run_dir, "step")])
        told = [event for event in events_of(run_dir, "phase") if event["phase"] == "self-test"]
        assert {one["head_fp8"] for one in told} == {products} - {"off"}
        assert all(0.02 < one["logits_error_frac"] < 0.06 for one in told), told
        assert all(one["gradient_cosine"] > 0.99 for one in told), told
        first, second = session.replicas
        assert (first.head.fp8 is second.head.fp8) == (
            products == "off" or first.device == second.device
        )
        assert not any(event["sealed"] for event in events_of(run_dir, "compile"))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[2] == pytest.approx(losses[0], rel=0.05)


def test_warm_up_compiles_on_each_drafter_device(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _on_gpus(make_run(**CUDA, **PACKED))
    torch._dynamo.reset()
    warm_up(run_dir)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    warmed = [line for line in lines if line["kind"] == "warmup"]
    assert len(warmed) == 1
    assert warmed[0]["num_compiles"] >= 1
    attention = warmed[0]["attention"]  # a fall to dense attention would have been an error
    assert 0 < attention["taken"] <= max(attention["at_most"], attention["scores"])
