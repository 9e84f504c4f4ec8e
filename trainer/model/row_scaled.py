"""FP8 products whose operands carry one scale a row: e4m3 values, fp32 scales, bfloat16 results."""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-12  # of a row that is all zero
_AT_ONCE = 1 << 26  # elements whose fp32 copies exist while a weight is turned into FP8


class RowScaled(NamedTuple):
    """A weight in FP8. Shapes: values [N, K] e4m3, scales [1, N] fp32."""

    values: Tensor
    scales: Tensor


def quantise(weight: Tensor, shape: tuple[int, int] | None = None) -> RowScaled:
    """Return a weight as e4m3 with one scale an output channel.

    ``shape``: of the values, where larger than the weight; what it adds is zero. Shapes: [N, K].
    """
    num_rows, num_columns = weight.shape
    device, shape = weight.device, shape or (num_rows, num_columns)
    values = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(1, shape[0], device=device)
    step = max(1, _AT_ONCE // max(1, num_columns))
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        rounded, scale = scale_rows(weight[part], fitted=True)
        values[part, :num_columns] = rounded
        scales[0, part] = scale.squeeze(1)
    return RowScaled(values, scales)


def scale_rows(x: Tensor, *, fitted: bool = False) -> tuple[Tensor, Tensor]:
    """Return x as e4m3 with one scale a row.

    ``fitted``: so that a row's product with itself is exact. Rounding to the nearest leaves values
    0.09 % too small on average, and so makes large logits small. Shapes: [T, K] -> [T, K], [T, 1]
    fp32.
    """
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    wide = wide / scales
    values = wide.to(torch.float8_e4m3fn)
    if fitted:
        square = wide.square().sum(1, keepdim=True)
        along = (wide * values.float()).sum(1, keepdim=True)
        scales = scales * (square + SMALLEST) / (along + SMALLEST)  # 1 for a row of zeros
    return values, scales


def multiply(x: Tensor, weight: RowScaled) -> Tensor:
    """Return x @ weight.T with one scale a token, found here. Shapes: [T, K] -> [T, N] bfloat16."""
    return product(*scale_rows(x), weight)


def product(
    values: Tensor,
    scales: Tensor,
    weight: RowScaled,
    *,
    out: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """Return (values x scales) @ weight.T. Shapes: [T, K] FP8, [T, 1] fp32 -> [T, N] bfloat16.

    N and K are multiples of 16. ``out``: where the result goes, contiguous. ``fast``: sums stay in
    the 14 bits of a Hopper's FP8 units, where large ones come out too small.
    """
    options = {} if out is None else {"out": out}
    made: Tensor = torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales,
        scale_b=weight.scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
        **options,
    )
    return made


def why_not(device: torch.device, dtype: torch.dtype, setting: str = "target.dtype") -> str:
    """Return why products cannot run in FP8 there, or an empty text; ``setting`` gives dtype."""
    if device.type != "cuda":
        return "FP8 products need an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no FP8 products (Ada and later have)"
    if dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, and {setting} is {dtype}"
    return ""
