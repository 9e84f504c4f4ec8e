"""The picture of a run, built from events written by hand."""

import pytest

from dflashctl.event_stream import Ended, Heartbeat, LogBytes, Notice, RunEvent
from dflashctl.run_view import Alert, Device, RunView


def step(number: int, t: float = 1000.0, **values: object) -> RunEvent:
    head = {"v": 1, "seq": number, "t_unix_s": t, "run_id": "r", "kind": "step"}
    usual = {"step": number, "num_steps": 500, "loss": 2.0, "tokens_per_s": 3000.0, "step_s": 0.5}
    return RunEvent(head | usual | values)


def event(kind: str, t: float = 1000.0, **values: object) -> RunEvent:
    return RunEvent({"v": 1, "seq": 0, "t_unix_s": t, "run_id": "r", "kind": kind} | values)


@pytest.fixture
def view() -> RunView:
    return RunView("fresh7", "kpro6/200")


def test_the_last_step_gives_the_figures(view: RunView) -> None:
    view.update(step(1, loss=3.0), 0.0)
    view.update(step(2, loss=2.5, q_hs=3), 0.1)
    assert (view.step["step"], view.step["q_hs"], list(view.losses)) == (2, 3, [3.0, 2.5])


def test_the_age_of_an_event_is_told_by_the_containers_clock(view: RunView) -> None:
    view.update(step(1, t=5000.0), 77.0)
    assert view.age_s(78.0) is None  # no beat yet: the container's clock is not known
    view.update(Heartbeat(5003.0, "alive"), 100.0)
    assert view.age_s(104.0) == pytest.approx(7.0)


def test_a_silent_run_is_a_stall_after_a_minute_and_not_before(view: RunView) -> None:
    view.update(step(1, t=5000.0), 0.0)
    view.update(Heartbeat(5000.0, "alive"), 100.0)
    assert view.alerts(159.0) == []
    assert view.alerts(161.0) == [Alert("stall", "no event for 61 s (the process is alive)")]


def test_gpus_that_the_container_lost_are_an_alert_until_they_are_back(
    view: RunView,
) -> None:  # F39
    view.update(step(1, t=5000.0), 0.0)
    view.update(Heartbeat(5000.0, "alive", "Failed to initialize NVML"), 0.0)
    (alert,) = view.alerts(1.0)
    said = "the container lost its GPUs (its nvidia-smi says: Failed to initialize NVML)"
    assert alert.text == f"{said}; pct reboot 200"
    view.update(Heartbeat(5002.0, "alive"), 2.0)
    assert view.alerts(3.0) == []


def test_target_threads_that_are_left_out_are_an_alert_until_they_are_back(view: RunView) -> None:
    left = {"thread": "target-1", "device": "GPU 4", "state": "stuck", "age_s": 45.0}
    view.update(event("warning", t=5000.0, text="...", **left), 0.0)
    view.update(step(1, t=5020.0), 20.0)
    view.update(Heartbeat(5025.0, "alive"), 25.0)
    (alert,) = view.alerts(28.0)
    assert alert.kind == "targets"
    # It had stood for 45 s, 28 s ago.
    text = "target-1 on GPU 4 has made no progress for 73 s; look at the GPU: dflashctl gpus"
    assert alert.text == text
    view.update(event("warning", t=5030.0, text="...", **left | {"state": "back"}), 30.0)
    assert view.alerts(31.0) == []
    view.update(event("warning", t=5040.0, text="...", **left | {"state": "failed"}), 40.0)
    (alert,) = view.alerts(41.0)
    assert alert.text.startswith("target-1 on GPU 4 failed and is left out; ")
    view.update(event("phase", t=5050.0, phase="data"), 50.0)  # resumed, with all of them
    assert view.alerts(51.0) == []


def test_slow_steps_are_no_stall(view: RunView) -> None:
    for number in range(5):
        view.update(step(number, t=5000.0, step_s=20.0), 0.0)
    view.update(Heartbeat(5000.0, "alive"), 0.0)
    assert view.alerts(190.0) == []  # ten times 20 s
    assert [alert.kind for alert in view.alerts(201.0)] == ["stall"]


