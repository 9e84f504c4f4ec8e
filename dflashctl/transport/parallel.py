"""Asks several places at the same time, a thread each; Ctrl-C ends what they wait for."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from dflashctl.transport import interrupts
from dflashctl.transport.child import GIVEN_UP

_TICK_S = 0.1

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def at_once(
    ask: Callable[[_Item], _Answer], items: Iterable[_Item], limit: int, name: str
) -> list[_Answer]:
    """Return what ``ask`` returns for each item, in their order, at most ``limit`` at a time.

    On Ctrl-C the commands that the threads wait for are given up: without that the threads would
    have to be waited for up to their deadlines.
    """
    with interrupts.held_back(), ThreadPoolExecutor(limit, name) as pool:
        asked = [pool.submit(ask, item) for item in items]
        try:
            while wait(asked, _TICK_S).not_done:
                interrupts.check()
            return [one.result() for one in asked]
        except KeyboardInterrupt:
            GIVEN_UP.set()
            pool.shutdown(cancel_futures=True)
            GIVEN_UP.clear()
            raise
