"""A run asked about in the moments between its records: a resume, and an end that is being told."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflashctl.remote import follow, look, status, stop
from tests.dflashctl.act.conftest import wait_until
from tests.dflashctl.act.test_start import manifest, start
from trainer.contract.process_record import boot_id, start_ticks


def record_of(pid: int, ticks: int) -> dict[str, Any]:
    """Return a process.json of a run whose trainer is this process."""
    run = {"runner_pid": 999_999_999, "runner_start_ticks": 1, "boot_id": boot_id()}
    return run | {"trainer_pid": pid, "trainer_start_ticks": ticks, "pgid": pid}


DEAD = (999_999_999, 1)


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold a run's lock, as its runner does."""
    with (run_dir / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def answer_once(path: Path, first: str, then: str) -> None:
    """Return when somebody has read ``first`` from a file; who reads it again finds ``then``."""
    os.mkfifo(path)
    with path.open("w") as stream:  # waits for the reader
        after = path.with_name("after")
        after.write_text(then)
        after.replace(path)
        stream.write(first)


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_stop_of_a_run_that_is_just_being_resumed_ends_it(
    tmp_path: Path, trainer: subprocess.Popen[bytes]
) -> None:
    asked = {"run_dir": str(tmp_path), "tag": "x", "socket": f"{tmp_path}/none", "grace_s": 60.0}
    new = json.dumps(record_of(trainer.pid, start_ticks(trainer.pid)))
    with held(tmp_path), ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop.main, asked)
        answer_once(tmp_path / "process.json", json.dumps(record_of(*DEAD)), new)
        trainer.wait()
        (tmp_path / "exit.json").write_text('{"state": "stopped"}')
        answer = stopping.result()
    assert (answer["ended_before"], answer["signal"]) == (False, "SIGINT")
    assert answer["exit"] == {"state": "stopped"}


def test_a_second_look_waits_for_the_exit_record_of_a_run_whose_trainer_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "process.json").write_text(json.dumps(record_of(*DEAD)))
    asked = {"run_dir": str(tmp_path), "log": f"{tmp_path}/log", "wait_s": 0.0}
    with held(tmp_path), ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look.main, asked)
        answer_once(tmp_path / "exit.json", "", '{"state": "failed"}')
        assert looking.result()["state"] == "ended"
    (tmp_path / "exit.json").unlink()
    assert look.main(asked)["state"] == "lost", "nobody holds the lock, and nobody waits"


def test_a_run_is_not_lost_while_its_lock_is_held(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text(json.dumps(record_of(*DEAD)))
    watched = follow.Run(tmp_path)
    assert watched.end() is None
    watched.since -= 1000.0  # it looked at this long ago
    with held(tmp_path):
        assert watched.end() is None
        assert status.state_of(tmp_path, 0.0) == ("running", None)
    assert watched.end() == ("lost", b"")
    assert status.state_of(tmp_path, 0.0) == ("lost", None)


def test_a_start_that_warns_before_it_has_its_lock_is_waited_for(
    tmp_path: Path, stand_in: Path
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\necho a warning >&2\nsleep 0.3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    answer = start(manifest(tmp_path, "x"), stand_in, python=str(slow))
    assert (answer["started"], answer["complaint"]) == (True, "a warning\n")
    wait_until((tmp_path / "runs/x/exit.json").exists)
