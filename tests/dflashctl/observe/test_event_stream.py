"""Following a run: every byte once, whatever happens to the link and to the files."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import (
    DflashctlError,
    MismatchError,
    StateUnknownError,
    UnreachableError,
    UsageError,
)
from dflashctl.event_stream import (
    Backoff,
    Ended,
    Follow,
    Heartbeat,
    Item,
    LogBytes,
    Notice,
    RecordDecoder,
    RunEvent,
    Start,
    follow,
    read_once,
)
from dflashctl.remote.follow import Tail
from dflashctl.transport import Transport

Connect = Callable[[], Transport]
QUICK = Backoff(first_s=0.05, limit_s=0.2)


class Collected:
    """Items of a stream, sorted by kind."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def __call__(self, item: Item) -> None:
        self.items.append(item)

    @property
    def log(self) -> bytes:
        return b"".join(item.data for item in self.items if isinstance(item, LogBytes))

    @property
    def steps(self) -> list[int]:
        return [item.event["step"] for item in self.items if isinstance(item, RunEvent)]

    @property
    def notices(self) -> list[str]:
        return [item.kind for item in self.items if isinstance(item, Notice)]


def of(run: Any, log: Start | None = None, events: Start | None = None) -> Follow:
    return Follow(
        str(run.root), run.log.name, log or Start.beginning(), events or Start.beginning()
    )


def in_background(connect: Connect, what: Follow, got: Collected) -> threading.Thread:
    thread = threading.Thread(target=follow, args=(connect, what, got), kwargs={"backoff": QUICK})
    thread.start()
    return thread


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)  # the time limit of the test ends this


def joined(thread: threading.Thread) -> None:
    thread.join(timeout=60)
    assert not thread.is_alive()


class WhenLost(Collected):
    """Does something at the moment the link is lost, before it is tried again."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def __call__(self, item: Item) -> None:
        if isinstance(item, Notice) and item.kind == "disconnected":
            self.action()
        super().__call__(item)


def test_a_finished_run_gives_its_log_its_events_and_its_end(
    run: Any, connect_here: Connect
) -> None:
    run.log.write_bytes(b"one\ntwo\nunfinished")
    run.event("step", step=1)
    run.event("step", step=2)
    run.end(rc=0)
    got = Collected()
    ended = follow(connect_here, of(run), got)
    assert (got.log, got.steps) == (b"one\ntwo\nunfinished", [1, 2])
    assert (ended.state, ended.record.rc if ended.record else None) == ("finished", 0)
    assert got.items[-1] == ended


def test_every_byte_comes_once_although_the_follow_program_is_killed_again_and_again(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    writer = """
import random, sys, time
log, rng = open(sys.argv[1], "ab", buffering=0), random.Random(7)
data = b"".join(b"line %d of the log\\n" % i for i in range(40_000))
while data:
    n = rng.randrange(1, 9000)
    log.write(data[:n]); data = data[n:]
    time.sleep(0.01)
