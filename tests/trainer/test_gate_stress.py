"""What the stress of the compile gate counts; its starts are taken by hand (compile_race.md)."""

import os
import signal
from typing import Any

import pytest

from benchmarks.gate_starts import Tell, Work
from benchmarks.gate_stress import Limits, Outcome, Tally, fork_start


def _outcome(*lines: dict[str, Any], **facts: int) -> Outcome:
    outcome = Outcome("without-gate", 0, **facts)
    for line in lines:
        outcome.take(line)
    return outcome


def test_each_start_counts_once_and_a_crash_or_a_hang_is_a_failure() -> None:
    tally = Tally("without-gate")
    good = {"thread": 0, "silent": [], "wrong": False}
    end = {"ended": 18, "seconds": 1.0}
    tally.take(_outcome(good, good, end))
    tally.take(_outcome({"thread": 1, "raised": "KeyError: 'custom'"}, good | {"silent": ["a"]}))
    tally.take(_outcome(good, crashed=1))
    tally.take(_outcome(hung=1))
    assert (tally.starts, tally.failed, tally.steps, tally.seconds) == (4, 3, 5, 1.0)
    assert tally.row() == "| no gate | 4 | 3 | 1 | 1 | 1 (1) | 1 (1) | 0 | 5 |"
    assert tally.said == {"KeyError: 'custom'": 1, "a ran uncompiled": 1}


def test_each_thread_meets_every_shape_and_steps_on_none_before_its_first() -> None:
    plans = [Work(seed=5).plan(thread) for thread in range(3)]
    for plan in plans:
        assert (len(plan), set(plan)) == (12, {0, 1, 2})
        for place in range(0, 12, 4):
            assert plan[place] not in plan[:place], "each fourth step has a new shape"
            assert set(plan[place + 1 : place + 4]) <= set(plan[: place + 1])
    assert len({tuple(plan) for plan in plans}) == 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # numpy has a thread
def test_start_that_crashes_or_hangs_is_told_with_its_stacks() -> None:
    def crash(tell: Tell) -> None:
        tell({"thread": 0, "silent": [], "wrong": False})
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(tell: Tell) -> None:
        tell({"thread": 0, "silent": [], "wrong": False})
        signal.pause()

    crashed = fork_start("gate", 0, crash, Limits(limit_s=60.0, silence_s=60.0))
    hung = fork_start("gate", 0, hang, Limits(limit_s=60.0, silence_s=3.0))
    assert (crashed.crashed, crashed.hung, crashed.steps) == (1, 0, 1)
    assert crashed.errors == {"SIGSEGV": 1}
    assert crashed.stacks[0].startswith("crashed in File")
    assert "in crash" in crashed.stacks[0]
    assert (hung.crashed, hung.hung, hung.steps) == (0, 1, 1)
    assert "in hang" in hung.stacks[0]
