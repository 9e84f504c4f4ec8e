"""The learning rate's course over a run: a warm-up, then a cosine."""

import math
from dataclasses import dataclass

from trainer.contract.config import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then cosine from 1 to ``min_frac`` over ``num_steps``."""

    num_steps: int
    num_warmup_steps: int
    min_frac: float

    @classmethod
    def from_config(cls, config: OptimConfig, num_steps: int) -> "Schedule":
        """Make the schedule of a run of ``num_steps`` optimiser steps."""
        return cls(num_steps, round(config.warmup_frac * num_steps), config.min_lr_frac)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate for the 0-based ``step``."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        length = max(1, self.num_steps - self.num_warmup_steps)
        progress = min(1.0, (step - self.num_warmup_steps) / length)
        return self.min_frac + (1 - self.min_frac) * 0.5 * (1 + math.cos(math.pi * progress))

    def describe(self, step: int) -> str:
        """Say in words where the schedule stands before the 0-based ``step``."""
        rises = f"{self.num_warmup_steps} steps of warm-up, cosine to {self.min_frac:g}"
        return f"schedule: {rises}; step {step} of {self.num_steps} takes {self.factor(step):.4f}"
