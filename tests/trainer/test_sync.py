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
    rows = [torch.empty(0)] * 3

    def exchange(rank: int) -> None:
        row = torch.tensor([float(rank), 7.0])
        sums = StepSums(num_tokens=10, num_anchors=rank)
        totals[rank], rows[rank] = sync.exchange(rank, flats[rank], sums, row)

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(torch.equal(flat, expected) for flat in flats)
    assert totals == [StepSums(num_tokens=30, num_anchors=3)] * 3
    assert all(found.tolist() == [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]] for found in rows)


def test_one_replica_keeps_its_gradient() -> None:
    flat = torch.tensor([1.0, 2.0])
    sums = StepSums(num_tokens=5, num_anchors=6)
    total, rows = GradientSync(1).exchange(0, flat, sums, torch.tensor([3.0]))
    assert flat.tolist() == [1.0, 2.0]
    assert (total, rows.tolist()) == (sums, [[3.0]])


def test_fewer_parameters_than_replicas_still_add_up() -> None:
    flats = [torch.tensor([float(rank)]) for rank in range(3)]
    sync = GradientSync(3)
    threads = [
        threading.Thread(target=sync.exchange, args=(rank, flats[rank], StepSums(), torch.ones(1)))
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
            sync.exchange(0, torch.zeros(4), StepSums(), torch.ones(1))
        caught.append(info.value)

    thread = threading.Thread(target=exchange)
    thread.start()
    sync.abort()
    thread.join(10)
    assert len(caught) == 1
