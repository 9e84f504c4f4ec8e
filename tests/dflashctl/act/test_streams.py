"""Closed or full standard streams, a vanished directory, odd waits, Ctrl-C: told plainly."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.cli import main
from tests.dflashctl.act.conftest import Project


def shell(project: Project, line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which $D is dflashctl."""
    environment = os.environ | {
        "PYTHONPATH": f"{project.code}:{Path(__file__).parents[3]}",
        "D": f"{sys.executable} -m dflashctl",
    }
    return subprocess.run(
        ["sh", "-c", line],
        cwd=project.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("$D runs list --local >&-", 0, ""),
        ("$D status nosuch >&- 2>&- <&-", 2, ""),
        ("$D status nosuch 2>/dev/full", 2, ""),
        ("$D runs list --local >/dev/full", 1, "error[file]: no space left where the output goes"),
        ("$D --json status nosuch >/dev/full", 2, "error[no-such-run]"),
        ("mkdir x; cd x; rmdir ../x; $D gpus", 1, "error[file]: the working directory is gone"),
    ],
)
def test_streams_that_take_nothing_leave_the_status_and_no_traceback(
    project: Project, line: str, status: int, told: str
) -> None:
    done = shell(project, line)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("gpus", "--watch", "nan"),
        ("launch", "--tag", "x", "--wait", "inf"),
        ("launch", "--tag", "x", "--wait=-1"),
        ("stop", "x", "--grace", "nan"),
    ],
)
def test_a_wait_that_is_no_number_of_seconds_is_a_usage_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "is no number of seconds" in capsys.readouterr().err


def test_ctrl_c_of_stop_says_that_the_run_was_signalled(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    assert project.run("launch", "--tag", "x", "--set", "seed=13").returncode == 0  # never ends
    with project.popen("stop", "x") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("SIGINT sent to pid")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 130
    assert told.startswith("interrupted; a run that was signalled")
    assert project.document("status", "x")["runs"][0]["state"] == "running"
    assert project.run("stop", "x", "--grace", "0").returncode == 1
