"""metrics.jsonl: whole lines, one sequence, readers that survive a killed writer."""

import json
import resource
from pathlib import Path

import pytest

from trainer.contract.errors import EventError
from trainer.contract.events import EventDecoder, EventWriter, encode, finished_at

LINE = b'{"v":1,"seq":%d,"t_unix_s":1.0,"run_id":"r","kind":"warning","text":"x"}\n'


def test_event_is_one_line_with_the_common_keys_first(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "m.jsonl", "run-1")
    event = writer.write("phase", phase="load")
    writer.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert list(json.loads(text)) == ["v", "seq", "t_unix_s", "run_id", "kind", "phase"]
    assert json.loads(text) == event
    assert text.count("\n") == 1


def test_numbers_that_are_not_finite_become_null_and_are_counted() -> None:
    line = encode({"a": float("nan"), "b": {"c": [1.0, float("inf")]}, "d": (float("-inf"),)})
    assert json.loads(line) == {
        "a": None,
        "b": {"c": [1.0, None]},
        "d": [None],
        "num_non_finite": 3,
    }
    assert encode({"a": 1.5}) == b'{"a":1.5}\n'


def test_unknown_kind_is_never_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "m.jsonl", "run-1")
    with pytest.raises(EventError, match="unknown event kind 'stap'; known: phase, started"):
        writer.write("stap")
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_reopened_writer_goes_on_with_the_next_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = EventWriter(path, "run-1")
    first.write("phase", phase="a")
    first.write("phase", phase="b")
    first.close()
    second = EventWriter(path, "run-1")
    assert second.write("phase", phase="c")["seq"] == 2


def test_line_that_a_kill_cut_cannot_swallow_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(LINE % 0 + LINE[:20])
    writer = EventWriter(path, "run-1")
    writer.write("phase", phase="resume")
    decoder = EventDecoder()
    assert [event["seq"] for event in decoder.feed(path.read_bytes())] == [0, 1]
    assert decoder.num_skipped == 1


def test_event_cut_by_a_full_disk_is_an_error_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = EventWriter(path, "r")
    writer.write("warning", text="x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, limits[1]))
    try:
        with pytest.raises(OSError, match="an event was cut"):
            writer.write("warning", text="long" * 10)
        with pytest.raises(OSError, match="too large"):
            writer.write("warning", text="long" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert writer.write("warning", text="again")["seq"] == 1
    decoder = EventDecoder()
    assert [event["text"] for event in decoder.feed(path.read_bytes())] == ["x", "again"]
    assert decoder.num_skipped == 1


def test_decoder_takes_bytes_as_they_come() -> None:
    data, decoder = LINE % 0 + LINE % 1, EventDecoder()
    found = [event["seq"] for byte in data for event in decoder.feed(bytes([byte]))]
    assert found == [0, 1]
    assert list(decoder.feed(b'{"v":1')) == []


@pytest.mark.parametrize(
    "line", [b"not json", b"[1,2]", b"3", b'{"v":1}', b'{"v":1,"kind":"step"}']
)
def test_line_that_is_no_event_is_counted(line: bytes) -> None:
    decoder = EventDecoder()
    assert [e["seq"] for e in decoder.feed(line + b"\n\n" + LINE % 7)] == [7]
    assert decoder.num_skipped == 1  # an empty line is nothing


def test_unknown_kind_of_a_newer_trainer_is_skipped() -> None:
    decoder = EventDecoder()
    line = (LINE % 0).replace(b"warning", b"weather")
    assert [e["seq"] for e in decoder.feed(line + LINE % 1)] == [1]
    assert decoder.num_skipped == 0


@pytest.mark.parametrize("version", [b"2", b'"1"'])
def test_newer_version_is_refused_but_a_writer_reads_over_it(version: bytes) -> None:
    line = (LINE % 0).replace(b'"v":1', b'"v":' + version)
    with pytest.raises(EventError, match="this reader knows 1: update dflashctl"):
        list(EventDecoder().feed(line))
    assert list(EventDecoder(lenient=True).feed(line)) == []


def test_run_has_finished_where_that_is_its_last_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert finished_at(path) is None
    found = []
    writer = EventWriter(path, "run-1")
    for kind, facts in (
        ("step", {"step": 7}),
        ("finished", {"state": "stopped", "step": 7}),
        ("finished", {"state": "finished", "step": 9}),
        ("phase", {"phase": "data"}),  # started again, to export anew
    ):
        writer.write(kind, **facts)
        found.append(finished_at(path))
    writer.close()
    assert found == [None, None, 9, None]
