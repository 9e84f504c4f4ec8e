"""The claim on a lab's state directory, with others who make and clear it at the same moment."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflashctl.errors import LabError
from dflashctl.lab.claim import MARKER, clear_away, create, refuse_foreign_directory, take

_LONG_S = 100.0


def make_and_clear(state: Path) -> None:
    """What an `up` and then a `down` do with the directory."""
    with create(state):
        (state / "lab.json").write_text("{}")
    claim = take(state)
    if claim is not None:
        with claim:
            clear_away(state, time.monotonic() + _LONG_S)


def while_others_run(other: Callable[[], None], mine: Callable[[], None], rounds: int) -> None:
    """Call `mine` so often while a thread calls `other` again and again."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def again() -> None:
        while not ended.is_set():
            try:
                other()
            except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
                failures.append(error)
                return

    thread = threading.Thread(target=again)
    thread.start()
    try:
        for _ in range(rounds):
            mine()
    finally:
        ended.set()
        thread.join(_LONG_S)
    assert not failures, failures


def test_a_directory_that_a_lab_makes_or_clears_just_now_is_not_foreign(tmp_path: Path) -> None:
    state = tmp_path / "lab"
    while_others_run(
        other=lambda: make_and_clear(state),
        mine=lambda: refuse_foreign_directory(state),
        rounds=5000,
    )


def test_those_who_make_and_clear_a_directory_at_once_are_refused_by_name(tmp_path: Path) -> None:
    state = tmp_path / "lab"

    def one() -> None:
        try:
            make_and_clear(state)
        except LabError as error:
            assert error.message == f"another process is using {state}"  # noqa: PT017
            claim = take(state) if state.exists() else None
            if claim is not None:
                with claim:
                    clear_away(state, time.monotonic() + _LONG_S)

    while_others_run(other=one, mine=one, rounds=1000)


def test_an_empty_directory_may_become_a_labs_and_others_may_not(tmp_path: Path) -> None:
    refuse_foreign_directory(tmp_path / "nothing")
    refuse_foreign_directory(tmp_path)
    (tmp_path / "mine").write_text("precious")
    for foreign in (tmp_path, tmp_path / "mine"):
        with pytest.raises(LabError, match="exists and is not a lab's state directory"):
            refuse_foreign_directory(foreign)
    (tmp_path / MARKER).touch()
    refuse_foreign_directory(tmp_path)
