"""The frozen head in FP8 (loss.head_fp8), beside the bfloat16 one that evaluation and export use.

Logits are e4m3 rows times e4m3 rows of the head. The gradient is e4m3 shares (the softmax) times
the head quantised along its other side: there the label's share is left out, because share - 1
cancels in a row that is nearly right, and is added in fp32. On CUDA the work around the products
is Triton's; elsewhere plain PyTorch does the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.contract.config import HEAD_FP8
from trainer.model import row_scaled
from trainer.model.logits import Score, kernels_for, padded
from trainer.model.row_scaled import LARGEST, RowScaled

OFF, LOGITS, BOTH = HEAD_FP8
# Sums in a Hopper's 14 bits lose what they cut off: of 5,120 terms large logits come out 0.7 % too
# small, which is 0.06 of the loss. The gradient's sums are over a whole vocabulary.
_FAST = False
# What is left beside the label is known to 1e-5 only, where the label has nearly all.
LEAST_REST = 2.0**-14


@dataclass(frozen=True)
class ScaledHead:
    """A head [V, D] in FP8; W is V rounded up by ``padded``, what that adds is zero.

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
        """Write the gradient but for the label's part. Shapes: [m, W], [m, 1], out [m, D].

        Raises: ValueError where the head was quantised for logits alone.
        """
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
