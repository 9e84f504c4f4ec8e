"""The head's FP8 products held against bfloat16 on the GPU at hand, before a run begins.

The rows are made up: of one RMS, pulled from not at all to far towards their label or, every second
one, towards another token, so that guesses are right and wrong with all degrees of confidence. How
much FP8 costs rows with a few large channels, as a trained model's may be, they do not tell.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.errors import TargetError
from trainer.model import row_scaled
from trainer.model.head import HeadPass, Products, head_loss
from trainer.model.scaled_head import BOTH, ScaledHead
from trainer.model.target import FrozenHead

_NUM_ROWS, _CHUNK_ROWS = 200, 128  # two chunks of 100 rows, no multiple of 16
# Two e4m3 operands round a sum of many products by 3.7 % of its size, whatever their number; then
# logits of a spread of 3 are off by 0.1, their mean loss by the half square of that, and a gradient
# by 2 %. A head on which it is three times as bad, or a kernel with a wrong scale, is refused.
_LOGITS_LIMIT, _LOSS_LIMIT, _COSINE_LIMIT = 0.11, 0.1, 0.99


@dataclass(frozen=True)
class HeadFinding:
    """What products of the head in FP8 change on made-up rows, against bfloat16.

    logits_error_frac: |difference| / |logits|. loss_difference: of the mean loss. gradient_cosine:
    of all rows' gradients together.
    """

    products: str
    device: str
    logits_error_frac: float
    loss_difference: float
    gradient_cosine: float

    @property
    def passed(self) -> bool:
        """Whether the differences are those of rounding; False for a NaN."""
        return (
            self.logits_error_frac <= _LOGITS_LIMIT
            and abs(self.loss_difference) <= _LOSS_LIMIT
            and self.gradient_cosine >= _COSINE_LIMIT
        )

    @property
    def figures(self) -> dict[str, Any]:
        """Device and differences, for an event."""
        return {
            "device": self.device,
            "logits_error_frac": round(self.logits_error_frac, 5),
            "loss_difference": round(self.loss_difference, 5),
            "gradient_cosine": round(self.gradient_cosine, 5),
        }

    def __str__(self) -> str:
        what = "logits and gradient" if self.products == BOTH else "logits"
        return (
            f"head: {what} in FP8 on {self.device}; logits differ from bfloat16 by"
            f" {self.logits_error_frac:.1e} (limit {_LOGITS_LIMIT}), the loss by"
            f" {self.loss_difference:+.1e} (limit {_LOSS_LIMIT}), the gradient's cosine is"
            f" {self.gradient_cosine:.4f} (limit {_COSINE_LIMIT})"
        )


def scaled_head_of(head: FrozenHead, products: str) -> tuple[FrozenHead, HeadFinding]:
    """Return the head with its FP8 form, and what that changes.

    Raises: TargetError where its device or dtype has no FP8 products, or where they differ from
    those of bfloat16 by more than rounding.
    """
    table = head.lm_head
    reason = row_scaled.why_not(table.device, table.dtype, "draft.dtype")
    if not reason and table.shape[1] % 16:
        reason = f"FP8 products take multiples of 16, and the hidden size is {table.shape[1]}"
    if reason:
        raise TargetError(f"loss.head_fp8: {products} cannot be had: {reason}")
    made = replace(head, fp8=ScaledHead.of(table, products))
    try:
        finding = compare(made, products)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the libraries' kernels refuse some cards and versions
        said = " ".join(str(error).split())
        raise TargetError(f"loss.head_fp8: {products} cannot be had: {said}") from error
    if not finding.passed:
        raise TargetError(
            f"{finding} (torch {torch.__version__}); set loss.head_fp8 to off"
            + (" or logits" if products == BOTH else "")
        )
    return made, finding


def compare(head: FrozenHead, products: str) -> HeadFinding:
    """Say what the FP8 form of ``head`` changes on made-up rows."""
    x, labels = made_up_rows(head.lm_head)
    weights = torch.linspace(0, 1, _NUM_ROWS, device=x.device)
    ways = HeadPass(_CHUNK_ROWS), HeadPass(_CHUNK_ROWS, fp8=head.fp8)
    (logits, loss, grad), (logits8, loss8, grad8) = (
        _with_gradient(x, head.lm_head, labels, weights, how) for how in ways
    )
    return HeadFinding(
        products=products,
        device=str(x.device),
        logits_error_frac=float((logits8 - logits).norm() / logits.norm()),
        loss_difference=float((loss8 - loss) / weights.sum()),
        gradient_cosine=float(F.cosine_similarity(grad8.flatten(), grad.flatten(), 0)),
    )


def made_up_rows(head: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and labels; odd rows are pulled elsewhere. Shapes: [V, D] -> [M, D], [M]."""
    draw = torch.Generator().manual_seed(0)
    num_columns, width = head.shape
    guesses, others = torch.randint(num_columns, (2, _NUM_ROWS), generator=draw).to(head.device)
    labels = torch.where(torch.arange(_NUM_ROWS, device=head.device) % 2 == 0, guesses, others)
    pull = head[guesses].float()
    length = pull.norm(dim=1, keepdim=True)
    pull = pull / length.clamp(min=1e-6)  # a row of zeros pulls nowhere
    # A guess's logit rises to twice what outweighs all others together.
    strength = torch.linspace(0, 2 * math.log(num_columns), _NUM_ROWS, device=head.device)
    noise = torch.randn(_NUM_ROWS, width, generator=draw).to(head.device)
    return (noise + pull * strength[:, None] / length.mean()).to(head.dtype), labels


def _with_gradient(
    x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, how: HeadPass
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, loss and gradient, in fp32. Shapes: [M, V], [], [M, D]."""
    whole = slice(0, len(x))
    logits = Products(x, head, [whole], how.fp8).logits(whole).float()
    own = x.clone().requires_grad_()
    loss = head_loss(own, head, labels, weights, how).loss
    (grad,) = torch.autograd.grad(loss, own)
    return logits, loss.detach(), grad.float()
