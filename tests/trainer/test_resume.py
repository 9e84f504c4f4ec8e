"""Kill -9 at a random moment, resume, and end as a run that was never killed: to the bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_loop import kill_once, outcome
from tests.trainer.conftest import events_of
from trainer.contract.events import EventDecoder
from trainer.session import Session

pytestmark = pytest.mark.timeout(120)  # each trains twice, with evaluations

MakeRun = Callable[..., Path]
NUM_STEPS = 60


def _settings(heldout: Path) -> dict[str, Any]:
    return {
        "optim": {"max_steps": NUM_STEPS, "epochs": 300.0, "name": "muon", "ema_decay": 0.9},
        "run": {"checkpoint_every_steps": 5, "log_samples": True, "export_at_end": False},
        "evaluation": {
            "every_steps": 10,
            "prompts": str(heldout),
            "num_prompts": 1,
            "max_new_tokens": 6,
        },
        "target": {"cache_bytes": 0},
    }


def _require_equal_ends(straight: Path, killed: Path, moment: str, **roles: int) -> None:
    """Kill one of two equal runs, resume it in this process, and compare."""
    seed = random.randrange(1 << 32)
    kill = kill_once(killed, moment, random.Random(seed), resume=False)
    Session(killed, resume=True).train()
    Session(straight, resume=False).train()
    first, second = outcome(straight, NUM_STEPS), outcome(killed, NUM_STEPS)
    why = f"seed {seed}, {kill}, {roles}"
    assert first.visits == second.visits, why
    assert first.trained == second.trained, why
    assert first.trained.samples == first.visits.total(), why
    assert first.digest == second.digest, why
    assert first.evaluations == second.evaluations, why
    # The schedule goes on where it was: of each step the rate is that of the other run.
    rates = [{e["step"]: e["lr"] for e in events_of(run, "step")} for run in (straight, killed)]
    assert rates[0] == rates[1], why
    events = list(EventDecoder().feed((killed / "metrics.jsonl").read_bytes()))
    assert [event["seq"] for event in events] == list(range(len(events)))  # one sequence, no gap


@pytest.mark.parametrize("moment", ["checkpoint", "evaluate"])
def test_killed_and_resumed_run_ends_with_the_uninterrupted_runs_weights(
    make_run: MakeRun, tiny_chats: Path, moment: str
) -> None:
    settings = _settings(tiny_chats)
    _require_equal_ends(make_run("straight", **settings), make_run("killed", **settings), moment)


def test_killed_run_of_several_threads_trains_on_the_same_multiset_of_samples(
    make_run: MakeRun, tiny_chats: Path
) -> None:
    settings = _settings(tiny_chats)
    settings["optim"] |= {"grad_accumulation": 2}
    roles = {"drafters": 2, "targets": 2}
    straight, killed = (make_run(tag, **roles, **settings) for tag in ("straight", "killed"))
    _require_equal_ends(straight, killed, "step", **roles)
    visits = outcome(straight, NUM_STEPS).visits
    last = max(epoch for epoch, _sample in visits)
    assert last > 10
    assert all(visits[epoch, sample] == 1 for epoch in range(last) for sample in range(24))
