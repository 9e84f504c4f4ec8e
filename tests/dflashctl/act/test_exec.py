"""exec: the command's own bytes and status; test_exec_lab.py is the same through ssh and pct."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import UsageError
from dflashctl.inventory import load_inventory
from dflashctl.operations.execute import ExecuteRequest, execute
from dflashctl.transport import connect
from tests.dflashctl.act.conftest import REPOSITORY, Project

MIB = 1 << 20


class Shell:
    """`dflashctl exec` as a process in a directory with hosts.yaml, bytes both ways."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self.options = options

    def popen(self, *command: str, **extra: Any) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "dflashctl", *self.options, "exec", *command]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | extra
        return subprocess.Popen(argv, cwd=self.root, env=environment, **streams)

    def run(self, *command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        with self.popen(*command, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(stdin, timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def here(project: Project) -> Shell:
    return Shell(project.root)


def test_streams_stay_apart_byte_for_byte_and_the_status_is_the_commands(here: Shell) -> None:
    script = r"printf '\000\377\r\n'; printf 'e\377' >&2; exit 42"
    done = here.run("--", "bash", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (42, b"\0\xff\r\n", b"e\xff")


def test_no_shell_stands_between(here: Shell) -> None:  # F01
    done = here.run("--", "printf", "%s|", "a b", "$HOME", "*", "&&", ";", "", "--json", "-l")
    assert done.stdout == b"a b|$HOME|*|&&|;||--json|-l|"


@pytest.mark.parametrize(("script", "status"), [("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_command_that_died_of_a_signal_ends_as_shells_say_and_in_silence(  # F08
    here: Shell, script: str, status: int
) -> None:
    done = here.run("--", "bash", "-c", script)
    assert (done.returncode, done.stderr) == (status, b"")


def test_command_that_is_not_there_is_127_in_the_shells_words(here: Shell) -> None:
    done = here.run("--", "no-such-program", "--json")
    assert (done.returncode, done.stdout) == (127, b"")
    assert b"no-such-program: not found" in done.stderr
    assert b"error[" not in done.stderr


def test_standard_input_goes_along_unless_it_is_left_alone(here: Shell) -> None:  # F03
    data = random.Random(1).randbytes(3 * MIB)
    assert here.run("--", "cat", stdin=data).stdout == data
    assert here.run("-n", "--", "cat", stdin=data).stdout == b""
    with (here.root / "data").open("wb") as stream:
        stream.write(data)
    with (
        (here.root / "data").open("rb") as stream,
        here.popen("--", "wc", "-c", stdin=stream) as process,
    ):
        assert process.communicate(timeout=100)[0].strip() == str(len(data)).encode()


def test_a_writer_that_never_writes_holds_nothing_up(here: Shell) -> None:
    read_end, write_end = os.pipe()
    with here.popen("--", "echo", "done", stdin=read_end) as process:
        assert process.communicate(timeout=100)[0] == b"done\n"
    os.close(read_end)
    os.close(write_end)


def test_what_is_written_late_still_arrives(here: Shell) -> None:
    with here.popen("--", "bash", "-c", "echo up; cat", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.write(b"late\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"late\n"
        assert process.communicate(timeout=100)[0] == b""


def test_reader_that_leaves_ends_it_quietly(here: Shell) -> None:
    with here.popen("--", "yes", stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(100) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_time_out_is_exit_4_and_says_that_it_may_go_on(here: Shell) -> None:
    done = here.run("--timeout", "0.5", "--", "sleep", "20")
    assert done.returncode == 4
    assert done.stderr.startswith(b"error[timeout]: here")
    assert b"may still be running" in done.stderr


def test_document_holds_both_streams_and_the_status(here: Shell) -> None:
    done = here.run("--json", "--", "bash", "-c", r"echo a; printf '\377' >&2; exit 3")
    assert done.returncode == 3
    assert json.loads(done.stdout) == {
        "schema": 1,
        "ok": False,
        "place": "here/self",
        "exit_code": 3,
        "stdout": "a\n",
        "stdout_encoding": "utf-8",
        "stderr": "/w==",
        "stderr_encoding": "base64",
    }


def test_argument_of_128_kib_is_refused_in_words(project: Project) -> None:  # F10
    way = connect(load_inventory(project.root / "hosts.yaml").one([]))
    received: list[bytes] = []
    longest = "x" * (128 * 1024 - 1)
    assert execute(way, ExecuteRequest(["printf", "%s", longest]), received.append, print) == 0
    assert b"".join(received) == longest.encode()
    with pytest.raises(UsageError, match="131071 bytes"):
        execute(way, ExecuteRequest(["echo", longest + "x"]), print, print)
