"""attach on a terminal: the run's own output, and Ctrl-b d leaves the run alone."""

import os
import pty
import re
import select
import shutil
import sys
import time

import pytest

from tests.dflashctl.act.conftest import REPOSITORY, Project

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def talk(project: Project, keys: bytes, wait_for: bytes) -> tuple[int, bytes]:
    """Run ``attach x`` on a terminal, press ``keys`` once ``wait_for`` was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project.root)
        os.environ.update(PYTHONPATH=f"{project.code}:{REPOSITORY}", TERM="xterm")
        os.execv(sys.executable, [sys.executable, "-m", "dflashctl", "attach", "x"])  # noqa: S606
    seen, pressed, limit = b"", False, time.monotonic() + 100
    while time.monotonic() < limit:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # how Linux says that the terminal's other side is closed
            break
        seen += data
        if wait_for in seen and not pressed:
            pressed = True
            for key in keys:
                os.write(terminal, bytes([key]))
                time.sleep(0.2)  # tmux takes keys within a millisecond for pasted text
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), seen


def test_attach_shows_the_log_and_detaching_leaves_the_run_alone(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    assert project.run("launch", "--tag", "x").returncode == 0
    # any line of the log: the first ones may have left the screen by now
    code, seen = talk(project, b"\x02d", b"line ")
    assert code == 0, seen
    piped = project.run("attach", "x")
    assert (piped.returncode, piped.stderr.splitlines()[0]) == (
        2,
        "error[usage]: attach needs a terminal",
    )
    assert project.document("status", "x")["runs"][0]["state"] == "running"
    assert project.run("stop", "x").returncode == 0


def test_attach_to_a_run_that_ended_says_where_to_look(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    done = project.run("launch", "--tag", "x", "--set", "optim.max_steps=2")
    assert done.returncode == 0
    assert project.run("stop", "x").returncode == 0  # its tmux is gone then, too
    code, seen = talk(project, b"", b"never shown")
    assert code == 1
    assert re.search(rb"error\[no-session\].*no tmux session x", seen)
    assert b"dflashctl logs x" in seen


def test_attach_to_a_run_that_never_was_says_so(project: Project) -> None:
    done = project.run("attach", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("error[no-session]: here/self: no tmux session x")
