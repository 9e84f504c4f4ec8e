"""Adds up the gradients of the drafter threads, so that every replica takes the same step.

Each drafter holds its sums in one flat fp32 tensor on its own device. Replica r adds slice r of all
replicas, in rank order, and everybody copies the finished slices: the result does not depend on
which thread was first, and is the same to the bit in every replica.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from trainer.errors import ChannelClosedError


class TrainedBatch(NamedTuple):
    """A batch that went through forward and backward: index in the plan, epoch, sample ids."""

    batch_index: int
    epoch: int
    sample_ids: tuple[int, ...]


@dataclass
class StepSums:
    """What one drafter, or all together, summed up over the micro-batches of a step.

    num_hits of num_slots drafted slots were right, teacher-forced; num_accepted counts those with
    no wrong one before them. num_stop: drafters that were asked to stop; as all add up the same
    numbers, all stop after the same step. batches: what was trained on. figures: of the variant,
    numerator and denominator by their key in the step event.
    """

    loss_sum: float = 0.0
    weight_sum: float = 0.0
    num_tokens: int = 0
    num_anchors: int = 0
    num_hits: int = 0
    num_slots: int = 0
    num_accepted: int = 0
    num_stop: int = 0
    batches: tuple[TrainedBatch, ...] = ()
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, other: "StepSums") -> None:
        """Add another drafter's sums to these."""
        for item in fields(self):
            if item.name != "figures":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        for key, (above, below) in other.figures.items():
            own = self.figures.get(key, (0.0, 0.0))
            self.figures[key] = own[0] + above, own[1] + below

    def ratios(self) -> dict[str, float]:
        """Return the variant's figures; 0 where nothing was counted."""
        return {k: above / below if below else 0.0 for k, (above, below) in self.figures.items()}


class Exchanged(NamedTuple):
    """Of all replicas: the sums, and in rank order [replicas, K] what is still on the device."""

    sums: StepSums
    rows: Tensor


class GradientSync:
    """Meeting point of ``num_replicas`` drafter threads; each calls ``exchange`` once a step."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._barrier = threading.Barrier(num_replicas)
        self._flats: list[Tensor | None] = [None] * num_replicas
        self._rows: list[Tensor | None] = [None] * num_replicas
        self._sums = [StepSums() for _ in range(num_replicas)]

    def exchange(self, rank: int, flat: Tensor, sums: StepSums, row: Tensor) -> Exchanged:
        """Replace ``flat`` by the sum over all replicas.

        Shapes: flat [P] fp32, row [K] of figures that are still on the device; the same P and K in
        every replica.
        Raises: ChannelClosedError when another thread failed or the run is being stopped.
        """
        self._flats[rank], self._sums[rank], self._rows[rank] = flat, sums, row
        self._meet(flat)
        total = StepSums()
        for one in self._sums:
            total.add(one)
        rows = torch.stack([one.to(row.device) for one in self._rows if one is not None])
        if self._num_replicas > 1:
            flats = [f for f in self._flats if f is not None]
            bounds = _slices(flat.numel(), self._num_replicas)
            _add_slice(flats, rank, bounds[rank])
            self._meet(flat)
            for owner, (start, stop) in enumerate(bounds):
                if owner != rank:
                    flat[start:stop].copy_(flats[owner][start:stop])
        self._meet(flat)
        return Exchanged(total, rows)

    def abort(self) -> None:
        """Wake whoever waits here; ``exchange`` raises from now on."""
        self._barrier.abort()

    def wait_for_abort(self) -> NoReturn:
        """Wait for the end of the run, which another thread has met; raises ChannelClosedError."""
        self._wait()
        raise ChannelClosedError("another drafter thread left the step")

    def _meet(self, flat: Tensor) -> None:
        if flat.is_cuda and self._num_replicas > 1:
            # Others read this memory from their own streams. Not the whole device: a target thread
            # may share it, with work for seconds.
            torch.cuda.current_stream(flat.device).synchronize()
        self._wait()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ChannelClosedError("another drafter thread left the step") from error


def _slices(length: int, num_parts: int) -> list[tuple[int, int]]:
    edges = [length * part // num_parts for part in range(num_parts + 1)]
    return list(itertools.pairwise(edges))


def _add_slice(flats: Sequence[Tensor], rank: int, bounds: tuple[int, int]) -> None:
    """Add slice ``bounds`` of all replicas into that of ``rank``, in rank order for every rank."""
    start, stop = bounds
    own = flats[rank][start:stop]
    total = flats[0][start:stop].to(own.device, copy=True)
    for flat in flats[1:]:
        total += flat[start:stop].to(own.device)
    own.copy_(total)
