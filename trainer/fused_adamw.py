"""AdamW in one pass over memory: gradient in, fp32 master and moments, weight out.

28 bytes a parameter with bf16 gradients and weights, where scaling, clipping, AdamW and the copy to
the weights by themselves take 68. CUDA only: the kernel is Triton's, and is imported where used.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@dataclass(frozen=True)
class Moments:
    """State of one parameter, fp32; step [] counts its steps on the device."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class Rates:
    """Numbers of one step. grad_scale multiplies the gradient first."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_scale: float


@torch.no_grad()
def adamw_step(
    grad: Tensor, master: Tensor, moments: Moments, weight: Tensor, rates: Rates
) -> None:
    """Take one step, as torch.optim.AdamW does it, and round the master into ``weight``.

    ``moments.step`` is that of this step. ``weight`` may be the master itself. Shapes: all alike;
    all contiguous and on one CUDA device.
    """
    count = master.numel()
    with torch.cuda.device(master.device):
        _kernel[(triton.cdiv(count, _BLOCK),)](
            grad,
            master,
            moments.exp_avg,
            moments.exp_avg_sq,
            weight,
            moments.step,
            rates.lr,
            rates.betas[0],
            rates.betas[1],
            rates.eps,
            rates.weight_decay,
            rates.grad_scale,
            count,
            BLOCK=_BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913
    grad_at,  # noqa: ANN001
    master_at,  # noqa: ANN001
    first_at,  # noqa: ANN001
    second_at,  # noqa: ANN001
    weight_at,  # noqa: ANN001
    step_at,  # noqa: ANN001
    lr,  # noqa: ANN001
    beta1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    eps,  # noqa: ANN001
    weight_decay,  # noqa: ANN001
    grad_scale,  # noqa: ANN001
    count,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    step = tl.load(step_at)
    grad = tl.load(grad_at + place, mask=inside, other=0.0).to(tl.float32) * grad_scale
    master = tl.load(master_at + place, mask=inside, other=0.0)
    first = tl.load(first_at + place, mask=inside, other=0.0)
    second = tl.load(second_at + place, mask=inside, other=0.0)
    first = first + (grad - first) * (1.0 - beta1)
    second = second * beta2 + grad * grad * (1.0 - beta2)
    rest1 = 1.0 - tl.exp(step * tl.log(beta1))
    rest2 = 1.0 - tl.exp(step * tl.log(beta2))
    master = master * (1.0 - lr * weight_decay)
    master -= lr / rest1 * first / (tl.sqrt(second) / tl.sqrt(rest2) + eps)
    tl.store(first_at + place, first, mask=inside)
    tl.store(second_at + place, second, mask=inside)
    tl.store(master_at + place, master, mask=inside)
    tl.store(weight_at + place, master.to(weight_at.dtype.element_ty), mask=inside)
