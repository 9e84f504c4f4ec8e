"""Kill -9 at a random moment, resume, and end with the same weights to the bit."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer import checkpoint
from trainer.contract.events import EventDecoder
from trainer.session import Session

MakeRun = Callable[..., Path]
SETTINGS = {
    "optim": {"max_steps": 60, "epochs": 300.0, "name": "muon"},
    "run": {"checkpoint_every_steps": 5},
    "target": {"cache_bytes": 0},
}


@pytest.mark.parametrize("attempt", range(2))
def test_killed_and_resumed_run_ends_with_the_uninterrupted_runs_weights(
    make_run: MakeRun, attempt: int
) -> None:
    straight, killed = make_run("straight", **SETTINGS), make_run("killed", **SETTINGS)
    trainer = subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", "--run-dir", str(killed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert trainer.stdout is not None
    step = random.Random().randrange(6, 52)
    told: list[str] = []
    for line in trainer.stdout:
        told.append(line)
        if line.startswith(f"step {step}/"):
            break
    time.sleep(random.Random().random() * 0.02)  # not always right after the line was written
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate(timeout=10)
    assert trainer.returncode == -signal.SIGKILL, "".join(told[-5:])

    Session(killed, resume=True).train()
    Session(straight, resume=False).train()
    first, second = (
        checkpoint.load(run_dir / "checkpoints" / "step_00000060") for run_dir in (straight, killed)
    )
    different = [n for n in first.masters if not torch.equal(first.masters[n], second.masters[n])]
    assert different == [], f"attempt {attempt}, killed at step {step}"
    assert all(torch.equal(first.optimizer[n], second.optimizer[n]) for n in first.optimizer)
    assert first.trained == second.trained
    events = list(EventDecoder().feed((killed / "metrics.jsonl").read_bytes()))
    assert [event["seq"] for event in events] == list(range(len(events)))  # one sequence, no gap
    resumed = next(e["step"] for e in events if e["kind"] == "phase" and e["phase"] == "resume")
    assert resumed % 5 == 0
    assert step - 5 <= resumed <= step + 20
