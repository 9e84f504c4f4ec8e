"""The frozen head in FP8 (loss.head_fp8), beside the bfloat16 one that evaluation and export use.

Logits are e4m3 rows times e4m3 rows of the head. The gradient is e4m3 shares (the softmax) times
the head quantised along its other side: there the label's share is left out, because share - 1
cancels in a row that is nearly right, and is added in fp32. On CUDA the work around the products
is Triton's; elsewhere plain PyTorch does the same.
"""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.contract.config import HEAD_FP8
from trainer.model import row_scaled
from trainer.model.row_scaled import LARGEST, RowScaled

OFF, LOGITS, BOTH = HEAD_FP8
ROW_UNIT = 16  # elements; FP8 products take multiples, and rows of logits begin aligned
# Sums in a Hopper's 14 bits lose what they cut off: of 5,120 terms large logits come out 0.7 % too
# small, which is 0.06 of the loss. The gradient's sums are over a whole vocabulary.
_FAST = False
# What is left beside the label is known to 1e-5 only, where the label has nearly all.
LEAST_REST = 2.0**-14


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
    return -(-num_columns // ROW_UNIT) * ROW_UNIT


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


@dataclass(frozen=True)
class ScaledHead:
    """A head [V, D] in FP8; W is V rounded up to ROW_UNIT, what that adds is zero.

    Shapes: rows.values [W, D], rows.scales [1, W], columns.values [D, W], columns.scales [1, D];
    columns None: the gradient stays in bfloat16.
    """

    num_rows: int
    rows: RowScaled
    columns: RowScaled | None

    @classmethod
    def of(cls, head: Tensor, products: str) -> "ScaledHead":
        """Quantise a head for the ``products`` LOGITS or BOTH. Shapes: [V, D]; D of 16 each."""
        num_rows, width = head.shape
        rows = row_scaled.quantise(head, (padded(num_rows), width))
        other = (width, padded(num_rows))
        columns = row_scaled.quantise(head.t(), other) if products == BOTH else None
        return cls(num_rows, rows, columns)

    def logits(self, values: Tensor, scales: Tensor, memory: Tensor) -> Tensor:
        """Return the logits of rows of ``scale_rows``, in ``memory``.

        Shapes: [m, D] e4m3, [m, 1], memory [m, W] -> [m, V], a part of it.
        """
        if len(values):
            row_scaled.product(values, scales, self.rows, out=memory, fast=_FAST)
        return memory[:, : self.num_rows]

    def gradient(self, shares: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the gradient but for the label's part. Shapes: [m, W], [m, 1], out [m, D]."""
        if self.columns is None:
            raise ValueError("this head was quantised for logits alone")
        if len(shares):
            row_scaled.product(shares, scales, self.columns, out=out, fast=_FAST)


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as e4m3 with one fitted scale a row. Shapes: [M, D] -> [M, D], [M, 1] fp32."""
    kernels = kernels_for(x)
    if kernels is not None:
        found: tuple[Tensor, Tensor] = kernels.scale_rows(x)
        return found
    return row_scaled.scale_rows(x, fitted=True)


def shares(logits: Tensor, found: Score, labels: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write the softmax as e4m3, zero at the label and behind the logits; return its scales.

    A row's scale is of its largest share beside the label's, or a little more, and times its
    weight. Shapes: logits [m, V], labels and weights [m], out [m, W] -> [m, 1] fp32.
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        made: Tensor = kernels.shares(logits, found, labels, weights, out)
        return made
    wide = (logits.float() - found.total[:, None]).exp_()
    highest = wide.gather(1, found.best[:, None])
    # Beside a label that is best itself: no more than it has, nor than what it leaves.
    rest = 1 - torch.exp(-found.entropy[:, None])
    scales = torch.minimum(highest, rest.clamp(min=LEAST_REST)) / LARGEST
    wide.scatter_(1, labels[:, None], 0.0)
    out.zero_()
    out[:, : logits.shape[1]] = (wide / scales).clamp_(max=LARGEST).to(out.dtype)
    return scales * weights[:, None]


def add_label(grad: Tensor, head: Tensor, entropy: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Add (share of the label - 1) x weight x its row of the head to each row.

    Shapes: grad [m, D], head [V, D], entropy, labels and weights [m].
    """
    kernels = kernels_for(grad)
    if kernels is not None:
        kernels.add_label(grad, head, entropy, labels, weights)
        return
    slope = torch.expm1(-entropy) * weights
    grad.copy_(grad.float() + slope[:, None] * head[labels].float())
