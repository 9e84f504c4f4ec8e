"""When a run evaluates itself, and what becomes of the result."""

import time
from dataclasses import dataclass, replace
from typing import Any

from trainer import assembly
from trainer.contract.config import TrainConfig
from trainer.contract.evaluations import EMA, RAW
from trainer.data.dataset import load_tokenizer
from trainer.device import current_device
from trainer.held_out import HeldOut, PromptSet, draft_copy, load_prompt_sets, num_in_training
from trainer.metrics import Metrics
from trainer.model.target import Target
from trainer.run_state import RunState
from trainer.workers.drafter import Replica, StepRange
from trainer.workers.supervisor import Pulse, StopRequest


def read_prompt_sets(config: TrainConfig, data: assembly.Data, metrics: Metrics) -> list[PromptSet]:
    """Read the held-out prompts, none without evaluations; warn of those that are trained on.

    Raises: DataError naming a file that is missing or has no usable chat.
    """
    if config.evaluation.every_steps is None:
        return []
    tokenizer = load_tokenizer(config.target.path, config.target.revision)
    sets = load_prompt_sets(config, tokenizer)
    seen = num_in_training(sets, data.dataset.samples)
    for one in sets:
        if seen[one.name]:
            metrics.warning(
                f"evaluation.prompts.{one.name}: {seen[one.name]} of {len(one.prompts)} prompts are"
                " in the training data; what they measure is not held out"
            )
    return sets


@dataclass(frozen=True)
class Evaluator:
    """Decodes the held-out prompts after every ``every_steps`` steps and after the last one."""

    held_out: HeldOut
    every_steps: int
    state: RunState
    metrics: Metrics
    stop: StopRequest

    def evaluate_when_due(
        self,
        replica: Replica,
        steps: StepRange,
        pulse: Pulse | None,
        target: Target | None = None,
    ) -> None:
        """Evaluate the step that was just done, if it is to be and was not.

        ``pulse``: of the thread that calls, between two of its steps; None before training.
        ``target``: decodes in place of that of ``held_out``.
        """
        step = self.state.done
        is_due = step and (step % self.every_steps == 0 or step == steps.num_steps)
        if not is_due or step in self.state.evaluations.entries:
            return
        self.state.save_if_possible(replica, steps)  # what measures best must be there to be kept
        self.metrics.phase("evaluate", step=step)
        held_out = self.held_out if target is None else replace(self.held_out, target=target)
        if held_out.target is not self.held_out.target:
            self.metrics.note(
                f"decoding on {held_out.target.device}: the thread of the first target was left out"
                " or is slow"
            )
        entry = self._measured(held_out, replica, pulse)
        if entry is None:
            self.metrics.warning(f"evaluation of step {step} left out: asked to stop")
        else:
            best = self.state.take(entry)
            told = {} if best is None else {f"best_{k}": v for k, v in vars(best).items()}
            facts = {key: entry[key] for key in ("step", "evaluation_s")} | entry[RAW]
            self.metrics.evaluation(facts | {"ema": entry.get(EMA)} | told)
        if pulse is not None:
            self.metrics.phase("train", step=step, num_steps=steps.num_steps)

    def _measured(
        self, held_out: HeldOut, replica: Replica, pulse: Pulse | None
    ) -> dict[str, Any] | None:
        def keep_going(what: str) -> bool:
            if pulse is not None:
                pulse.beat(what)
            return not self.stop.soft.is_set()

        began, device = time.monotonic(), held_out.target.device
        entry: dict[str, Any] = {
            "step": self.state.done,
            "saved": self.state.saved == self.state.done,
        }
        kinds = {RAW: replica.optimizer.masters(), EMA: replica.optimizer.average()}
        with current_device(device):
            for kind, weights in kinds.items():
                if weights:
                    copy = draft_copy(replica.draft, device, weights)
                    measured = held_out.measure(copy, keep_going)
                    if measured is None:
                        return None
                    entry[kind] = measured
        return entry | {"evaluation_s": round(time.monotonic() - began, 3)}
