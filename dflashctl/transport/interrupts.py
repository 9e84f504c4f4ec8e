"""Ctrl-C at moments of our choosing, where the main thread waits for commands.

Python raises KeyboardInterrupt between any two bytecodes: also where a lock has just been taken and
the ``try`` or ``with`` that gives it back has not begun. Popen.poll(), paramiko's channels and
futures have such places, and who takes that lock later waits for ever. So Ctrl-C is kept there
until ``check``, which every tick calls. A second one, of a user who will not wait, is raised at
once. Other threads get none, and an ignored SIGINT stays ignored.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_kept: list[int] = []  # the signal that the handler has kept; an Event would take a lock


def _keep(number: int, _frame: FrameType | None) -> None:
    if _kept:
        raise KeyboardInterrupt
    _kept.append(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held_back() -> Iterator[None]:
    """Keep Ctrl-C within the block until ``check``, at the latest until the block's end.

    Raises: KeyboardInterrupt at the end, whatever else the block raised.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check()


@contextmanager
def let_through() -> Iterator[None]:
    """Raise Ctrl-C at once within the block, which may block for long, also a kept one."""
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not _keep:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check()
        yield
    finally:
        signal.signal(signal.SIGINT, _keep)


def check() -> None:
    """Raise the Ctrl-C that was kept, once, in the main thread."""
    if _kept and _in_main_thread():
        _kept.clear()
        raise KeyboardInterrupt
