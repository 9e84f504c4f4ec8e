"""Gradient exchange between real threads, as their backward makes the gradients."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.contract.config import OptimConfig
from trainer.errors import ChannelClosedError
from trainer.learning_rate import Schedule
from trainer.optim import DraftOptimizer
from trainer.sync import Bucket, Exchanged, GradientSync, StepSums, buckets_of

SIZES = (5, 700, 1, 64, 231)  # 1,001 numbers
FIGURES = torch.tensor([3.0, 4.0], dtype=torch.float64)


class Vectors(nn.Module):
    """Parameters whose gradients are what ``backward`` is given."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def backward(self, grads: list[Tensor | None]) -> None:
        """Give parts their gradients; None leaves a part out of the graph."""
        products = [p @ g for p, g in zip(self.parts, grads, strict=True) if g is not None]
        if products:
            torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]


class Replicas:
    """Optimisers of equal models, each stepped by a thread of its own."""

    def __init__(self, count: int, bucket_numbers: int = 100) -> None:
        self.models = [Vectors() for _ in range(count)]
        schedule = Schedule(10, 0, 1.0)
        self.optimizers = [DraftOptimizer(m, OptimConfig(), schedule) for m in self.models]
        self.sync = GradientSync(count, bucket_numbers)
        self.found: dict[int, Exchanged] = {}
        self.raised: dict[int, BaseException] = {}

    def run(self, body: Callable[[int], None]) -> None:
        """Run ``body`` once a rank, joined; an error ends the exchange for all."""

        def thread(rank: int) -> None:
            try:
                with self.sync.joined(rank, self.optimizers[rank]):
                    body(rank)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.raised[rank] = error
                self.sync.abort()

        threads = [
            threading.Thread(target=thread, args=(rank,), daemon=True)
            for rank in range(len(self.models))
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(20)
        assert not any(one.is_alive() for one in threads), "a replica waits for another"

    def step(self, rank: int, *micro_batches: list[Tensor | None]) -> None:
        """Run backward of the micro-batches, the last one travelling, and meet the others."""
        model, optimizer = self.models[rank], self.optimizers[rank]
        for grads in micro_batches[:-1]:
            model.backward(grads)
            optimizer.accumulate()
        with self.sync.travelling(rank):
            model.backward(micro_batches[-1])
            optimizer.accumulate()
        sums = StepSums(num_tokens=10, num_anchors=rank)
        self.found[rank] = self.sync.exchange(rank, sums, FIGURES + rank)


def _drawn(seed: int, scale: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for size in SIZES]


def _flat(grads: list[Tensor | None]) -> Tensor:
    return torch.cat(
        [g if g is not None else torch.zeros(n) for g, n in zip(grads, SIZES, strict=True)]
    )


@pytest.mark.parametrize("bucket_numbers", [1, 100, 10_000])
def test_three_replicas_end_with_the_same_sum_to_the_bit(bucket_numbers: int) -> None:
    replicas = Replicas(3, bucket_numbers)
    grads = [_drawn(rank, 10.0**rank) for rank in range(3)]
    replicas.run(lambda rank: replicas.step(rank, grads[rank]))
    assert replicas.raised == {}
    expected = (_flat(grads[0]) + _flat(grads[1])) + _flat(grads[2])  # in rank order
    assert all(torch.equal(one.flat_grad, expected) for one in replicas.optimizers)
    for found in replicas.found.values():
        assert found.sums == StepSums(num_tokens=30, num_anchors=3)
        assert found.rows[:, :-1].tolist() == [[3.0, 4.0], [4.0, 5.0], [5.0, 6.0]]
        # The last column tells of each replica's own gradient.
        norms = [_flat(one).norm().item() for one in grads]
        assert found.rows[:, -1].tolist() == pytest.approx(norms, rel=1e-5)


def test_step_after_step_is_exchanged_though_a_replica_is_ahead() -> None:
    replicas = Replicas(2)
    wanted = [_flat(_drawn(step)) + _flat(_drawn(100 + step)) for step in range(20)]
    wrong: list[tuple[int, int]] = []

    def steps(rank: int) -> None:
        for step in range(20):
            replicas.step(rank, _drawn(100 * rank + step))
            optimizer = replicas.optimizers[rank]
            if not torch.equal(optimizer.flat_grad, wanted[step]):
                wrong.append((rank, step))
            optimizer.apply(step, 1.0, 1.0)

    replicas.run(steps)
    assert (replicas.raised, wrong) == ({}, [])
    first, second = (one.masters() for one in replicas.optimizers)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_micro_batches_are_summed_before_they_are_exchanged() -> None:
    replicas = Replicas(2)
    replicas.run(lambda rank: replicas.step(rank, *(_drawn(2 * rank + n) for n in range(2))))
    first, second = (_flat(_drawn(2 * rank)) + _flat(_drawn(2 * rank + 1)) for rank in range(2))
    assert all(torch.equal(one.flat_grad, first + second) for one in replicas.optimizers)


def test_replica_without_gradients_adds_zeros_and_hangs_nobody() -> None:
    replicas = Replicas(2)
    some = _drawn(0)
    some[1] = None  # a part that this step does not use
    nothing: list[Tensor | None] = [None] * len(SIZES)
    replicas.optimizers[1].flat_grad.fill_(7.0)  # of an earlier step
    replicas.run(lambda rank: replicas.step(rank, nothing if rank else some))
    assert replicas.raised == {}
    assert all(torch.equal(one.flat_grad, _flat(some)) for one in replicas.optimizers)
    assert replicas.found[0].rows[1, -1] == 0


def test_one_replica_keeps_its_gradient() -> None:
    replicas = Replicas(1)
    replicas.run(lambda rank: replicas.step(rank, _drawn(0)))
    assert torch.equal(replicas.optimizers[0].flat_grad, _flat(_drawn(0)))
    found = replicas.found[0]
    assert found.sums == StepSums(num_tokens=10)
    assert found.rows[:, :-1].tolist() == [[3.0, 4.0]]
    assert found.rows[0, -1].item() == pytest.approx(_flat(_drawn(0)).norm().item())


def test_gradient_that_is_not_finite_is_told_of_the_replica_that_made_it() -> None:
    replicas = Replicas(2)
    bad = _drawn(1)
    assert bad[3] is not None
    bad[3][2] = torch.nan
    replicas.run(lambda rank: replicas.step(rank, bad if rank else _drawn(0)))
    for found in replicas.found.values():
        assert found.rows[:, -1].isfinite().tolist() == [True, False]
    assert not bool(replicas.optimizers[0].grad_norm(again=True).isfinite())


def test_replica_that_fails_in_backward_leaves_nobody_waiting() -> None:
    replicas = Replicas(3)
    broken = _drawn(0)
    broken[0] = torch.zeros(6)  # of another size than its part

    replicas.run(lambda rank: replicas.step(rank, broken if rank == 1 else _drawn(rank)))
    assert isinstance(replicas.raised[1], RuntimeError)
    assert {type(replicas.raised[rank]) for rank in (0, 2)} == {ChannelClosedError}
    assert replicas.found == {}


def test_backward_that_runs_again_after_gradients_travelled_is_an_error() -> None:
    replicas = Replicas(2)

    def twice(rank: int) -> None:
        with replicas.sync.travelling(rank):
            replicas.models[rank].backward(_drawn(rank))
            replicas.models[rank].backward(_drawn(rank))

    replicas.run(twice)
    assert all("backward ran again" in str(error) for error in replicas.raised.values())
    assert len(replicas.raised) == 2


def test_backward_outside_of_travelling_is_the_replicas_own() -> None:
    replicas = Replicas(2)
    replicas.run(lambda rank: replicas.models[rank].backward(_drawn(rank)))
    for rank, model in enumerate(replicas.models):
        made = [part.grad for part in model.parts]
        assert torch.equal(_flat(made), _flat(_drawn(rank)))


def test_abort_wakes_a_replica_that_waits_for_the_others() -> None:
    replicas = Replicas(2)
    waits = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            waits.set()
            replicas.step(0, _drawn(0))
        else:
            waits.wait(20)
            replicas.sync.abort()

    replicas.run(body)
    assert list(replicas.raised) == [0]
    assert "another drafter thread left the step" in str(replicas.raised[0])


def test_buckets_hold_whole_tensors_and_all_of_them() -> None:
    # Tensors of 5, 700, 1, 64 and 231 numbers.
    starts = [0, 5, 705, 706, 770]
    assert buckets_of(starts, 1001, 100) == [
        Bucket(0, 705, (0, 1)),
        Bucket(705, 1001, (2, 3, 4)),
    ]
    assert len(buckets_of(starts, 1001, 1)) == 5
    assert buckets_of(starts, 1001, 5000) == [Bucket(0, 1001, (0, 1, 2, 3, 4))]
