"""FP8 products whose operands carry one scale a row: e4m3 values, fp32 scales, bfloat16 results."""

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST = 1e-12  # of a row that is all zero


class RowScaled(NamedTuple):
    """A weight in FP8. Shapes: values [N, K] e4m3, scales [1, N] fp32."""

    values: Tensor
    scales: Tensor


def quantise(weight: Tensor) -> RowScaled:
    """Return a weight as e4m3 with one scale an output channel. Shapes: [N, K]."""
    scales = weight.abs().amax(1).float().clamp(min=_SMALLEST) / _LARGEST
    values = (weight.float() / scales[:, None]).to(torch.float8_e4m3fn)
    return RowScaled(values, scales[None])


def multiply(x: Tensor, weight: RowScaled) -> Tensor:
    """Return x @ weight.T with one scale a token, found here. Shapes: [T, K] -> [T, N] bfloat16."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=_SMALLEST) / _LARGEST
    out: Tensor = torch._scaled_mm(
        (wide / scales).to(torch.float8_e4m3fn),
        weight.values.t(),
        scale_a=scales,
        scale_b=weight.scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why products cannot run in FP8 there, or an empty text."""
    if device.type != "cuda":
        return "FP8 products need an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no FP8 products (Ada and later have)"
    if dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, and target.dtype is {dtype}"
    return ""
