"""Logits of a frozen head, a chunk of rows at a time: their memory, their kernels, their score."""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_ROW_UNIT = 16  # elements; rows of logits begin aligned, and FP8 products take multiples


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton's kernels; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    return head_kernels


def kernels_for(tensor: Tensor) -> Any:
    """Return the module of Triton's kernels where they serve ``tensor``, else None."""
    return _kernels() if tensor.is_cuda else None


def padded(num_columns: int) -> int:
    """Return the width of memory for rows of so many columns."""
    return -(-num_columns // _ROW_UNIT) * _ROW_UNIT


def logits_memory(parts: list[slice], num_columns: int, like: Tensor) -> Tensor:
    """Return memory for the logits of the longest of the chunks. Shapes: [m, num_columns].

    Its rows begin aligned: products and kernels are as fast, and compile once, for any number of
    columns.
    """
    most = max((part.stop - part.start for part in parts), default=0)
    return like.new_empty(most, padded(num_columns))[:, :num_columns]


@dataclass(frozen=True)
class Score:
    """What a reading of logits gives.

    Shapes: entropy [m] against the labels, total [m] logs of the sums, both fp32; best [m] columns.
    """

    entropy: Tensor
    total: Tensor
    best: Tensor


def score(logits: Tensor, labels: Tensor) -> Score:
    """Return entropies, logs of the sums and best columns. Shapes: logits [m, V], labels [m]."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return Score(*kernels.score(logits, labels))
    total = logits.float().logsumexp(-1)
    wanted = logits.gather(1, labels[:, None]).squeeze(1)
    return Score(total - wanted, total, logits.argmax(-1))
