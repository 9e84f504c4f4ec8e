"""Whole runs of the successors: several drafters, events, resume, export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import checkpoint
from trainer.contract.events import EventDecoder
from trainer.contract.exit_record import TrainerExit
from trainer.export import load_export
from trainer.session import Session

MakeRun = Callable[..., Path]
SMALL = {"selector_rank": 6, "selector_top_k": 4, "gru_hidden_dim": 10, "emb_dim": 6}
SETTINGS: dict[str, Any] = {
    "draft": SMALL,
    "optim": {"max_steps": 8, "name": "muon"},
    "run": {"checkpoint_every_steps": 4},
}


def run_of(make_run: MakeRun, variant: str, tag: str, drafters: int = 1, **draft: Any) -> Path:
    settings = SETTINGS | {"draft": SMALL | {"variant": variant} | draft}
    return make_run(tag, drafters=drafters, **settings)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    data = (run_dir / "metrics.jsonl").read_bytes()
    return [event for event in EventDecoder().feed(data) if event["kind"] == "step"]


@pytest.mark.parametrize("variant", ["dflash2", "domino"])
def test_drafters_keep_identical_replicas_and_the_export_is_theirs(
    make_run: MakeRun, variant: str
) -> None:
    run_dir = run_of(make_run, variant, "two", drafters=2)
    session = Session(run_dir, resume=False)
    assert session.train() is TrainerExit.FINISHED
    first, second = (dict(replica.draft.named_parameters()) for replica in session.replicas)
    exported = load_export(run_dir / "export")
    assert exported.config.variant == variant
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        if name != "fc.weight":  # holds the tap scales
            assert torch.equal(tensor, exported.get_parameter(name))
    moved = [n for n, t in second.items() if n.startswith(("candidate_", "prefix_", "embed_proj"))]
    assert moved
    assert all(bool(second[name].any()) for name in moved)  # the successor codebook began at zero


def test_steps_tell_how_often_the_truth_is_among_the_candidates(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_of(make_run, "dflash2", "recall", drafters=2, dtype="bfloat16")
    Session(run_dir, resume=False).train()
    steps = steps_of(run_dir)
    told = capsys.readouterr().out.splitlines()
    assert sum(" candidate_recall_frac " in line for line in told) == len(steps) == 8
    recalls = [step["candidate_recall_frac"] for step in steps]
    # 4 candidates of 46 tokens are right by chance in 9 of 100 cases; a step has 100 slots or so
    assert all(0 <= recall <= 1 for recall in recalls)
    assert sum(recalls) > 0
    assert all(step["selector_loss"] > 0 for step in steps if step["candidate_recall_frac"])


def test_weight_of_the_base_falls_over_half_of_the_steps(make_run: MakeRun) -> None:
    run_dir = run_of(make_run, "domino", "share", drafters=2, dtype="bfloat16")
    Session(run_dir, resume=False).train()
    steps = steps_of(run_dir)
    assert [step["lambda_base"] for step in steps] == [1, 0.75, 0.5, 0.25, 0, 0, 0, 0]
    assert [("base_loss" in step) for step in steps] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("variant", ["dflash2", "domino"])
def test_resumed_run_ends_with_the_uninterrupted_runs_weights(
    make_run: MakeRun, variant: str
) -> None:
    straight, cut = (run_of(make_run, variant, tag) for tag in ("straight", "cut"))
    for run_dir in (straight, cut):
        Session(run_dir, resume=False).train()
    (cut / "checkpoints" / "step_00000008" / "COMPLETE.json").unlink()
    Session(cut, resume=True).train()
    first, second = (
        checkpoint.load(run_dir / "checkpoints" / "step_00000008") for run_dir in (straight, cut)
    )
    assert first.masters.keys() == second.masters.keys()
    assert all(torch.equal(first.masters[n], second.masters[n]) for n in first.masters)
    assert all(torch.equal(first.optimizer[n], second.optimizer[n]) for n in first.optimizer)
