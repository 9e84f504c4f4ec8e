"""Drafter threads: forward, backward, exchange of gradients, optimiser step, all in lockstep."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate
from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.errors import NonFiniteError
from trainer.loss import LossSums, draft_loss
from trainer.model.draft import DraftModel
from trainer.model.target import FrozenHead
from trainer.optim import Applied, DraftOptimizer
from trainer.sync import GradientSync, StepSums, TrainedBatch
from trainer.workers.failed_batch import FailedBatch, save_failed
from trainer.workers.place import take_place
from trainer.workers.supervisor import Pulse, StopRequest
from trainer.workers.target import Prepared


@dataclass(frozen=True)
class Replica:
    """A draft, its optimiser and the frozen head on one device."""

    rank: int
    draft: DraftModel
    head: FrozenHead
    optimizer: DraftOptimizer
    device: torch.device


@dataclass(frozen=True)
class StepDone:
    """One finished optimiser step, summed over all drafters."""

    num_done: int
    epoch: int
    sums: StepSums
    applied: Applied
    step_s: float


@dataclass(frozen=True)
class StepRange:
    """Which steps a run still has to do, and how batch indices fall to drafters.

    Drafter d of M takes, in micro-batch a of step s, batch index (s * accumulation + a) * M + d.
    """

    first: int
    num_steps: int
    num_drafters: int
    accumulation: int

    @property
    def batches_per_step(self) -> int:
        """Batches of one optimiser step, all drafters together."""
        return self.num_drafters * self.accumulation

    def indices(self, step: int, rank: int) -> list[int]:
        """Return the batch indices of one drafter in one step."""
        return [
            (step * self.accumulation + micro) * self.num_drafters + rank
            for micro in range(self.accumulation)
        ]


def step_key(device: torch.device, batch: Batch, draft: DraftModel) -> tuple[object, ...]:
    """Return all that decides what a step compiles."""
    rows, length = batch.input_ids.shape
    num_anchors = batch.anchor_positions.shape[1]
    return (str(device), rows, length, num_anchors, str(draft.fc.weight.dtype), draft.training)


def forward_backward(
    replica: Replica,
    gate: CompileGate,
    prepared: Prepared,
    config: TrainConfig,
    progress: float = 0.0,
) -> LossSums:
    """Run one micro-batch inside the gate and add its gradient to the replica's sum.

    ``progress``: share of the run's steps that are done; some losses change with it.
    """
    batch = prepared.batch.to(replica.device)
    hidden: Tensor = prepared.target_hidden.to(replica.device)

    def body() -> LossSums:
        replica.draft.zero_grad(set_to_none=True)
        sums = draft_loss(replica.draft, replica.head, batch, hidden, config, progress)
        if sums.loss_sum.requires_grad:
            sums.loss_sum.backward()  # type: ignore[no-untyped-call]
        return sums.detach()

    sums = gate.run(step_key(replica.device, batch, replica.draft), body)
    replica.optimizer.accumulate()
    return sums


@dataclass(frozen=True)
class DrafterWorker:
    """One drafter thread; ``on_step`` is called in the thread of rank 0, between steps.

    A batch whose loss or gradient is not finite ends the run before any rank takes the step, and
    is kept in ``run_dir``.
    """

    replica: Replica
    steps: StepRange
    channel: OrderedChannel[Prepared]
    sync: GradientSync
    gate: CompileGate
    config: TrainConfig
    stop: StopRequest
    on_step: Callable[[StepDone, Pulse], None]
    run_dir: Path

    def run(self, pulse: Pulse) -> None:
        """Take steps until the plan ends or all agreed to stop."""
        replica = self.replica
        take_place(replica.device, self.config.run.cpu_threads)
        replica.draft.train()
        for step in range(self.steps.first, self.steps.num_steps):
            began = time.monotonic()
            sums, last = self._accumulate(step, pulse)
            sums.num_stop = int(self.stop.soft.is_set())
            with pulse.wait(f"for the other drafters in step {step}"):
                total = self.sync.exchange(replica.rank, replica.optimizer.flat_grad, sums)
            try:
                applied = replica.optimizer.apply(step, total.loss_sum, total.weight_sum)
            except NonFiniteError as error:  # finite in every rank, and not in their sum
                raise self._kept(step, last, str(error)) from error
            if replica.rank == 0:
                pulse.beat(f"reports step {step}")
                took = time.monotonic() - began
                self.on_step(StepDone(step + 1, last.batch.epoch, total, applied, took), pulse)
            del last  # its memory is needed for the next batch
            if total.num_stop:
                self.channel.close()  # every drafter has taken its last batch
                return

    def _accumulate(self, step: int, pulse: Pulse) -> tuple[StepSums, Prepared]:
        """Sum the gradients of this rank's batches; returns the last batch as well."""
        parts: list[LossSums] = []
        sums = StepSums()
        for index in self.steps.indices(step, self.replica.rank):
            with pulse.wait(f"for batch {index}"):
                prepared = self.channel.get(index).received()
            pulse.beat(f"trains on batch {index}")
            parts.append(
                forward_backward(
                    self.replica, self.gate, prepared, self.config, self._progress(step)
                )
            )
            self._check_finite(step, prepared, parts[-1])
            batch = prepared.batch
            sums.num_tokens += batch.num_tokens
            sums.num_anchors += batch.num_anchors
            sums.batches += (TrainedBatch(index, batch.epoch, batch.sample_ids),)
        whole = LossSums.total(parts)
        sums.loss_sum, sums.weight_sum = float(whole.loss_sum), float(whole.weight_sum)
        sums.num_hits, sums.num_slots = int(whole.hits.sum()), int(whole.counts.sum())
        sums.num_accepted = int(whole.accepted_sum)
        sums.figures = {key: tuple(value.tolist()) for key, value in whole.figures.items()}
        return sums, prepared

    def _progress(self, step: int) -> float:
        return step / self.steps.num_steps

    def _check_finite(self, step: int, prepared: Prepared, sums: LossSums) -> None:
        optimizer = self.replica.optimizer
        if optimizer.is_finite() and bool(sums.loss_sum.isfinite()):
            return
        where = f"step {step + 1}: batch {prepared.batch.index} of drafter {self.replica.rank}"
        reason = (
            f"{where}: loss sum {float(sums.loss_sum)}, {optimizer.blame()};"
            " the weights were not changed"
        )
        raise self._kept(step, prepared, reason)

    def _kept(self, step: int, prepared: Prepared, reason: str) -> NonFiniteError:
        """Keep the batch for replay; returns the error that says where it is."""
        weights = dict(self.replica.draft.state_dict())
        failed = FailedBatch(
            step=step + 1,
            rank=self.replica.rank,
            progress=self._progress(step),
            reason=reason,
            prepared=prepared,
            draft=weights,
        )
        try:
            path = save_failed(self.run_dir, failed)
        except OSError as error:
            return NonFiniteError(f"{reason}; the batch could not be kept: {error}")
        return NonFiniteError(
            f"{reason}; kept in {path.name}; find the first bad tensor with: python -m trainer"
            f" replay --run-dir {self.run_dir} --batch {path}"
        )
