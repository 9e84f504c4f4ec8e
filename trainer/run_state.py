"""What of a run outlives its process: the steps done, its checkpoints and its evaluations."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import assembly, checkpoint
from trainer.checkpoint import CheckpointState, Trained
from trainer.contract.completion import PARTIAL_SUFFIX, latest_complete, step_directory
from trainer.contract.config import RunConfig
from trainer.contract.errors import ConfigError
from trainer.contract.evaluations import EMA, RAW, Best, Evaluations
from trainer.errors import CheckpointError, NonFiniteError
from trainer.held_out import draft_copy
from trainer.metrics import Metrics
from trainer.model.draft import DraftModel
from trainer.workers.drafter import Replica, StepDone, StepRange


class RunState:
    """The run's own account of itself, in memory and in its directory.

    done: finished optimiser steps. saved: the step of the newest checkpoint of this process.
    identity must be set before the first ``load`` or ``save``; see assembly.identity.
    """

    def __init__(self, run_dir: Path, config: RunConfig, metrics: Metrics, *, resume: bool) -> None:
        self._root = run_dir / "checkpoints"
        # Digests are worth their seconds on resume: a damaged newest one is then passed over.
        self._found, self._skipped = latest_complete(self._root, digests=resume)
        if self._found is not None and not resume:
            raise ConfigError(f"{run_dir} holds {self._found.name}; go on from it with --resume")
        self._run_dir, self._config, self._metrics = run_dir, config, metrics
        self._resume = resume
        self.identity: Mapping[str, Any] = {}
        self.done = 0
        self.saved: int | None = None
        self.trained = Trained()
        self.evaluations = Evaluations.read(run_dir)

    def load(self) -> CheckpointState | None:
        """Return the checkpoint to go on from; None starts at step 0.

        Raises: CheckpointError when it belongs to another configuration, or when there are
        finished checkpoints and none of them is whole.
        """
        if not self._resume:
            return None
        for skipped in self._skipped:
            self._metrics.warning(f"checkpoint {skipped.path.name} skipped: {skipped.reason}")
        if self._found is None:
            self._refuse_to_start_over()
            self._metrics.warning("no complete checkpoint; starting from step 0")
            self.evaluations.forget_after(0)
            return None
        state = checkpoint.load(self._found)
        changes = state.check_identity(self.identity, assembly.may_change, assembly.default_facts())
        for change in changes:
            self._metrics.warning(f"changed since the checkpoint: {change}")
        self._metrics.phase("resume", step=state.step, path=self._found.name)
        self.done = self.saved = state.step
        self.trained = state.trained
        self.evaluations.forget_after(state.step)
        return state

    def _refuse_to_start_over(self) -> None:
        """Stop a resume that found finished checkpoints but none whole: days may be in them."""
        damaged = [s for s in self._skipped if not s.path.name.endswith(PARTIAL_SUFFIX)]
        if damaged:
            reasons = "; ".join(f"{s.path.name}: {s.reason}" for s in damaged)
            raise CheckpointError(
                f"no checkpoint in {self._root} is whole ({reasons}); mend or move them,"
                " or launch under a new tag to start over"
            )

    def count(self, step: StepDone) -> None:
        """Take in a finished step."""
        sums = step.sums
        visits = [(batch.epoch, one) for batch in sums.batches for one in batch.sample_ids]
        self.done = step.num_done
        self.trained = self.trained.after(sums.num_tokens, sums.num_anchors, visits)

    def save_if_possible(self, replica: Replica, steps: StepRange) -> None:
        """Write a checkpoint; a full disk is told: the next try, or the last, may find room."""
        try:
            self.save(replica, steps)
        except OSError as error:
            self._metrics.warning(f"no checkpoint at step {self.done}: {error}")

    def save(self, replica: Replica, steps: StepRange) -> None:
        """Write a checkpoint unless this step has one.

        Raises: OSError; NonFiniteError for weights that rotation would trade good ones for.
        """
        if self.saved == self.done:
            return
        if not replica.optimizer.has_finite_weights():
            last = "there is none" if self.saved is None else step_directory(self.saved)
            raise NonFiniteError(
                f"step {self.done}: the optimiser's step made weights that are not finite; no"
                f" checkpoint was written, the newest is kept ({last}); lower optim.lr"
            )
        began, best = time.monotonic(), self.evaluations.best()
        state = CheckpointState(
            step=self.done,
            next_index=self.done * steps.batches_per_step,
            identity=dict(self.identity),
            masters=replica.optimizer.masters(),
            optimizer=replica.optimizer.state(),
            trained=self.trained,
            extras={"tap_scale": replica.draft.tap_scale} | checkpoint.random_state(),
            average=replica.optimizer.average(),
        )
        path = checkpoint.save(
            self._root,
            state,
            keep=self._config.keep_checkpoints,
            best=None if best is None else best.step,
        )
        self.saved = self.done
        self._metrics.checkpoint(self.done, path, time.monotonic() - began)

    def take(self, entry: dict[str, Any]) -> Best | None:
        """Record an evaluation of this step; returns the best so far."""
        self.evaluations.entries[self.done] = entry
        try:
            self.evaluations.write(self._run_dir)
        except OSError as error:  # it is made again after a resume
            self._metrics.warning(f"evaluations.json was not written: {error}")
        return self.evaluations.best()

    def export_draft(self, replica: Replica) -> tuple[DraftModel, str]:
        """Return the draft on the CPU with the weights that run.export_weights names, and which.

        They are called as `python -m trainer export` calls those of a checkpoint.
        """
        chosen, best = self._config.export_weights, self.evaluations.best()
        weights: Mapping[str, Tensor] = replica.optimizer.masters()
        step, kind = self.done, RAW
        if chosen == EMA:
            weights, kind = replica.optimizer.average(), EMA
        elif chosen == "best" and best is None:
            self._metrics.warning("no evaluation was saved; the last weights are exported")
        elif chosen == "best" and best is not None:
            step, kind = best.step, best.weights
            weights = checkpoint.load(self._root / step_directory(step)).weights(kind)
            self._metrics.note(f"exporting the best: {kind} weights of step {step}")
        name = step_directory(step) if kind == RAW else f"{step_directory(step)} {kind}"
        return draft_copy(replica.draft, torch.device("cpu"), weights), name
