"""Ctrl-C at the worst moments: just after a lock was taken, in the middle of a sink, twice."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from dflashctl.transport import Script, Transport, run_script, stream_script
from dflashctl.transport.interrupts import check, held_back, let_through

_TAKES_A_LOCK = {"acquire", "__enter__"}


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """However the tests were started, SIGINT raises KeyboardInterrupt."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


class InterruptAfterLock:
    """Sends SIGINT when this thread has just taken its nth lock, before its next bytecode."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def begin(self, _chunk: bytes) -> None:
        if self._left > 0:
            sys.setprofile(self._look)

    def _look(self, _frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and arg.__name__ in _TAKES_A_LOCK:
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("nth", range(1, 6))
def test_ctrl_c_just_after_a_lock_was_taken_ends_the_command(way: Transport, nth: int) -> None:
    interrupt = InterruptAfterLock(nth)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream_script(way, Script("echo begun; sleep 1000", deadline_s=None), interrupt.begin)
    finally:
        sys.setprofile(None)
    assert run_script(way, Script("echo a")).stdout == b"a\n"


def test_ctrl_c_is_kept_until_the_next_check_and_raised_once() -> None:
    with held_back():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_kept_ctrl_c_is_raised_at_the_end_whatever_else_was() -> None:
    @held_back()
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError("the link broke, too")

    with pytest.raises(KeyboardInterrupt):
        fail()
    check()


def test_a_second_ctrl_c_is_raised_at_once() -> None:
    told: list[str] = []

    @held_back()
    def interrupted_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        told.append("kept")
        signal.raise_signal(signal.SIGINT)
        told.append("kept, too")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert told == ["kept"]
    check()


def test_a_sink_that_blocks_is_ended_at_once_and_a_kept_ctrl_c_before_it_begins() -> None:
    readable, writable = os.pipe()
    main = threading.main_thread().ident
    assert main is not None
    sender = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))

    @let_through()
    def block() -> None:
        sender.start()
        os.read(readable, 1)

    try:
        with held_back():
            with pytest.raises(KeyboardInterrupt):
                block()
            signal.raise_signal(signal.SIGINT)  # kept again
            with pytest.raises(KeyboardInterrupt), let_through():
                pytest.fail("it began")
    finally:
        sender.join()
        os.close(readable)
        os.close(writable)


def test_other_threads_neither_keep_nor_get_a_ctrl_c() -> None:
    told: list[str] = []

    def ask() -> None:
        with held_back(), let_through():
            check()
        told.append("no Ctrl-C")

    thread = threading.Thread(target=ask)

    @held_back()
    def run_interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        thread.start()
        thread.join()

    with pytest.raises(KeyboardInterrupt):
        run_interrupted()
    assert told == ["no Ctrl-C"]


def test_who_ignores_sigint_goes_on_doing_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back(), let_through():
        signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
