"""The hidden-state channel between target and drafter threads: bounded, ordered, carries failures.

Target threads finish batches out of order; each drafter asks for the index it needs. A batch waits
here only when it is near enough to the next one needed, so that a fast target thread cannot fill
the memory with batches nobody can use yet.
"""

import threading
import time
from typing import Generic, TypeVar

from trainer.errors import ChannelClosedError, WorkerError

T = TypeVar("T")
_WAIT_S = 1.0


class OrderedChannel(Generic[T]):
    """Hands over items by index; every index from ``first`` on is put once and taken once.

    Deadlock-free for any number of threads on both sides when the takers ask for indices in a
    globally agreed order: the lowest index not yet taken never waits for room.
    """

    def __init__(self, capacity: int, first: int = 0) -> None:
        self._capacity = capacity
        self._condition = threading.Condition(threading.Lock())
        self._items: dict[int, T] = {}
        self._next_needed = first  # the lowest index that nobody has taken
        self._taken_ahead: set[int] = set()
        self._closed = False
        self._failure: tuple[str, BaseException] | None = None
        self._put_wait_s = 0.0
        self._get_wait_s = 0.0

    @property
    def depth(self) -> int:
        """Number of items that wait to be taken (q_hs)."""
        return len(self._items)

    @property
    def put_wait_s(self) -> float:
        """Seconds that putters waited for room, all together: the drafters were the slower side."""
        return self._put_wait_s

    @property
    def get_wait_s(self) -> float:
        """Seconds that getters waited for an item: the target threads were the slower side."""
        return self._get_wait_s

    def put(self, index: int, item: T) -> None:
        """Hand over an item; blocks while it is ``capacity`` or more ahead of the next needed.

        Raises: WorkerError with the first failure of any thread, ChannelClosedError after close.
        """
        began = time.monotonic()
        with self._condition:
            while True:
                self._check()
                if self._closed:
                    raise ChannelClosedError(f"the channel was closed before item {index}")
                if index < self._next_needed + self._capacity:
                    break
                self._condition.wait(_WAIT_S)
            self._put_wait_s += time.monotonic() - began
            self._items[index] = item
            self._condition.notify_all()

    def get(self, index: int) -> T:
        """Take the item of ``index``; blocks until it is there.

        Raises: WorkerError with the first failure of any thread, ChannelClosedError when the
        channel was closed and the item is not there.
        """
        began = time.monotonic()
        with self._condition:
            while index not in self._items:
                self._check()
                if self._closed:
                    raise ChannelClosedError(f"the channel was closed; item {index} never came")
                self._condition.wait(_WAIT_S)
            self._check()
            self._get_wait_s += time.monotonic() - began
            item = self._items.pop(index)
            self._taken_ahead.add(index)
            while self._next_needed in self._taken_ahead:
                self._taken_ahead.remove(self._next_needed)
                self._next_needed += 1
            self._condition.notify_all()
        return item

    def close(self) -> None:
        """Refuse further items and wake everybody; items that are there can still be taken."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def fail(self, thread: str, error: BaseException) -> None:
        """Wake everybody with this failure; only the first one counts."""
        with self._condition:
            if self._failure is None:
                self._failure = (thread, error)
            self._condition.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            thread, error = self._failure
            raise WorkerError(f"thread {thread}: {type(error).__name__}: {error}") from error