def test_loading_and_compiling_may_be_silent_for_minutes(view: RunView) -> None:
    view.update(event("phase", t=5000.0, phase="load"), 0.0)
    view.update(Heartbeat(5000.0, "alive"), 0.0)
    assert view.alerts(800.0) == []
    assert [alert.kind for alert in view.alerts(901.0)] == ["stall"]


def _steps(view: RunView, first: int, seconds: list[float]) -> None:
    """Tell of steps of 12,000 tokens that took so long, one after the other."""
    t = view.step.get("t_unix_s", 1000.0)
    for number, took in enumerate(seconds, first):
        t += took
        # The trainer's own rate is a mean over 50 steps and does not move yet.
        view.update(step(number, t=t, tokens_total=12_000 * number, tokens_per_s=4000.0), 0.0)


def test_a_drop_of_throughput_is_told_within_a_minute_against_the_runs_own_baseline(
    view: RunView,
) -> None:
    _steps(view, 1, [3.0] * 40)
    assert view.alerts(0.0) == []
    _steps(view, 41, [9.0] * 6)  # a third of the speed, 54 seconds
    assert view.alerts(0.0) == [Alert("throughput", "1.33 Ktok/s, 33 % of this run's own 4.00")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"t_unix_s": "now"},
        {"t_unix_s": 10**400, "tokens_total": 10**400},
        {"t_unix_s": float("inf"), "tokens_total": float("nan")},
        {"tokens_total": None, "step_s": [3.0], "experiments": 5},
        {"kind": "compile", "sealed": True, "reasons": 5, "compile_s": 10**400},
    ],
)
def test_figures_that_are_none_are_passed_over(view: RunView, wrong: dict[str, object]) -> None:
    _steps(view, 1, [3.0] * 40)
    for number in range(41, 46):
        view.update(RunEvent(step(number).event | wrong), 0.0)
    assert [alert.kind for alert in view.alerts(0.0) if alert.kind != "compile"] == []


def test_one_slow_step_is_no_drop(view: RunView) -> None:
    _steps(view, 1, [3.0] * 40 + [120.0])
    assert view.alerts(0.0) == []


def test_evaluations_and_checkpoints_and_the_time_between_two_processes_are_no_drop(
    view: RunView,
) -> None:
    _steps(view, 1, [3.0] * 40)
    for number in range(41, 61):
        view.update(event("checkpoint", step=number - 1, checkpoint_s=20.0), 0.0)
        view.update(event("eval", step=number - 1, evaluation_s=40.0), 0.0)
        _steps(view, number, [63.0])
        assert view.alerts(0.0) == []
    for number in range(61, 70):
        view.update(event("phase", phase="data"), 0.0)
        _steps(view, number, [600.0])
        assert view.alerts(0.0) == []


def test_a_loss_that_is_not_finite_is_an_alert_that_stays(view: RunView) -> None:
    view.update(step(7, loss=None, num_non_finite=1), 0.0)
    view.update(step(8), 0.0)
    assert view.alerts(0.0) == [
        Alert("non-finite", "loss was not finite in 1 step events, last at step 7")
    ]


def test_a_lost_link_is_an_alert_until_it_is_back_and_is_no_stall(view: RunView) -> None:
    view.update(step(1, t=5000.0), 0.0)
    view.update(Heartbeat(5000.0, "alive"), 0.0)
    view.update(Notice("disconnected", "link lost; trying again in 4 s"), 100.0)
    assert view.alerts(300.0) == [Alert("link", "link lost; trying again in 4 s")]
    view.update(Notice("connected", "connected again after 9 s"), 301.0)
    view.update(Heartbeat(5301.0, "alive"), 301.0)
    assert [alert.kind for alert in view.alerts(302.0)] == ["stall"]


