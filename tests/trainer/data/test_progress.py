"""Progress on standard error: lines in a log, a bar on a terminal."""

import os
import sys

import pytest

from trainer.data.progress import Progress


def test_log_gets_whole_lines_and_the_last_one_always(capsys: pytest.CaptureFixture[str]):
    progress = Progress("tokenise", 4000, "records")
    progress.skip(1000)
    for _ in range(3):
        progress.advance(1000, "7 bad")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenise: 4,000/4,000 records  100%  ")
    assert line.endswith(" s  7 bad")


def test_terminal_gets_a_bar_that_overwrites_itself(monkeypatch: pytest.MonkeyPatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress("read", 10, "bytes")
        progress.advance(10)
        shown = os.read(leader, 4096).decode()
    os.close(leader)
    assert shown.startswith(f"\r[{'#' * 24}] read: 10/10 bytes  100%")
    assert shown.endswith("\r\n")


def test_nothing_to_do_is_no_division_by_zero(capsys: pytest.CaptureFixture[str]):
    Progress("read", 0, "bytes").advance(0)
    assert "read: 0/0 bytes  100%" in capsys.readouterr().err
