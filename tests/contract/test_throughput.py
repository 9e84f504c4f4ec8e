"""A run that has become slow is told so, soon; one that only paused is not."""

import random

import pytest

from trainer.contract.throughput import Throughput

TOKENS = 49_152  # of a step


class Run:
    """Steps one after the other, by a clock of its own."""

    def __init__(self) -> None:
        self.at_s, self.tokens, self.watch = 0.0, 0, Throughput()
        self.watch.note(0.0, 0)

    def steps(self, count: int, tokens_per_s: float) -> float | None:
        """Take steps; returns the seconds until a fall was told, None when it was not."""
        began, told = self.at_s, None
        for _ in range(count):
            self.at_s += TOKENS / tokens_per_s
            self.tokens += TOKENS
            self.watch.note(self.at_s, self.tokens)
            if told is None and self.watch.fall is not None:
                told = self.at_s - began
        return told


def test_a_fall_to_a_third_of_the_speed_is_told_within_a_minute() -> None:
    run = Run()
    assert run.steps(60, 12_800) is None  # 3.84 s each
    told_s = run.steps(10, 4_400)  # 11.2 s each
    assert told_s is not None
    assert told_s < 60
    assert str(run.watch.fall) == "4.40 Ktok/s, 34 % of this run's own 12.80"


def test_a_fall_of_a_run_with_short_steps_is_told_within_a_minute_too() -> None:
    run = Run()
    assert run.steps(2000, 400_000) is None  # 0.12 s each
    told_s = run.steps(400, 137_500)  # 0.36 s each
    assert told_s is not None
    assert told_s < 60


def test_a_fall_stays_told_however_long_it_lasts_and_ends_with_the_usual_speed() -> None:
    run = Run()
    run.steps(60, 12_800)
    assert run.steps(1000, 4_400) is not None
    assert str(run.watch.fall) == "4.40 Ktok/s, 34 % of this run's own 12.80"
    run.steps(10, 10_000)  # 78 %: better, and not back
    assert run.watch.fall is not None
    run.steps(10, 12_000)
    assert run.watch.fall is None


def test_a_little_slower_is_no_fall() -> None:
    run = Run()
    run.steps(60, 12_800)
    assert run.steps(100, 9_200) is None  # 72 %


@pytest.mark.parametrize(("share", "ratio"), [(0.5, 2.0), (0.2, 1.5), (0.1, 2.0)])
def test_rows_of_two_kinds_are_no_fall_until_both_are_slow(share: float, ratio: float) -> None:
    run, draw = Run(), random.Random(1)

    def some(count: int, tokens_per_s: float) -> float | None:
        """Take steps of which a ``share`` is so much slower than the others."""
        told, began = None, run.at_s
        for _ in range(count):
            slow = draw.random() < share
            run.steps(1, tokens_per_s / (ratio if slow else 1.0))
            if told is None and run.watch.fall is not None:
                told = run.at_s - began
        return told

    assert some(3000, 12_800) is None
    told_s = some(20, 12_800 / 3)
    assert told_s is not None
    assert told_s < 90  # a minute, but for steps of half a minute


def test_one_slow_step_is_no_fall() -> None:
    run = Run()
    run.steps(60, 12_800)
    for _ in range(20):
        assert run.steps(1, 200) is None  # four minutes
        assert run.steps(9, 12_800) is None


def test_nothing_is_told_before_the_usual_speed_is_known() -> None:
    run = Run()
    run.steps(15, 12_800)
    assert run.steps(6, 4_400) is None


def test_pauses_and_clocks_that_jump_are_no_fall() -> None:
    run = Run()
    run.steps(60, 12_800)
    for _ in range(20):
        run.at_s += 100.0
        run.watch.pause(100.0)
        assert run.steps(1, 12_800) is None
    for _ in range(20):
        run.at_s += 5000.0
        run.watch.begin()
        assert run.steps(1, 12_800) is None
        run.at_s -= 4000.0  # the clock was set back
        assert run.steps(1, 12_800) is None
    assert run.steps(6, 4_400) is not None


def test_a_fall_is_told_as_soon_after_the_clock_was_set_back_or_forth() -> None:
    for moved_s in (-3600.0, 3600.0):
        run = Run()
        run.steps(60, 12_800)
        run.at_s += moved_s
        assert run.steps(20, 12_800) is None
        told_s = run.steps(10, 4_400)
        assert told_s is not None
        assert told_s < 60


@pytest.mark.parametrize("far_s", [1e20, 1e300, float("inf")])
def test_moments_that_no_clock_shows_are_no_error(far_s: float) -> None:
    run = Run()
    run.steps(60, 12_800)
    run.at_s = far_s
    run.steps(5, 12_800)
