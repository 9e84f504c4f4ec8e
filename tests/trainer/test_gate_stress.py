"""What the stress of the compile gate counts; its starts are taken by hand (compile_race.md)."""

from benchmarks.gate_stress import Tally, Work


def test_each_start_counts_once_and_a_crash_or_a_hang_is_a_failure() -> None:
    tally = Tally("without-gate")
    good = {"steps": 60, "raised": 0, "silent": 0, "wrong": 0, "errors": {}, "seconds": 1.0}
    tally.take(good)
    tally.take(good | {"raised": 2, "silent": 5, "errors": {"KeyError: 'custom'": 2}})
    tally.take({"crashed": 1, "errors": {"SIGSEGV": 1}, "seconds": 1.0})
    tally.take({"hung": 1, "errors": {"nothing after 9 s": 1}, "seconds": 9.0})
    assert (tally.starts, tally.failed, tally.steps, tally.seconds) == (4, 3, 120, 12.0)
    assert tally.row() == "| no gate | 4 | 3 | 1 | 1 | 1 (2) | 1 (5) | 0 | 120 |"
    assert tally.said == {"KeyError: 'custom'": 2, "SIGSEGV": 1, "nothing after 9 s": 1}


def test_each_thread_meets_every_shape_and_steps_on_none_before_its_first() -> None:
    plans = [Work(seed=5).plan(thread) for thread in range(3)]
    for plan in plans:
        assert (len(plan), set(plan)) == (20, {0, 1, 2, 3})
        for place in range(0, 20, 5):
            assert plan[place] not in plan[:place], "each fifth step has a new shape"
            assert set(plan[place + 1 : place + 5]) <= set(plan[: place + 1])
    assert len({tuple(plan) for plan in plans}) == 3
