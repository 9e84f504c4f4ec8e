"""The exchange of gradients between GPUs; one GPU is enough: it then holds every replica."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.contract.config import OptimConfig
from trainer.learning_rate import Schedule
from trainer.optim import DraftOptimizer
from trainer.sync import GradientSync, StepSums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_BUSY_CYCLES = 20_000_000  # some 10 ms: what comes too early is seen
_SIZES = (1 << 19, 77, 3 << 17, 5000, 1 << 20)
_STEPS = 8


class Slow(torch.autograd.Function):
    """Passes a vector on; its gradient comes late, and from memory that is used again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return part.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        junk = torch.full_like(grad, 1e3)
        del junk
        made = torch.empty_like(grad)
        torch.cuda._sleep(_BUSY_CYCLES // 8)
        return made.copy_(grad), None


class Vectors(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        zeros = [torch.zeros(size, device=device, dtype=dtype) for size in _SIZES]
        self.parts = nn.ParameterList([nn.Parameter(zero) for zero in zeros])


def _grads(rank: int, step: int, micro: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    drawn = [torch.randn(size, generator=generator) * 10.0**rank for size in _SIZES]
    return [one.to(dtype) for one in drawn]


def _expected(step: int, count: int, num_micro: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the sums over micro-batches, then over ranks, both in order and in fp32."""
    by_rank = []
    for rank in range(count):
        drawn = [[g.float() for g in _grads(rank, step, m, dtype)] for m in range(num_micro)]
        by_rank.append([sum(parts[1:], parts[0]) for parts in zip(*drawn, strict=True)])
    totals = [sum(parts[1:], parts[0]) for parts in zip(*by_rank, strict=True)]
    return [one.to(dtype if num_micro == 1 else torch.float32) for one in totals]


def _placings() -> list[tuple[int, ...]]:
    """Cards of the replicas."""
    found: list[tuple[int, ...]] = [(0, 0), (0, 0, 0)]
    if torch.cuda.device_count() > 1:
        found += [(0, 1), (1, 0, 1)]
    return found


class Replicas:
    """Optimisers on their cards, and what was found wrong."""

    def __init__(self, cards: tuple[int, ...], dtype: torch.dtype, num_micro: int) -> None:
        self.dtype, self.num_micro = dtype, num_micro
        self.devices = [torch.device("cuda", card) for card in cards]
        self.models = [Vectors(device, dtype) for device in self.devices]
        self.optimizers = [
            DraftOptimizer(model, OptimConfig(lr=1e-3), Schedule(100, 0, 1.0))
            for model in self.models
        ]
        for optimizer in self.optimizers:
            optimizer.arrange_gradients(len(cards), num_micro)
        for device in self.devices:
            torch.cuda.synchronize(device)
        self.sync = GradientSync(len(cards), bucket_numbers=1 << 19)
        self.wrong: list[str] = []

    def run(self, rank: int) -> None:
        """Take the steps of one rank; the body of its thread."""
        make: Any = torch.cuda.Stream
        torch.cuda.set_device(self.devices[rank])
        torch.cuda.set_stream(make(self.devices[rank]))
        try:
            with self.sync.joined(rank, self.optimizers[rank]):
                for step in range(_STEPS):
                    for micro in range(self.num_micro):
                        if (step + rank) % 3 == 0:
                            torch.cuda._sleep(_BUSY_CYCLES)  # one is late, another time another
                        last = micro == self.num_micro - 1
                        with self.sync.travelling(rank) if last else nullcontext():
                            self._backward(rank, _grads(rank, step, micro, self.dtype))
                    self._step(rank, step)
            torch.cuda.synchronize(self.devices[rank])
        except BaseException as error:
            self.wrong.append(f"rank {rank}: {type(error).__name__}: {error}")
            self.sync.abort()
            raise

    def _backward(self, rank: int, grads: list[Tensor]) -> None:
        parts = zip(self.models[rank].parts, grads, strict=True)
        sums = [Slow.apply(part, one.to(self.devices[rank])) for part, one in parts]
        torch.stack(sums).sum().backward()
        self.optimizers[rank].accumulate()

    def _step(self, rank: int, step: int) -> None:
        optimizer = self.optimizers[rank]
        figures = torch.ones(2, dtype=torch.float64, device=self.devices[rank])
        found = self.sync.exchange(rank, StepSums(num_tokens=1), figures)
        held = [one.clone() for one in optimizer.gradients().values()]
        norm = optimizer.grad_norm(again=True)
        optimizer.settle(step, optimizer.launch(step, found.rows[:, :-1].sum(0), norm).wait())
        wanted = _expected(step, len(self.devices), self.num_micro, self.dtype)
        same = [torch.equal(a.cpu(), b) for a, b in zip(held, wanted, strict=True)]
        if not all(same):
            self.wrong.append(f"rank {rank} step {step}: {same}")


@pytest.mark.parametrize("cards", _placings())
@pytest.mark.parametrize(
    ("dtype", "num_micro"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2)]
)
def test_sums_are_those_of_rank_order_to_the_bit_in_every_replica(
    cards: tuple[int, ...], dtype: torch.dtype, num_micro: int
) -> None:
    replicas = Replicas(cards, dtype, num_micro)
    threads = [
        threading.Thread(target=replicas.run, args=(rank,), daemon=True)
        for rank in range(len(cards))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert replicas.wrong == []
    first, *others = [optimizer.masters() for optimizer in replicas.optimizers]
    for other in others:
        assert all(torch.equal(first[name].cpu(), other[name].cpu()) for name in first)
