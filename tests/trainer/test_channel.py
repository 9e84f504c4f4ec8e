"""The hidden-state channel with real threads."""

import random
import threading
import time

import pytest

from trainer.channel import OrderedChannel
from trainer.errors import ChannelClosedError, WorkerError


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

    thread = threading.Thread(target=put_twelve)
    thread.start()
    channel.get(11)  # 10 is still the next needed: no room yet
    assert not done.wait(0.2)
    channel.get(10)
    assert done.wait(5)
    thread.join(5)
    assert channel.put_wait_s >= 0.2


def test_get_waits_for_its_item_and_the_wait_is_counted() -> None:
    channel: OrderedChannel[int] = OrderedChannel(1)
    threading.Timer(0.2, channel.put, (0, 7)).start()
    assert channel.get(0) == 7
    assert 0.15 < channel.get_wait_s < 5


def test_first_failure_wakes_everybody_and_names_its_thread() -> None:
    channel: OrderedChannel[int] = OrderedChannel(1)
    caught: list[str] = []

    def wait_on(side: str) -> None:
        try:
            channel.get(0) if side == "get" else channel.put(5, 5)
        except WorkerError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=wait_on, args=(side,)) for side in ("get", "put", "get")]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    channel.fail("target-1", ValueError("bad batch"))
    channel.fail("target-2", ValueError("a consequence"))
    for thread in threads:
        thread.join(5)
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