"""
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.items)
    process = subprocess.Popen([sys.executable, "-c", writer, str(run.log)])
    num_killed, step, rng = 0, 0, random.Random(1)
    while process.poll() is None or got.notices.count("disconnected") < 3:
        time.sleep(rng.uniform(0.1, 0.3))
        step += 1
        run.event("step", step=step)
        num_killed += run.kill_followers()
    run.end()
    joined(thread)
    assert num_killed >= 3
    assert got.notices.count("disconnected") >= 3
    assert got.log.splitlines() == [b"line %d of the log" % i for i in range(40_000)]
    assert got.steps == list(range(1, step + 1))


def test_a_log_that_is_truncated_in_place_is_read_from_its_new_beginning(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    run.log.write_bytes(b"old line\n" * 3)
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.log == b"old line\n" * 3)
    os.truncate(run.log, 0)
    until(lambda: got.notices == ["truncated"])
    with run.log.open("ab") as stream:
        stream.write(b"new line\n")
    until(lambda: got.log == b"old line\n" * 3 + b"new line\n")
    run.end()
    joined(thread)


def test_a_log_rewritten_to_a_greater_length_is_not_taken_for_a_grown_one(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    run.log.write_bytes(b"old\n")
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.log == b"old\n")
    with run.log.open("r+b") as stream:  # one write: the reader never sees a short file
        stream.write(b"brand new and longer\n")
    until(lambda: got.log == b"old\nbrand new and longer\n")
    run.end()
    joined(thread)
    assert got.notices == ["truncated"]


def test_a_log_rewritten_between_the_look_at_its_head_and_the_read_is_not_taken_for_a_grown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n")
    tail = Tail("log", log, {})
    tail.pump()
    looks = 0

    def rewritten_after_the_first_look(fd: int, size: int, offset: int) -> bytes:
        nonlocal looks
        looks += 1
        if looks == 2:
            with log.open("r+b") as stream:
                stream.write(b"brand new and longer\n")
        return pread(fd, size, offset)

    pread = os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", rewritten_after_the_first_look)
        for _ in range(3):
            tail.pump()
    records = list(RecordDecoder().feed(capfdbinary.readouterr().out))
    assert [(record.header["k"], record.payload) for record in records] == [
        ("at", b""),
        ("log", b"old\n"),
        ("note", b""),
        ("log", b"brand new and longer\n"),
    ]


def test_a_log_that_is_moved_away_is_read_to_its_end_before_the_new_one(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    run.log.write_bytes(b"first file\n")
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.log == b"first file\n")
    with run.log.open("ab") as old:
        run.log.rename(run.log.with_suffix(".1"))
        old.write(b"late line of the first file\n")
        old.flush()
        time.sleep(0.5)
        run.log.write_bytes(b"second file\n")
    until(lambda: got.log.endswith(b"second file\n"))
    run.end()
    joined(thread)
    assert got.log == b"first file\nlate line of the first file\nsecond file\n"
    assert got.notices == ["replaced"]


def test_a_log_replaced_while_the_link_was_down_is_said_to_be_replaced(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    run.log.write_bytes(b"first file\n")

    def replace_log() -> None:
        run.log.rename(run.log.with_suffix(".1"))
        run.log.write_bytes(b"second file, longer\n")

    got = WhenLost(replace_log)
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.log == b"first file\n")
    run.kill_followers()
    until(lambda: got.log == b"first file\nsecond file, longer\n")
    run.end()
    joined(thread)
    assert got.notices == ["disconnected", "connected", "replaced"]


def test_a_line_of_5_megabytes_arrives_whole(run: Any, connect_here: Connect) -> None:
    line = b"x" * 5_000_000 + b"\n"
    run.log.write_bytes(line)
    run.end()
    got = Collected()
    follow(connect_here, of(run), got)
    assert got.log == line
    assert max(len(item.data) for item in got.items if isinstance(item, LogBytes)) <= 65536


@pytest.mark.parametrize(
    ("content", "num_lines", "tail"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nunfinished", 2, b"b\nunfinished"),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"a\nb\n", 0, b""),
        (b"", 3, b""),
        (b"\n\n\n", 2, b"\n\n"),
        (b"y" * 70_000 + b"\n" + b"x" * 200_000 + b"\nz\n", 2, b"x" * 200_000 + b"\nz\n"),
    ],
)
def test_the_last_lines_are_counted_in_the_container(
    run: Any, connect_here: Connect, content: bytes, num_lines: int, tail: bytes
) -> None:
    run.log.write_bytes(content)
    got = Collected()
    read_once(connect_here, of(run, log=Start.tail_lines(num_lines)), got)
    assert got.log == tail


def test_a_tail_of_events_begins_with_a_whole_line(run: Any, connect_here: Connect) -> None:
    lines = [run.event("step", step=step) for step in range(5)]
    run.end()
    got = Collected()
    follow(connect_here, of(run, events=Start.tail_bytes(len(lines[3] + lines[4]) + 5)), got)
    assert got.steps == [3, 4]


def test_lines_written_while_the_link_was_down_are_not_lost_by_a_tail_that_began_empty(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    run.log.write_bytes(b"before\n")

    def append() -> None:
        with run.log.open("ab") as stream:
            stream.write(b"in between\n")

    got = WhenLost(append)
    thread = in_background(connect_here, of(run, log=Start.tail_lines(0)), got)
    until(lambda: any(isinstance(item, Heartbeat) for item in got.items))
    run.kill_followers()
    until(lambda: got.log == b"in between\n")
    run.end()
    joined(thread)


def test_a_killed_trainer_ends_the_stream_as_killed(run: Any, connect_here: Connect) -> None:
    run.start()
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.items)
    run.end(rc=None, signal=9)
    joined(thread)
    ended = got.items[-1]
    assert isinstance(ended, Ended)
    assert ended.record is not None
    assert (ended.state, ended.record.signal) == ("killed", 9)


def test_a_run_whose_processes_vanished_is_lost_not_finished(
    run: Any, connect_here: Connect
) -> None:
    run.start()
    got = Collected()
    thread = in_background(connect_here, of(run), got)
    until(lambda: got.items)
    run.kill()
    joined(thread)
    assert got.items[-1] == Ended("lost", None)


def test_a_recycled_pid_is_not_taken_for_the_run(run: Any, connect_here: Connect) -> None:
    run.start()
    path = run.root / "process.json"
    record = json.loads(path.read_text())
    record |= {"runner_start_ticks": 1, "trainer_start_ticks": 1}
    path.write_text(json.dumps(record))
    got = Collected()
    assert follow(connect_here, of(run), got) == Ended("lost", None)


def test_a_tag_that_is_not_there_is_an_error_that_says_so(run: Any, connect_here: Connect) -> None:
    what = Follow(str(run.root.parent / "fresh8"), "train_stdout_fresh8.log")
    with pytest.raises(UsageError, match="fresh8"):
        follow(connect_here, what, Collected())
    with pytest.raises(UsageError, match="fresh8"):
        read_once(connect_here, what, Collected())


def test_a_reader_that_stops_stops_the_follow_program_too(run: Any, connect_here: Connect) -> None:
    run.start()
    run.log.write_bytes(b"line\n")

    def full(item: Item) -> None:
        if isinstance(item, LogBytes):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        follow(connect_here, of(run), full)
    until(lambda: run.follow_pids() == [])


def test_an_event_of_a_newer_version_is_refused_and_not_skipped(
    run: Any, connect_here: Connect
) -> None:
    run.metrics.write_bytes(b'{"v": 2, "seq": 0, "kind": "step", "step": 1}\n')
    run.end()
    with pytest.raises(MismatchError, match="update dflashctl"):
        follow(connect_here, of(run), Collected())


def test_an_exit_record_that_cannot_be_read_is_an_error_and_no_end(
    run: Any, connect_here: Connect
) -> None:
    run.end()
    (run.root / "exit.json").write_text('{"v": 1}')
    with pytest.raises(MismatchError, match=r"exit\.json"):
        follow(connect_here, of(run), Collected())


def test_a_first_link_that_fails_is_raised_and_not_tried_again(run: Any) -> None:
    def refuse() -> Transport:
        raise UnreachableError("no route to host", place="kpro6")

    with pytest.raises(UnreachableError, match="no route"):
        follow(refuse, of(run), Collected())


def test_bytes_that_are_no_records_are_named() -> None:
    with pytest.raises(StateUnknownError, match="Welcome"):
        list(RecordDecoder().feed(b"Welcome to Proxmox\n"))
    with pytest.raises(StateUnknownError, match="aaaa"):
        list(RecordDecoder().feed(b"a" * 5000))


def test_records_do_not_depend_on_where_the_bytes_were_cut() -> None:
    stream = b'{"k":"log","n":4}\n\n{"}{"k":"beat","n":0}\n{"k":"log","n":2}\nab'
    whole = [(r.header["k"], r.payload) for r in RecordDecoder().feed(stream)]
    assert whole == [("log", b'\n{"}'), ("beat", b""), ("log", b"ab")]
    decoder = RecordDecoder()
    single = [r for i in range(len(stream)) for r in decoder.feed(stream[i : i + 1])]
    assert [(r.header["k"], r.payload) for r in single] == whole


def test_a_broken_follow_program_is_an_error_with_its_words(
    run: Any, connect_here: Connect
) -> None:
    run.metrics.mkdir()  # opening works, reading a directory does not
    run.end()
    with pytest.raises(DflashctlError, match="following the run failed") as caught:
        follow(connect_here, of(run), Collected())
    assert "Is a directory" in caught.value.hint
