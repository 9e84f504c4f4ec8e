"""Events and log lines, figures worked out by hand."""

import errno
import io
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.events import EventDecoder
from trainer.metrics import Flow, Metrics, SampleLog, StepFigures, Totals

CPU = {"cpu": torch.device("cpu")}


def _figures(step: int, loss: float = 2.0, tokens: int = 100) -> StepFigures:
    return StepFigures(
        step=step,
        epoch=0,
        loss=loss,
        lr=0.001,
        grad_norm=1.0,
        num_tokens=tokens,
        num_anchors=10,
        slot_accuracy=0.5,
        expected_accepted=0.75,
        step_s=0.1,
    )


def _events(path: Path) -> list[dict[str, Any]]:
    return list(EventDecoder().feed(path.read_bytes()))


@pytest.fixture
def told() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def metrics(tmp_path: Path, told: io.StringIO) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl", "run-1", CPU, console=told)


def test_step_event_has_totals_waits_of_the_interval_and_eta(
    metrics: Metrics, tmp_path: Path
) -> None:
    metrics.begin(4, 10, 1, Totals(1000, 50))
    metrics.step(_figures(5), Flow(3, 1.5, 0.5))
    metrics.step(_figures(6), Flow(2, 1.75, 2.5))
    first, second = _events(tmp_path / "metrics.jsonl")
    assert (first["tokens_total"], second["tokens_total"]) == (1100, 1200)
    assert (first["anchors_total"], second["anchors_total"]) == (60, 70)
    assert (first["target_wait_s"], second["target_wait_s"]) == (1.5, 0.25)
    assert (first["drafter_wait_s"], second["drafter_wait_s"]) == (0.5, 2.0)
    assert (first["q_hs"], second["q_hs"]) == (3, 2)
    # 2 steps took t seconds, 4 are left: 2 t; 200 tokens in t seconds.
    assert second["eta_s"] == pytest.approx(2 * 200 / second["tokens_per_s"], abs=0.06)
    assert second["anchors_per_s"] == pytest.approx(second["tokens_per_s"] / 10)
    assert second["memory_bytes"]["cpu"] > 10_000_000
    assert second["peak_memory_bytes"]["cpu"] >= second["memory_bytes"]["cpu"]


def test_only_every_nth_step_and_the_last_are_told(metrics: Metrics, tmp_path: Path) -> None:
    metrics.begin(0, 8, 3, Totals())
    for step in range(1, 9):
        metrics.step(_figures(step), Flow(0, step, 0.0))
    events = _events(tmp_path / "metrics.jsonl")
    assert [event["step"] for event in events] == [3, 6, 8]
    assert [event["tokens_total"] for event in events] == [300, 600, 800]
    assert [event["target_wait_s"] for event in events] == [3.0, 3.0, 2.0]


def test_loss_that_is_not_finite_is_null_and_counted(metrics: Metrics, tmp_path: Path) -> None:
    metrics.begin(0, 8, 1, Totals())
    metrics.step(_figures(1, loss=float("nan")), Flow(0, 0.0, 0.0))
    (event,) = _events(tmp_path / "metrics.jsonl")
    assert event["loss"] is None
    assert event["num_non_finite"] == 1


def test_log_has_one_short_line_for_each_event(metrics: Metrics, told: io.StringIO) -> None:
    metrics.phase("train", step=0)
    metrics.begin(0, 8, 1, Totals())
    metrics.step(_figures(1), Flow(4, 0.0, 0.0))
    metrics.compile(
        thread="drafter-0",
        key="cuda:1",
        compile_s=12.34,
        num_graphs=2,
        reasons=["size mismatch"],
        expected=True,
    )
    metrics.warning("something odd\nwith a stack")
    metrics.finished("finished", 8)
    lines = told.getvalue().splitlines()
    assert lines[0] == "train step 0"
    assert lines[1].startswith("step 1/8 loss 2.0000 lr 1.00e-03 grad 1.00 expected 1.75 tok/s ")
    assert " q_hs 4 eta " in lines[1]
    assert lines[2:] == [
        "compiled 2 graphs for cuda:1 on drafter-0 in 12.3 s: size mismatch",
        "warning: something odd",
        "with a stack",
        "finished after step 8",
    ]


def test_checkpoint_event_has_its_size(metrics: Metrics, tmp_path: Path) -> None:
    directory = tmp_path / "step_00000007"
    directory.mkdir()
    (directory / "a").write_bytes(b"12345")
    metrics.checkpoint(7, directory, 0.25)
    (event,) = _events(tmp_path / "metrics.jsonl")
    assert (event["path"], event["size_bytes"]) == ("step_00000007", 5)
    assert event["checkpoint_s"] == 0.25


def _measured(length: float) -> dict[str, Any]:
    interval = [length - 0.5, length + 0.5]
    return {"acceptance_length": length, "acceptance_length_interval": interval, "num_prompts": 4}


def test_evaluation_is_told_with_its_data_sets_the_average_and_the_best(
    metrics: Metrics, tmp_path: Path, told: io.StringIO
) -> None:
    datasets = {"math": _measured(3.0), "chat": _measured(2.0)}
    best = {"best_step": 40, "best_acceptance_length": 2.75, "best_weights": "ema"}
    values = _measured(2.5) | {"step": 80, "evaluation_s": 1.5, "datasets": datasets} | best
    metrics.evaluation(values | {"ema": _measured(2.25)})
    metrics.evaluation(values | {"ema": None, "datasets": {"chat": _measured(2.5)}})
    first, second = told.getvalue().splitlines()
    assert first == (
        "eval step 80 acceptance length 2.500 (2.000 to 3.000) on 4 prompts,"
        " math 3.000 (2.500 to 3.500), chat 2.000 (1.500 to 2.500),"
        " ema 2.250 (1.750 to 2.750), best 2.750 at step 40 (ema)"
    )
    assert second == (
        "eval step 80 acceptance length 2.500 (2.000 to 3.000) on 4 prompts,"
        " best 2.750 at step 40 (ema)"
    )
    event = _events(tmp_path / "metrics.jsonl")[0]
    assert (event["kind"], event["step"], event["datasets"]) == ("eval", 80, datasets)


