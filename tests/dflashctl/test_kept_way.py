"""Several commands by one way in, on real processes of this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.errors import StateUnknownError, UnreachableError
from dflashctl.kept_way import KeptWay
from dflashctl.transport import run_script
from dflashctl.transport.base import Script
from dflashctl.transport.local import LocalTransport
from tests.dflashctl.act.conftest import wait_until


@pytest.fixture
def way() -> Iterator[KeptWay]:
    kept = KeptWay(LocalTransport("here"))
    kept.open()
    yield kept
    kept.close()


def run(way: KeptWay, text: str, *payload: bytes, deadline_s: float = 20.0) -> tuple[int, bytes]:
    done = run_script(way, Script(text, payload, deadline_s))
    return done.rc, done.stdout


def test_commands_have_their_own_streams_and_status_and_enter_once(way: KeptWay) -> None:
    first = run_script(way, Script("echo out; echo err >&2; exit 7"))
    assert (first.rc, first.stdout, first.stderr) == (7, b"out\n", b"err\n")
    second = run_script(way, Script("echo next; cat", [b"a", b"", b"b"]))
    assert (second.rc, second.stdout, second.stderr) == (0, b"next\nab", b"")
    assert way.round_trips == 1


def test_bytes_both_ways_are_unchanged_and_many(way: KeptWay) -> None:
    data = bytes(range(256)) * 4096
    assert run(way, "cat", data, data) == (0, data + data)
    assert run(way, "head -c 3", data, data) == (0, data[:3]), "what it did not read is dropped"
    assert run(way, "wc -c", data) == (0, b"1048576\n")


def test_standard_error_before_the_output_hangs_nothing(way: KeptWay) -> None:
    rc, out = run(way, "head -c 5000000 /dev/zero >&2; echo done")
    assert (rc, out) == (0, b"done\n")


def test_a_process_left_behind_does_not_hold_the_next_command_up(way: KeptWay) -> None:
    rc, pid = run(way, "sleep 60 & echo $!")
    assert rc == 0
    assert run(way, f"kill {int(pid)} && echo it lived") == (0, b"it lived\n")


def test_what_runs_dies_unseen_and_the_next_command_enters_anew(way: KeptWay) -> None:
    with pytest.raises(StateUnknownError):
        run(way, "kill -9 $PPID")  # what runs the commands
    assert run(way, "echo again") == (0, b"again\n")
    assert way.round_trips == 2


def test_what_ended_between_two_commands_is_entered_anew_for_the_second(way: KeptWay) -> None:
    rc, pid = run(way, "echo $PPID")
    assert rc == 0
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: all(thread.name != "kept-way" for thread in threading.enumerate()))
    assert run(way, "echo again") == (0, b"again\n")
    assert way.round_trips == 2


def test_a_command_that_is_too_slow_is_left_and_the_next_one_works(
    way: KeptWay, tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError) as caught:
        run(way, f"echo $PPID >{tmp_path}/pid; exec sleep 60", deadline_s=1)
    assert caught.value.code == "timeout"
    assert run(way, f"pkill -P $(pgrep -P $(cat {tmp_path}/pid)); echo again") == (0, b"again\n")


def test_an_error_of_the_payload_is_raised_and_nothing_is_left_running(way: KeptWay) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise OSError("the file went away")

    with pytest.raises(OSError, match="went away"):
        run_script(way, Script("cat", broken()))
    assert run(way, "echo again") == (0, b"again\n")


def test_a_command_goes_on_when_its_client_is_killed(tmp_path: Path) -> None:
    begun, go, done = (tmp_path / name for name in ("begun", "go", "done"))
    script = (
        f"touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; echo to nobody; touch {done}"
    )
    code = f"""
from dflashctl.kept_way import KeptWay
from dflashctl.transport import run_script
from dflashctl.transport.base import Script
from dflashctl.transport.local import LocalTransport
run_script(KeptWay(LocalTransport("here")), Script({script!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as client:
        wait_until(begun.exists)
        client.kill()
    go.touch()
    wait_until(done.exists)