def test_a_run_that_ended_has_no_alerts(view: RunView) -> None:
    view.update(step(7, loss=None), 0.0)
    view.update(Ended("finished", None), 0.0)
    assert view.alerts(900.0) == []


@pytest.mark.parametrize(
    ("used", "peak", "devices"),
    [
        ([1.0, 2.0], [3.0, 4.0], [Device("0", 1.0, 3.0), Device("1", 2.0, 4.0)]),
        ({"cuda:0": 1}, {"cuda:0": 2}, [Device("cuda:0", 1.0, 2.0)]),
        (5, None, [Device("0", 5.0, None)]),
        (None, None, []),
    ],
)
def test_memory_is_told_per_device(
    view: RunView, used: object, peak: object, devices: list[Device]
) -> None:
    view.update(step(1, memory_bytes=used, peak_memory_bytes=peak), 0.0)
    assert view.devices == devices


def test_log_lines_and_the_unfinished_one_are_kept_in_order(view: RunView) -> None:
    view.update(LogBytes(b"one\ntw"), 0.0)
    assert view.log_tail == ["one", "tw"]
    view.update(LogBytes(b"o\n"), 0.0)
    assert view.log_tail == ["one", "two"]
    view.update(LogBytes(b"".join(b"%d\n" % i for i in range(1000))), 0.0)
    assert view.log_tail == [str(i) for i in range(800, 1000)]


def test_phases_compiles_warnings_and_checkpoints_are_noted(view: RunView) -> None:
    view.update(event("phase", phase="train"), 0.0)
    view.update(event("compile", compile_s=2.0), 0.0)
    view.update(event("compile", compile_s=1.5), 0.0)
    view.update(event("warning", text="slow disk"), 0.0)
    view.update(event("checkpoint", step=100), 0.0)
    assert (view.phase, view.num_compiles, view.compile_s) == ("train", 2, 3.5)
    assert (list(view.warnings), view.checkpoint["step"]) == (["slow disk"], 100)


@pytest.mark.parametrize(
    ("late", "says"),
    [
        ({"sealed": True, "reasons": ["tensor x: 4, not 5"]}, "tensor x: 4, not 5"),
        ({"expected": False, "reasons": []}, "a shape that the warm-up did not have"),
        ({"fallback": True}, "ran uncompiled"),
    ],
)
def test_a_compile_that_the_warm_up_should_have_made_is_an_alert_that_stays(
    view: RunView, late: dict[str, object], says: str
) -> None:
    view.update(event("compile", compile_s=2.0, sealed=False, expected=True), 0.0)
    assert view.alerts(0.0) == []
    view.update(event("compile", compile_s=1.5, thread="drafter-0", key="k", **late), 0.0)
    text = f"compiled once after the warm-up, last drafter-0 for k: {says}"
    assert [(alert.kind, alert.text) for alert in view.alerts(0.0)] == [("compile", text)]


def test_a_truncated_log_does_not_glue_its_old_half_line_to_the_new_one(view: RunView) -> None:
    view.update(LogBytes(b"half of an old li"), 0.0)
    view.update(Notice("truncated", "the log was truncated"), 0.0)
    view.update(LogBytes(b"new line\n"), 0.0)
    assert view.log_tail == ["new line"]
    assert list(view.notes) == ["the log was truncated"]


def test_gpus_of_others_are_an_alert_that_stays_with_the_command_to_type(view: RunView) -> None:
    view.update(LogBytes(b"half a "), 5.0)
    view.update(Notice("strayed", "x holds GPU 2 (GPU-c), and its own are GPU 0"), 5.0)
    view.update(LogBytes(b"line\n"), 5.0)
    view.update(Heartbeat(1000.0, "alive"), 6.0)
    (alert,) = view.alerts(6.0)
    assert alert.kind == "strayed"
    assert alert.text == f"x holds GPU 2 (GPU-c), and its own are GPU 0; dflashctl stop {view.tag}"
    assert view.log_tail == ["half a line"]