def test_seconds_of_an_evaluation_do_not_count_in_the_rates(
    metrics: Metrics, tmp_path: Path
) -> None:
    began = time.monotonic()
    metrics.begin(0, 2, 1, Totals())
    time.sleep(0.3)  # stands for the decoding
    rest = {"step": 0, "datasets": {}, "ema": None}
    metrics.evaluation(_measured(2.0) | rest | {"evaluation_s": 0.3})
    metrics.step(_figures(1, tokens=100), Flow(0, 0.0, 0.0))
    took_s = time.monotonic() - began
    event = _events(tmp_path / "metrics.jsonl")[-1]
    assert event["tokens_per_s"] >= 100 / (took_s - 0.3)


def test_fall_of_throughput_is_warned_of_once_within_a_minute_though_few_steps_are_told(
    tmp_path: Path, told: io.StringIO
) -> None:
    now = 0.0
    metrics = Metrics(tmp_path / "metrics.jsonl", "r", CPU, console=told, clock=lambda: now)
    metrics.begin(0, 1000, 100, Totals())
    for step in range(1, 81):
        # Steps of 49,152 tokens at 12.8 and then at 4.4 ktok/s, for which the drafters wait.
        now += 3.84 if step <= 60 else 11.17
        metrics.step(_figures(step, tokens=49_152), Flow(0, 0.0, max(0.0, 7.33 * (step - 60))))
        if step == 60:
            assert _events(tmp_path / "metrics.jsonl") == []
        if step == 65:  # 56 s of slow steps
            (warning,) = _events(tmp_path / "metrics.jsonl")
    assert warning["text"] == (
        "throughput fell to 4.40 Ktok/s, 34 % of this run's own 12.80; in the last 22 s target"
        " threads waited 0.0 s for room, drafters 14.7 s for batches"
    )
    assert _events(tmp_path / "metrics.jsonl") == [warning]


def test_samples_are_logged_a_line_a_step_and_a_cut_line_is_closed(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    log.write(1, [(0, 0, (4, 2)), (1, 0, (3,))])
    log.close()
    path = tmp_path / "samples.jsonl"
    with path.open("ab") as stream:
        stream.write(b'{"step":2,"batch')  # what a kill leaves
    again = SampleLog(tmp_path)
    again.write(2, [(2, 1, (5,))])
    again.close()
    assert path.read_bytes().split(b"\n") == [
        b'{"step":1,"batches":[[0,0,[4,2]],[1,0,[3]]]}',
        b'{"step":2,"batch',
        b'{"step":2,"batches":[[2,1,[5]]]}',
        b"",
    ]


def test_events_that_a_full_disk_refuses_are_counted_and_told_when_there_is_room(
    metrics: Metrics, tmp_path: Path, told: io.StringIO
) -> None:
    path, samples = tmp_path / "metrics.jsonl", SampleLog(tmp_path)
    metrics.warning("first")
    with _room_of_a_file(path.stat().st_size + 40):
        metrics.warning("second")  # cut in the middle
        metrics.warning("third")
    with _room_of_a_file(20), pytest.raises(OSError, match="a line was cut"):
        samples.write(1, [(0, 0, (4, 2))])
    metrics.warning("fourth")
    metrics.close()
    samples.write(2, [(1, 0, (3,))])
    samples.close()
    assert [(event["seq"], event["text"]) for event in _events(path)] == [
        (0, "first"),
        (1, "2 events before this one could not be written"),
        (2, "fourth"),
    ]
    assert told.getvalue().count("metrics.jsonl cannot be written, the run goes on") == 1
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    assert lines == [b'{"step":1,"batches":', b'{"step":2,"batches":[[1,0,[3]]]}', b""]


@contextmanager
def _room_of_a_file(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


class _FullLog(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_log_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", "run-1", CPU, console=_FullLog())
    metrics.note("one")
    metrics.warning("two")
    metrics.close()
    assert [event["text"] for event in _events(tmp_path / "metrics.jsonl")] == ["two"]


def test_threads_write_whole_lines_with_one_sequence(metrics: Metrics, tmp_path: Path) -> None:
    def warn() -> None:
        for number in range(100):
            metrics.warning(f"{threading.current_thread().name} {number}" * 20)

    threads = [threading.Thread(target=warn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event["seq"] for event in _events(tmp_path / "metrics.jsonl")] == list(range(400))


def test_what_is_told_after_the_end_goes_to_the_log_alone(
    metrics: Metrics, tmp_path: Path, told: io.StringIO
) -> None:
    metrics.finished("finished", 1)
    metrics.close()
    metrics.close()
    metrics.warning("too late")
    assert len(_events(tmp_path / "metrics.jsonl")) == 1
    assert "too late" in told.getvalue()


def test_resumed_metrics_go_on_with_the_next_number(metrics: Metrics, tmp_path: Path) -> None:
    metrics.phase("train")
    metrics.close()
    again = Metrics(tmp_path / "metrics.jsonl", "run-1", CPU, console=io.StringIO())
    again.phase("resume")
    assert [event["seq"] for event in _events(tmp_path / "metrics.jsonl")] == [0, 1]
