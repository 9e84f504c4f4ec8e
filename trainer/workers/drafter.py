"""Drafter threads: forward, backward, exchange of gradients, optimiser step, all in lockstep."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate
from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.device import HostCopy
from trainer.errors import NonFiniteError
from trainer.loss import LossSums, draft_loss
from trainer.model.draft import DraftModel
from trainer.model.target import FrozenHead
from trainer.optim import Applied, DraftOptimizer
from trainer.sync import Exchanged, GradientSync, StepSums, TrainedBatch
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


@dataclass(frozen=True)
class _Trained:
    """What one drafter has to tell of a step before it is taken.

    sums: what the host knows. figures: what is still on the device, fp64: loss sum, weight sum,
    hits, slots, accepted, and two numbers for each of ``keys``. last: the last batch, kept for
    replay.
    """

    sums: StepSums
    figures: Tensor
    keys: tuple[str, ...]
    last: Prepared


def _figures(sums: LossSums) -> Tensor:
    """Lay the sums of a step one behind the other, in fp64, which counts exactly."""
    one = (sums.loss_sum, sums.weight_sum, sums.hits.sum(), sums.counts.sum(), sums.accepted_sum)
    laid = [value.double().view(1) for value in one]
    return torch.cat(laid + [pair.double() for pair in sums.figures.values()])


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
        # A target thread that shares the card has work enough to fill the pauses of a step.
        take_place(replica.device, self.config.run.cpu_threads, urgent=True)
        replica.draft.train()
        with self.sync.joined(replica.rank, replica.optimizer):
            self._take_steps(pulse)

    def _take_steps(self, pulse: Pulse) -> None:
        replica = self.replica
        for step in range(self.steps.first, self.steps.num_steps):
            began = time.monotonic()
            trained = self._accumulate(step, pulse)
            with pulse.wait(f"for the other drafters in step {step}"):
                exchanged = self.sync.exchange(replica.rank, trained.sums, trained.figures)
            pulse.beat(f"takes step {step}")
            applied = self._apply(step, trained, exchanged, pulse)
            if replica.rank == 0:
                pulse.beat(f"reports step {step}")
                took = time.monotonic() - began
                epoch = trained.last.batch.epoch
                done = StepDone(step + 1, epoch, exchanged.sums, applied, took)
                self.on_step(done, pulse)
            del trained  # the batch's memory is needed for the next
            if exchanged.sums.num_stop:
                self.channel.close()  # every drafter has taken its last batch
                return

    def _accumulate(self, step: int, pulse: Pulse) -> "_Trained":
        """Sum the gradients of this rank's batches, and what is to be told of them."""
        replica, indices = self.replica, self.steps.indices(step, self.replica.rank)
        parts: list[LossSums] = []
        sums = StepSums(num_stop=int(self.stop.soft.is_set()))
        unread: tuple[Prepared, HostCopy] | None = None
        for index in indices:
            with pulse.wait(f"for batch {index}"):
                prepared = self.channel.get(index).received()
            pulse.beat(f"trains on batch {index}")
            travels = self.sync.travelling(replica.rank) if index == indices[-1] else nullcontext()
            with travels:
                parts.append(
                    forward_backward(
                        replica, self.gate, prepared, self.config, self._progress(step)
                    )
                )
            if unread is not None:  # the device has this batch to work on meanwhile
                self._check_finite(step, unread[0], unread[1].wait())
            if index != indices[-1]:  # of the last one ``exchange`` tells
                norm = replica.optimizer.grad_norm().double()
                unread = prepared, HostCopy(torch.stack((parts[-1].loss_sum.double(), norm)))
            batch = prepared.batch
            sums.num_tokens += batch.num_tokens
            sums.num_anchors += batch.num_anchors
            sums.batches += (TrainedBatch(index, batch.epoch, batch.sample_ids),)
        whole = LossSums.total(parts)
        return _Trained(sums, _figures(whole), tuple(whole.figures), prepared)

    def _apply(self, step: int, trained: "_Trained", exchanged: Exchanged, pulse: Pulse) -> Applied:
        """Take the step, read what all ranks have to tell, and complete the sums with it.

        This is where the host waits for the device. Raises: NonFiniteError in the ranks to blame,
        ChannelClosedError in the others; the device has not taken the step then.
        """
        optimizer, (sums, rows) = self.replica.optimizer, exchanged
        norm = optimizer.grad_norm(again=len(rows) > 1)
        if len(rows) > 1:  # what is not finite in one rank may cancel out in the sum
            norm = norm + 0 * rows[:, -1].sum()
        wanted = torch.cat((rows[:, :-1].sum(0), rows[:, 0], rows[:, -1]))
        *told, norm_of_all = optimizer.launch(step, wanted, norm).wait()
        count = len(rows)
        told, losses, norms = told[: -2 * count], told[-2 * count : -count], told[-count:]
        rank = self.replica.rank
        self._check_finite(step, trained.last, (losses[rank], norms[rank]))
        if not all(map(math.isfinite, losses + norms)):
            with pulse.wait("for the drafter whose batch is not finite"):
                self.sync.wait_for_abort()
        try:
            applied = optimizer.settle(step, [*told, norm_of_all])
        except NonFiniteError as error:  # finite in every rank, and not in their sum
            raise self._kept(step, trained.last, str(error)) from error
        sums.loss_sum, sums.weight_sum = told[:2]
        sums.num_hits, sums.num_slots, sums.num_accepted = (int(value) for value in told[2:5])
        pairs = zip(told[5::2], told[6::2], strict=True)
        sums.figures = dict(zip(trained.keys, pairs, strict=True))
        return applied

    def _progress(self, step: int) -> float:
        return step / self.steps.num_steps

    def _check_finite(self, step: int, prepared: Prepared, found: Sequence[float]) -> None:
        """Raise NonFiniteError unless ``found``, loss sum and gradient norm, are finite."""
        if all(math.isfinite(value) for value in found):
            return
        where = f"step {step + 1}: batch {prepared.batch.index} of drafter {self.replica.rank}"
        reason = (
            f"{where}: loss sum {found[0]}, {self.replica.optimizer.blame()};"
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
