"""Gradient exchange between real threads."""

import threading

import pytest
import torch

from trainer.errors import ChannelClosedError
from trainer.sync import GradientSync, StepSums


def test_three_replicas_end_with_the_same_sum_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(1001, generator=generator) * 10.0**r for r in range(3)]
    expected = (flats[0] + flats[1]) + flats[2]
    sync = GradientSync(3)
    totals: list[StepSums] = [StepSums()] * 3

    def exchange(rank: int) -> None:
        totals[rank] = sync.exchange(rank, flats[rank], StepSums(1.5, 2.0, 10, rank))

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(torch.equal(flat, expected) for flat in flats)
    assert totals == [StepSums(4.5, 6.0, 30, 3)] * 3


def test_one_replica_keeps_its_gradient() -> None:
    flat = torch.tensor([1.0, 2.0])
    total = GradientSync(1).exchange(0, flat, StepSums(3.0, 4.0, 5, 6))
    assert flat.tolist() == [1.0, 2.0]
    assert total == StepSums(3.0, 4.0, 5, 6)


def test_fewer_parameters_than_replicas_still_add_up() -> None:
    flats = [torch.tensor([float(rank)]) for rank in range(3)]
    sync = GradientSync(3)
    threads = [
        threading.Thread(target=sync.exchange, args=(rank, flats[rank], StepSums()))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [flat.item() for flat in flats] == [3.0, 3.0, 3.0]


def test_abort_wakes_a_replica_that_waits_for_the_others() -> None:
    sync = GradientSync(2)
    caught: list[BaseException] = []

    def exchange() -> None:
        with pytest.raises(ChannelClosedError, match="another drafter") as info:
            sync.exchange(0, torch.zeros(4), StepSums())
        caught.append(info.value)

    thread = threading.Thread(target=exchange)
    thread.start()
    sync.abort()
    thread.join(10)
    assert len(caught) == 1
