"""The training configuration: every setting of train.yaml, with its default and its check.

The laptop reads YAML and checks it here before a GPU is taken; the manifest carries the whole
result, and the trainer reads it back with the same code. Standard library only. The settings are
told in ``sections``, their limits in ``rules``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.config.reading import build
from trainer.contract.config.rules import check
from trainer.contract.config.sections import (
    HEAD_FP8,
    LOSSES,
    VARIANTS,
    CompileConfig,
    DataConfig,
    DraftModelConfig,
    EvaluationConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    Sections,
    TargetConfig,
)
from trainer.contract.errors import ConfigError

__all__ = [
    "HEAD_FP8",
    "LOSSES",
    "VARIANTS",
    "CompileConfig",
    "DataConfig",
    "DraftModelConfig",
    "EvaluationConfig",
    "LossConfig",
    "OptimConfig",
    "RunConfig",
    "Sections",
    "TargetConfig",
    "TrainConfig",
    "with_override",
]


@dataclass(frozen=True)
class TrainConfig(Sections):
    """The whole training configuration; see the sections for each field."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "TrainConfig":
        """Check and build a configuration.

        Raises: ConfigError naming the dotted key, what was found and what was expected; unknown
        keys get a "did you mean".
        """
        config: TrainConfig = build(cls, raw, "")
        check(config)
        return config


def with_override(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``raw`` with the dotted ``key`` set; raises ConfigError."""
    head, _, rest = key.partition(".")
    if not head or (rest == "" and key.endswith(".")):
        raise ConfigError(f"{key!r} is not a dotted key such as optim.lr")
    copy = dict(raw)
    if not rest:
        copy[head] = value
        return copy
    inner = copy.get(head, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{head} is a value, not a section; it has no key {rest}")
    copy[head] = with_override(dict(inner), rest, value)
    return copy
