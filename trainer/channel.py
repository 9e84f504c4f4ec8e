"""The hidden-state channel between target and drafter threads: bounded, ordered, carries failures.

Target threads claim indices, finish them out of order and hand them over; each drafter asks for the
index it needs. A batch waits here only when it is near enough to the next one needed and there is
room for its bytes, so that a fast target thread cannot fill the memory with batches nobody can use
yet. What a thread claimed and cannot make, or not in time, goes back to the others.
"""

import heapq
import threading
import time
from typing import Generic, TypeVar

from trainer.errors import ChannelClosedError, WorkerError

T = TypeVar("T")
_WAIT_S = 1.0


class OrderedChannel(Generic[T]):
    """Hands over items by index; every index from ``first`` to ``stop`` is put once and taken once.

    capacity: how far ahead of the next needed an item may be, None as far as bytes allow.
    max_bytes: of the items that wait, beside the next needed, which is always let in. makers:
    number of threads that claim indices, each under a name; "" is who hands over unclaimed ones.

    Deadlock-free for any number of threads on both sides when the takers ask for indices in a
    globally agreed order, and each maker hands over the lowest index it holds first: the lowest
    index not yet taken never waits for room.
    """

    def __init__(
        self,
        capacity: int | None,
        first: int = 0,
        *,
        stop: int | None = None,
        max_bytes: int | None = None,
        makers: int = 1,
    ) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._condition = threading.Condition(threading.Lock())
        self._items: dict[int, T] = {}
        self._sizes: dict[int, int] = {}  # bytes of what is here or has been let in
        self._next_needed = first  # the lowest index that nobody has taken
        self._taken_ahead: set[int] = set()
        self._next_claim, self._stop = first, stop
        self._returned: list[int] = []  # a heap: claimed by a thread that was then retired
        self._claimed: dict[int, str] = {}  # and not handed over yet, with the maker
        self._makers = makers
        self._retired: set[str] = set()
        self._closed = False
        self._failure: tuple[str, BaseException] | None = None
        self._put_wait_s = 0.0
        self._get_wait_s = 0.0

    @property
    def depth(self) -> int:
        """Number of items that wait to be taken (q_hs)."""
        return len(self._items)

    @property
    def size_bytes(self) -> int:
        """Bytes of the items that wait, and of those let in that are on their way."""
        with self._condition:
            return sum(self._sizes.values())

    @property
    def put_wait_s(self) -> float:
        """Seconds that putters waited for room, all together: the drafters were the slower side."""
        return self._put_wait_s

    @property
    def get_wait_s(self) -> float:
        """Seconds that getters waited for an item: the target threads were the slower side."""
        return self._get_wait_s

    def claim(self, maker: str = "", *, wait: bool = True) -> int | None:
        """Return an index to make, each once, first those that were given back; None at the end.

        The end is when every index has been handed over: until then another thread may fail and
        give its own back. ``wait=False`` returns None at once when there is nothing to claim now;
        a thread that holds a claimed index must ask so, or it waits for itself.

        Raises: WorkerError with the first failure of any thread.
        """
        with self._condition:
            while True:
                self._check()
                self._retired.discard(maker)
                index = None if self._closed else self._claimable()
                if index is not None:
                    self._claimed[index] = maker
                    return index
                if self._closed or not wait or not self._claimed:
                    return None
                self._condition.wait(_WAIT_S)

    def retire(self, maker: str = "") -> list[int] | None:
        """Give back what a maker claimed that failed or stands still; it is back when it claims.

        Returns the indices, or None, with nothing given back, when no other maker is left.
        """
        with self._condition:
            if len(self._retired | {maker}) >= self._makers:
                return None
            self._retired.add(maker)
            indices = sorted(index for index, by in self._claimed.items() if by == maker)
            for index in indices:
                del self._claimed[index]
                self._sizes.pop(index, None)
                heapq.heappush(self._returned, index)
            self._condition.notify_all()
            return indices

    def holds(self, index: int, maker: str) -> bool:
        """Say whether an index is this maker's to hand over."""
        with self._condition:
            return self._is_of(index, maker)

    def admit(self, index: int, size_bytes: int = 0, maker: str = "") -> bool:
        """Wait for room for an item and keep it; the item is put afterwards.

        Returns False, with nothing kept, when it is not the maker's any more, or when an index was
        given back meanwhile: the caller should claim and make that one before it waits again, for
        it may be the next needed.

        Raises: WorkerError with the first failure of any thread, ChannelClosedError after close.
        """
        return self._keep_room(index, size_bytes, maker, yields=True)

    def put(self, index: int, item: T, size_bytes: int = 0, maker: str = "") -> None:
        """Hand over an item; waits for room unless ``admit`` has kept it.

        An item that is not the maker's any more is dropped: another makes it, or has.

        Raises: WorkerError with the first failure of any thread, ChannelClosedError after close.
        """
        if index not in self._sizes:
            self._keep_room(index, size_bytes, maker, yields=False)
        with self._condition:
            self._check()
            if self._is_of(index, maker):
                self._items[index] = item
                self._claimed.pop(index, None)
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
            del self._sizes[index]
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

    def _is_of(self, index: int, maker: str) -> bool:
        return self._claimed.get(index, "") == maker

    def _claimable(self) -> int | None:
        if self._returned:
            return heapq.heappop(self._returned)
        if self._stop is not None and self._next_claim >= self._stop:
            return None
        self._next_claim += 1
        return self._next_claim - 1

    def _keep_room(self, index: int, size_bytes: int, maker: str, *, yields: bool) -> bool:
        began, kept = time.monotonic(), False
        with self._condition:
            while self._is_of(index, maker):
                self._check()
                if self._closed:
                    raise ChannelClosedError(f"the channel was closed before item {index}")
                if self._has_room(index, size_bytes):
                    self._sizes[index], kept = size_bytes, True
                    break
                if yields and self._returned:
                    break
                self._condition.wait(_WAIT_S)
            self._put_wait_s += time.monotonic() - began
            return kept

    def _has_room(self, index: int, size_bytes: int) -> bool:
        if index <= self._next_needed:
            return True
        if self._capacity is not None and index >= self._next_needed + self._capacity:
            return False
        if self._max_bytes is None:
            return True
        return sum(self._sizes.values()) + size_bytes <= self._max_bytes

    def _check(self) -> None:
        if self._failure is not None:
            thread, error = self._failure
            raise WorkerError(f"thread {thread}: {type(error).__name__}: {error}") from error
