"""The hidden-state channel with real threads."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from trainer.channel import OrderedChannel
from trainer.errors import ChannelClosedError, WorkerError


def _in_a_thread(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def _until_waiting(channel: OrderedChannel[int], count: int = 1) -> None:
    """Return once so many threads wait on the channel; the time limit of the test ends this."""
    while len(channel._condition._waiters) != count:
        time.sleep(0.001)


def test_items_come_out_by_index_whatever_the_order_they_went_in() -> None:
    channel: OrderedChannel[str] = OrderedChannel(3)
    for index in (2, 0, 1):
        channel.put(index, f"item {index}")
    assert channel.depth == 3
    assert [channel.get(i) for i in (1, 0, 2)] == ["item 1", "item 0", "item 2"]
    assert channel.depth == 0


def test_put_blocks_when_it_is_capacity_ahead_of_the_next_needed() -> None:
    channel: OrderedChannel[int] = OrderedChannel(2, first=10)
    channel.put(10, 0)
    channel.put(11, 1)
    done = threading.Event()

    def put_twelve() -> None:
        channel.put(12, 2)
        done.set()

    thread = _in_a_thread(put_twelve)
    channel.get(11)  # 10 is still the next needed: no room yet
    _until_waiting(channel)
    assert not done.wait(0.2)
    channel.get(10)
    assert done.wait(20)
    thread.join(20)
    assert channel.put_wait_s >= 0.2


def test_get_waits_for_its_item_and_the_wait_is_counted() -> None:
    channel: OrderedChannel[int] = OrderedChannel(1)
    got: list[int] = []
    began = time.monotonic()
    thread = _in_a_thread(lambda: got.append(channel.get(0)))
    _until_waiting(channel)
    time.sleep(0.2)  # what is measured
    channel.put(0, 7)
    thread.join(20)
    assert got == [7]
    assert 0.2 <= channel.get_wait_s <= time.monotonic() - began


def test_first_failure_wakes_everybody_and_names_its_thread() -> None:
    channel: OrderedChannel[int] = OrderedChannel(1)
    caught: list[str] = []

    def wait_on(side: str) -> None:
        try:
            channel.get(0) if side == "get" else channel.put(5, 5)
        except WorkerError as error:
            caught.append(str(error))

    threads = [_in_a_thread(partial(wait_on, side)) for side in ("get", "put", "get")]
    _until_waiting(channel, 3)
    channel.fail("target-1", ValueError("bad batch"))
    channel.fail("target-2", ValueError("a consequence"))
    for thread in threads:
        thread.join(20)
    assert caught == ["thread target-1: ValueError: bad batch"] * 3
    with pytest.raises(WorkerError, match="target-1"):
        channel.put(0, 0)


def test_close_refuses_puts_but_what_is_there_can_be_taken() -> None:
    channel: OrderedChannel[int] = OrderedChannel(2)
    channel.put(0, 42)
    channel.close()
    assert channel.get(0) == 42
    with pytest.raises(ChannelClosedError, match="item 1 never came"):
        channel.get(1)
    with pytest.raises(ChannelClosedError, match="before item 1"):
        channel.put(1, 1)


@pytest.mark.parametrize(
    ("capacity", "num_putters", "num_getters"), [(1, 4, 1), (3, 2, 3), (4, 5, 4)]
)
def test_stress_every_item_arrives_once_at_the_thread_that_asked(
    capacity: int, num_putters: int, num_getters: int
) -> None:
    num_items = 600 // num_getters * num_getters
    channel: OrderedChannel[int] = OrderedChannel(capacity)
    counter, lock = iter(range(num_items)), threading.Lock()
    taken: list[list[int]] = [[] for _ in range(num_getters)]
    deepest: list[int] = [0]

    def put() -> None:
        rng = random.Random()
        while True:
            with lock:
                index = next(counter, None)
            if index is None:
                return
            time.sleep(rng.random() * 0.001)
            channel.put(index, index * 3)
            deepest[0] = max(deepest[0], channel.depth)

    def take(rank: int) -> None:
        taken[rank].extend(channel.get(i) for i in range(rank, num_items, num_getters))

    threads = [threading.Thread(target=put) for _ in range(num_putters)]
    threads += [threading.Thread(target=take, args=(r,)) for r in range(num_getters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for rank in range(num_getters):
        assert taken[rank] == [i * 3 for i in range(rank, num_items, num_getters)]
    assert 1 <= deepest[0] <= capacity


@pytest.mark.parametrize("capacity", [10, None])
def test_bytes_bound_the_queue_but_the_next_needed_is_always_let_in(capacity: int | None) -> None:
    channel: OrderedChannel[int] = OrderedChannel(capacity, max_bytes=100)
    channel.put(1, 1, 60)
    channel.put(0, 0, 500)  # next needed: let in, whatever its size
    assert (channel.depth, channel.size_bytes) == (2, 560)
    done = threading.Event()

    def put_two() -> None:
        channel.put(2, 2, 60)
        done.set()

    thread = _in_a_thread(put_two)
    assert channel.get(0) == 0
    _until_waiting(channel)  # 60 bytes wait, 60 more do not fit
    assert not done.is_set()
    assert channel.get(1) == 1
    assert done.wait(20)
    thread.join(20)
    assert channel.size_bytes == 60


def test_every_index_is_claimed_once_and_the_end_comes_when_all_are_put() -> None:
    channel: OrderedChannel[int] = OrderedChannel(10, 3, stop=6, makers=2)
    assert [channel.claim(wait=False) for _ in range(4)] == [3, 4, 5, None]
    ends: list[int | None] = []
    thread = _in_a_thread(lambda: ends.append(channel.claim()))  # 3, 4 and 5 may yet come back
    for index in (4, 3):
        channel.put(index, index)
    _until_waiting(channel)
    assert ends == []
    channel.put(5, 5)
    thread.join(20)
    assert ends == [None]


def test_what_a_failed_maker_claimed_is_claimed_by_another_first() -> None:
    channel: OrderedChannel[int] = OrderedChannel(10, stop=8, makers=2)
    assert [channel.claim(maker) for maker in "baaa"] == [0, 1, 2, 3]
    channel.put(2, 2, maker="a")
    assert channel.retire("a") == [1, 3]  # 2 is here already
    assert [channel.claim("b") for _ in range(3)] == [1, 3, 4]
    assert channel.retire("b") is None  # nobody is left


def test_what_a_maker_puts_after_others_took_over_is_dropped_and_it_may_claim_again() -> None:
    channel: OrderedChannel[str] = OrderedChannel(10, stop=3, makers=2)
    assert [channel.claim(maker) for maker in "aab"] == [0, 1, 2]
    assert channel.admit(0, 7, "a")
    assert channel.retire("a") == [0, 1]
    assert channel.size_bytes == 0  # its room is free again
    channel.put(0, "late", 7, "a")
    assert not channel.admit(1, 7, "a")
    assert channel.depth == 0
    assert channel.retire("b") is None  # the other is out
    assert channel.claim("b") == 0
    channel.put(0, "in time", 7, "b")
    channel.put(0, "too late", 7, "a")
    assert (channel.get(0), channel.depth) == ("in time", 0)
    assert not channel.holds(1, "a")
    assert channel.claim("a") == 1  # it is a maker again
    assert channel.holds(1, "a")
    assert channel.retire("b") == [2]


def test_maker_that_waits_for_room_is_told_of_an_index_given_back() -> None:
    """Else all would wait: the one that holds a late index, and the drafter for the early one."""
    channel: OrderedChannel[int] = OrderedChannel(2, stop=9, makers=2)
    assert [channel.claim(maker) for maker in ("early", "", "", "")] == [0, 1, 2, 3]
    admitted: list[bool] = []
    thread = _in_a_thread(lambda: admitted.append(channel.admit(3, 10)))
    _until_waiting(channel)
    assert channel.retire("early") == [0]
    thread.join(20)
    assert admitted == [False]
    assert channel.size_bytes == 0
    assert channel.claim(wait=False) == 0


def test_closing_ends_the_claims_and_a_failure_is_told_to_who_claims() -> None:
    channel: OrderedChannel[int] = OrderedChannel(2, stop=9)
    channel.close()
    assert channel.claim() is None
    channel.fail("drafter-0", ValueError("no"))
    with pytest.raises(WorkerError, match="thread drafter-0: ValueError: no"):
        channel.claim()


@pytest.mark.parametrize(("seed", "capacity"), [(0, 5), (1, 5), (2, 5), (3, None)])
def test_stress_makers_that_fail_lose_nothing_and_bytes_stay_within_bounds(
    seed: int, capacity: int | None
) -> None:
    num_items, num_makers, max_bytes, largest = 300, 6, 50, 30
    channel: OrderedChannel[int] = OrderedChannel(
        capacity, stop=num_items, max_bytes=max_bytes, makers=num_makers
    )
    most = [0]
    taken: list[list[int]] = [[], []]

    def make(number: int) -> None:
        rng, name = random.Random(seed * 100 + number), f"target-{number}"
        held: dict[int, int] = {}
        while True:
            index = channel.claim(name, wait=not held)
            if index is not None:
                if number and rng.random() < 0.01:  # all but the first may fail
                    assert channel.retire(name) == sorted([*held, index])
                    return
                held[index] = rng.randrange(largest)
                if len(held) == 1 and rng.random() < 0.5:
                    continue  # runs ahead by one
            if not held:
                return
            lowest = min(held)
            if channel.admit(lowest, held[lowest], name):
                most[0] = max(most[0], channel.size_bytes)
                channel.put(lowest, lowest * 3, maker=name)
                del held[lowest]

    def take(rank: int) -> None:
        taken[rank].extend(channel.get(index) for index in range(rank, num_items, 2))

    threads = [_in_a_thread(partial(make, number)) for number in range(num_makers)]
    threads += [_in_a_thread(partial(take, rank)) for rank in range(2)]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert taken == [[i * 3 for i in range(rank, num_items, 2)] for rank in range(2)]
    assert most[0] <= max_bytes + largest  # the next needed comes on top


@pytest.mark.parametrize("seed", range(3))
def test_stress_makers_that_are_left_out_and_come_back_change_nothing(seed: int) -> None:
    num_items, names = 300, [f"target-{number}" for number in range(4)]
    channel: OrderedChannel[int] = OrderedChannel(
        5, stop=num_items, max_bytes=50, makers=len(names)
    )
    taken: list[int] = []

    def make(name: str) -> None:
        held: dict[int, int] = {}
        while True:
            index = channel.claim(name, wait=not held)
            if index is not None:
                held[index] = 20
            elif not held:
                return
            lowest = min(held)
            if channel.admit(lowest, held[lowest], name):
                channel.put(lowest, lowest * 3, held[lowest], name)
            held = {one: size for one, size in held.items() if channel.holds(one, name)}

    threads = [_in_a_thread(partial(make, name)) for name in names]
    threads.append(_in_a_thread(lambda: taken.extend(map(channel.get, range(num_items)))))
    rng = random.Random(seed)
    while threads[-1].is_alive():
        channel.retire(rng.choice(names))
        time.sleep(0.0005)  # a spinning thread would keep the others from running at all
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert taken == [index * 3 for index in range(num_items)]
    assert (channel.depth, channel.size_bytes) == (0, 0)
