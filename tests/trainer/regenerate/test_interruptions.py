"""Busy, failing and vanishing servers, and kills of `trainer regenerate` itself."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.regenerate.conftest import (
    CUT,
    ChatServer,
    MakeOptions,
    completion,
    echo,
    error,
    questions,
    read_lines,
    write_chats,
)
from trainer.errors import DataError, ServerError
from trainer.regenerate.journal import Journal
from trainer.regenerate.run import Files, regenerate
from trainer.regenerate.server import retry_after_s

REPOSITORY = Path(__file__).resolve().parents[3]


def test_retry_after_is_waited_for(chat_server: ChatServer, make_options: MakeOptions):
    came: list[float] = []

    def answer(body: Any, times: int) -> Any:
        came.append(time.monotonic())
        return error(429, "slow down", Retry_After="1") if times == 0 else echo(body)

    chat_server.answer = answer
    options = make_options(questions(1), retries=0)  # being busy uses up no try
    regenerate(options)
    assert len(came) == 2
    assert came[1] - came[0] >= 1.0
    assert len(read_lines(options.output)) == 1


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (error(500, "out of memory"), "HTTP 500: out of memory"),
        (error(503, "loading", Retry_After=formatdate(usegmt=True)), "HTTP 503: loading"),
        ((200, {}, b"<html>proxy</html>"), "the answer is not one"),
        ((200, {}, {"choices": []}), "no chat completion"),
        (completion([1]), "its content is no text"),
        ((200, {}, b"[" * 100_000), "nested too deeply"),
        ((200, {"Content_Encoding": "gzip"}, b"no gzip"), "the connection broke"),
        (CUT, "the connection broke"),
    ],
)
def test_failure_that_may_pass_is_tried_again(
    chat_server: ChatServer,
    make_options: MakeOptions,
    capsys: pytest.CaptureFixture[str],
    first: Any,
    told: str,
):
    chat_server.answer = lambda body, times: first if times == 0 else echo(body)
    options = make_options(questions(2), concurrency=1, retries=1)
    regenerate(options)
    assert [r["id"] for r in read_lines(options.output)] == ["q0", "q1"]
    assert chat_server.prompts() == ["question 0", "question 0", "question 1", "question 1"]
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "waited_s"), [("2.5", 2.5), ("-1", None), ("9999999999", 600.0), ("1e999", 600.0)]
)
def test_wait_that_a_server_asks_for_has_an_end(asked: str, waited_s: float | None):
    assert retry_after_s(asked) == waited_s


def test_no_answer_at_all_is_the_servers_failure_and_is_asked_again(
    chat_server: ChatServer, make_options: MakeOptions
):
    chat_server.answer = lambda _body, _times: (200, {}, b"<html>proxy</html>")
    options = make_options(questions(2), retries=0)
    with pytest.raises(ServerError, match=r"2 of 2 .* 1 tries each .*same command asks them again"):
        regenerate(options)
    assert not options.output.exists()
    chat_server.answer = lambda body, _times: echo(body)
    regenerate(options)
    assert [r["id"] for r in read_lines(options.output)] == ["q0", "q1"]


def test_answer_that_takes_too_long_is_asked_for_again(
    chat_server: ChatServer, make_options: MakeOptions
):
    released = threading.Event()

    def answer(body: Any, times: int) -> Any:
        if times == 0:
            released.wait(60)  # until the end of the test
        return echo(body)

    chat_server.answer = answer
    options = make_options(questions(1), timeout_s=1.0)
    try:
        regenerate(options)
    finally:
        released.set()
    assert len(chat_server.asked) >= 2
    assert len(read_lines(options.output)) == 1


def test_server_that_is_gone_for_long_ends_the_run_and_keeps_what_is_answered(
    chat_server: ChatServer, make_options: MakeOptions
):
    def answer(body: Any, _times: int) -> Any:
        return echo(body) if len(chat_server.asked) <= 10 else CUT

    chat_server.answer = answer
    options = make_options(questions(40), concurrency=1, retries=1_000_000, patience_s=0.3)
    with pytest.raises(
        ServerError, match=r"no answer for 0\.3 s \(last: the connection broke.*run"
    ):
        regenerate(options)
    assert not options.output.exists()
    chat_server.asked.clear()
    chat_server.answer = lambda body, _times: echo(body)
    regenerate(options)
    assert len(chat_server.asked) == 30
    assert len(read_lines(options.output)) == 40


def test_no_server_at_all_is_told_with_its_address(make_options: MakeOptions):
    options = make_options(questions(1), base_url="http://127.0.0.1:1/v1", patience_s=0.1)
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1/v1: no answer for 0\.1 s"):
        regenerate(options)


def test_answers_by_another_model_under_the_same_name_are_refused(
    chat_server: ChatServer, make_options: MakeOptions
):
    chat_server.answer = lambda body, _times: echo(body) if len(chat_server.asked) < 3 else CUT
    options = make_options(questions(9), concurrency=1, retries=10**6, patience_s=0.1)
    with pytest.raises(ServerError):
        regenerate(options)
    chat_server.models = [{"id": "tiny", "root": "/models/tiny-v2"}]
    with pytest.raises(DataError, match=r"/models/tiny-v2.*by /models/tiny;"):
        regenerate(options)


def _process(chat_server: ChatServer, source: Path, output: Path) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "trainer", "regenerate", "--model", "tiny"]
    argv += ["--input", str(source), "--output", str(output), "--concurrency", "4"]
    argv += ["--base-url", chat_server.base_url, "--temperature", "0"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment)


def _finish(process: "subprocess.Popen[str]") -> str:
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    return stderr


def test_killed_twice_and_run_again_it_gives_the_same_file_and_asks_nothing_twice(
    chat_server: ChatServer, tmp_path: Path
):
    source = write_chats(tmp_path / "in.jsonl", [*questions(30), "{bad", *questions(30)[20:]])
    chat_server.answer = lambda body, _times: echo(body)
    whole = tmp_path / "whole.jsonl"
    _finish(_process(chat_server, source, whole))
    chat_server.asked.clear()
    output = tmp_path / "out.jsonl"
    for kill_at in (12, 28):
        reached, hold = threading.Event(), threading.Event()
        chat_server.answer = _Stalling(chat_server, kill_at, reached, hold)
        process = _process(chat_server, source, output)
        assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hold.set()
        assert process.returncode == -signal.SIGKILL
        assert not output.exists()
    settled = _answered_lines(output)
    assert len(settled) > 12
    chat_server.asked.clear()
    chat_server.answer = lambda body, _times: echo(body)
    told = _finish(_process(chat_server, source, output))
    assert f"{41 - len(settled)} conversations to ask for" in told
    assert output.read_bytes() == whole.read_bytes()
    assert Files(output).rejected.read_bytes() == Files(whole).rejected.read_bytes()
    asked_at_last = len(chat_server.asked)
    assert asked_at_last == 40 - len([n for n in settled if n != 31])


@dataclass(frozen=True)
class _Stalling:
    """Answers until a number of questions came; what is in flight then is never answered."""

    server: ChatServer
    stop_at: int
    reached: threading.Event
    hold: threading.Event

    def __call__(self, body: Any, _times: int) -> Any:
        if len(self.server.asked) >= self.stop_at:
            self.reached.set()
            self.hold.wait(60)
        return echo(body)


def test_interrupt_is_one_line_and_keeps_what_is_answered(chat_server: ChatServer, tmp_path: Path):
    reached, hold = threading.Event(), threading.Event()
    chat_server.answer = _Stalling(chat_server, 10, reached, hold)
    source = write_chats(tmp_path / "in.jsonl", questions(20))
    process = _process(chat_server, source, tmp_path / "out.jsonl")
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    hold.set()
    assert process.returncode == 10
    assert stderr.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in stderr
    assert len(_answered_lines(tmp_path / "out.jsonl")) >= 6


def _answered_lines(output: Path) -> list[int]:
    """Lines in the journal that a kill left, as a run reads it."""
    journal = Journal(Files(output).journal, 41)
    try:
        return [number for number, _kind, _text in journal.entries()]
    finally:
        journal.close()


def test_line_that_a_kill_left_unfinished_is_cut_off_and_asked_again(
    chat_server: ChatServer, make_options: MakeOptions
):
    chat_server.answer = lambda body, _times: echo(body) if len(chat_server.asked) <= 3 else CUT
    options = make_options(questions(5), concurrency=1, retries=10**6, patience_s=0.1)
    with pytest.raises(ServerError):
        regenerate(options)
    journal = Files(options.output).journal
    data = journal.read_bytes()
    assert data.count(b"\n") == 4  # the settings, and three answers
    journal.write_bytes(data[:-10])
    chat_server.asked.clear()
    chat_server.answer = lambda body, _times: echo(body)
    regenerate(options)
    assert chat_server.prompts() == ["question 2", "question 3", "question 4"]
    assert [r["id"] for r in read_lines(options.output)] == [f"q{n}" for n in range(5)]


def test_kill_between_the_last_answer_and_the_last_rename_costs_no_question(
    chat_server: ChatServer, make_options: MakeOptions
):
    options = make_options(questions(3))
    regenerate(options)
    files, whole = Files(options.output), options.output.read_bytes()
    # As a kill leaves it after the output was renamed, or just before: all is in the journal.
    meta = json.loads(files.meta.read_text())
    journal = Journal(files.journal, 3)
    journal.begin(meta["settings"])
    for number, record in enumerate(read_lines(options.output), 1):
        journal.append(number, "answer", record)
    journal.close()
    files.meta.write_text(json.dumps(meta | {"state": "running", "counts": None}))
    gone = replace(options, base_url="http://127.0.0.1:1/v1")  # nobody is asked
    for _ in range(2):
        regenerate(gone)
        assert options.output.read_bytes() == whole
        assert not files.journal.exists()
        files.journal.touch()  # a kill before its removal, seen by the second run
    assert json.loads(files.meta.read_text())["counts"]["answered"] == 3
    assert len(chat_server.asked) == 3


@contextmanager
def _no_file_larger_than(size_bytes: int) -> Iterator[None]:
    """Let writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_told_and_what_was_cut_is_asked_again(
    chat_server: ChatServer, make_options: MakeOptions
):
    options = make_options(questions(40))
    # The limit may cut an entry short or refuse it whole; the errors differ.
    why = "(File too large|No space left on device)"
    full = pytest.raises(DataError, match=rf"out\.jsonl\.journal: {why}.*same command")
    with _no_file_larger_than(4096), full:  # about 15 answers
        regenerate(options)
    answered = _answered_lines(options.output)
    assert 5 < len(answered) < 40
    chat_server.asked.clear()
    regenerate(options)
    assert len(chat_server.asked) == 40 - len(answered)
    assert [r["id"] for r in read_lines(options.output)] == [f"q{n}" for n in range(40)]


def test_output_that_another_process_ends_meanwhile_is_found_complete(
    chat_server: ChatServer, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
):
    options, flock, told = make_options(questions(3)), fcntl.flock, []

    def after_another_has_ended(descriptor: int, operation: int) -> None:
        told.append(descriptor)
        if len(told) == 1:  # opened, not locked yet
            regenerate(options)
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", after_another_has_ended)
        regenerate(options)
    assert len(chat_server.asked) == 3
    assert len(read_lines(options.output)) == 3
    assert not Files(options.output).journal.exists()


def test_second_process_on_the_same_output_is_refused(make_options: MakeOptions):
    options = make_options(questions(1))
    held = Journal(Files(options.output).journal, 1)
    try:
        with pytest.raises(DataError, match="another regenerate is at work"):
            regenerate(options)
    finally:
        held.close()
    regenerate(options)
    assert len(read_lines(options.output)) == 1
