"""The work on a chunk of logits in two passes over memory: score reads, slope reads and writes.

Entropy, log of the sum and best row come from one reading of a row with a running maximum; the
gradient is written over the logits. At 2 bytes a logit that is 6 bytes of traffic, where separate
maximum, sum, best row and gradient take 12 and a second tensor of that size. With FP8 products
``shares`` takes the place of ``slope`` and writes one byte. CUDA only: the kernels are Triton's,
and are imported where used. They compile outside torch.compile, in the thread that launches them
first; numbers of rows and columns are arguments, so that no other shape compiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.device import current_device
from trainer.model.logits import Score
from trainer.model.row_scaled import LARGEST, SMALLEST
from trainer.model.scaled_head import LEAST_REST

_LOAD_BYTES = 16  # the widest load of a thread
_GROUPS = 512  # loads of a program in flight: two a thread
_SCORE_WARPS = 8
_SLOPE_BLOCK = 4096
_SLOPE_WARPS = 8


def score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropies, logs of the sums, and best rows, the first of equals.

    Shapes: logits [m, V], one element between columns; labels [m] -> fp32, fp32, int64 [m].
    """
    num_rows, num_columns = logits.shape
    entropy, total = (torch.empty(num_rows, device=logits.device) for _ in range(2))
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        with current_device(logits.device):
            _score[(num_rows,)](
                logits,
                labels,
                entropy,
                total,
                best,
                logits.stride(0),
                num_columns,
                GROUPS=_GROUPS,
                WIDTH=_LOAD_BYTES // logits.element_size(),
                num_warps=_SCORE_WARPS,
            )
    return entropy, total, best


def slope(logits: Tensor, total: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Write (softmax - one at the label) x weight over the logits, and return them.

    Shapes: logits [m, V], one element between columns; logs of the sums, labels, weights [m].
    """
    num_rows, num_columns = logits.shape
    num_blocks = triton.cdiv(num_columns, _SLOPE_BLOCK)
    if num_rows:
        with current_device(logits.device):
            _slope[(num_rows * num_blocks,)](
                logits,
                total,
                labels,
                weights,
                logits.stride(0),
                num_columns,
                num_blocks,
                BLOCK=_SLOPE_BLOCK,
                num_warps=_SLOPE_WARPS,
            )
    return logits


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as e4m3 with one fitted scale a row (row_scaled.scale_rows).

    Shapes: [M, D] -> [M, D], [M, 1] fp32.
    """
    x = x.contiguous()
    num_rows, num_columns = x.shape
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, device=x.device)
    if num_rows:
        with current_device(x.device):
            _scale_rows[(num_rows,)](
                x,
                values,
                scales,
                num_columns,
                BLOCK=triton.next_power_of_2(num_columns),
                LARGEST=LARGEST,
                SMALLEST=SMALLEST,
                num_warps=_SCORE_WARPS,
            )
    return values, scales


def shares(logits: Tensor, found: Score, labels: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write the softmax as e4m3, zero at the label and behind the logits; return its scales.

    Shapes: logits [m, V] and out [m, W], one element between columns; labels and weights [m] ->
    [m, 1] fp32, times the weights.
    """
    num_rows, num_columns = logits.shape
    num_blocks = triton.cdiv(out.shape[1], _SLOPE_BLOCK)
    scales = torch.empty(num_rows, 1, device=logits.device)
    if num_rows:
        with current_device(logits.device):
            _shares[(num_rows * num_blocks,)](
                logits,
                out,
                found.entropy,
                found.total,
                found.best,
                labels,
                weights,
                scales,
                logits.stride(0),
                out.stride(0),
                num_columns,
                out.shape[1],
                num_blocks,
                BLOCK=_SLOPE_BLOCK,
                LARGEST=LARGEST,
                LEAST_REST=LEAST_REST,
                num_warps=_SLOPE_WARPS,
            )
    return scales


def add_label(grad: Tensor, head: Tensor, entropy: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Add (share of the label - 1) x weight x its row of the head to each row of the gradient.

    Shapes: grad [m, D], head [V, D], both packed; entropy, labels and weights [m].
    """
    num_rows, num_columns = grad.shape
    if num_rows:
        with current_device(grad.device):
            _add_label[(num_rows,)](
                grad,
                head,
                entropy,
                labels,
                weights,
                num_columns,
                BLOCK=triton.next_power_of_2(num_columns),
                num_warps=_SCORE_WARPS,
            )


# Chunks begin anywhere: what is read once a row is not worth a kernel for each alignment.
@triton.jit(do_not_specialize=["labels_at", "entropy_at", "total_at", "best_at", "num_columns"])
def _score(
    logits_at,
    labels_at,
    entropy_at,
    total_at,
    best_at,
    stride,
    num_columns,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row a program; each of GROUPS lanes reads WIDTH neighbours and keeps its own maximum."""
    row = tl.program_id(0).to(tl.int64)
    row_at = logits_at + row * stride
    lane = tl.arange(0, GROUPS)
    place = lane[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # Finite: -inf less -inf would be no number. exp(-3e38 - m) is 0, and so is the sum it scales.
    high = tl.full([GROUPS], -3.0e38, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    best = tl.zeros([GROUPS], tl.int32)  # first column of the group in which ``high`` was found
    whole = num_columns // (GROUPS * WIDTH) * (GROUPS * WIDTH)
    for start in range(0, whole, GROUPS * WIDTH):
        read = tl.load(row_at + start + place).to(tl.float32)
        top = tl.max(read, 1)
        best = tl.where(top > high, start + lane * WIDTH, best)
        risen = tl.maximum(high, top)
        total = total * tl.exp(high - risen) + tl.sum(tl.exp(read - risen[:, None]), 1)
        high = risen
    # What is left, masked; a mask within a group would make the loads above narrow.
    inside = whole + place < num_columns
    read = tl.load(row_at + whole + place, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(read, 1)
    best = tl.where(top > high, whole + lane * WIDTH, best)
    risen = tl.maximum(high, top)
    total = total * tl.exp(high - risen) + tl.sum(tl.exp(read - risen[:, None]), 1)
    highest = tl.max(risen, 0)
    sums = highest + tl.log(tl.sum(total * tl.exp(risen - highest), 0))
    group = tl.min(tl.where(risen == highest, best, num_columns), 0)
    column = group + tl.arange(0, WIDTH)
    again = tl.load(row_at + column, mask=column < num_columns, other=-float("inf"))
    first = tl.min(tl.where(again.to(tl.float32) == highest, column, num_columns), 0)
    wanted = tl.load(row_at + tl.load(labels_at + row)).to(tl.float32)
    tl.store(entropy_at + row, sums - wanted)
    tl.store(total_at + row, sums)
    tl.store(best_at + row, first.to(tl.int64))


@triton.jit(do_not_specialize=["total_at", "labels_at", "weights_at", "num_columns", "num_blocks"])
def _slope(
    logits_at,
    total_at,
    labels_at,
    weights_at,
    stride,
    num_columns,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """One block of one row a program."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    start = tl.program_id(0) % num_blocks * BLOCK
    total = tl.load(total_at + row)
    weight = tl.load(weights_at + row)
    label = tl.load(labels_at + row)
    column = start + tl.arange(0, BLOCK)
    here = logits_at + row * stride + column
    if start + BLOCK <= num_columns:  # without a mask, which would make loads and stores narrow
        made = tl.exp(tl.load(here).to(tl.float32) - total)
        made = (made - tl.where(column == label, 1.0, 0.0)) * weight
        tl.store(here, made.to(logits_at.dtype.element_ty))
    else:
        inside = column < num_columns
        made = tl.exp(tl.load(here, mask=inside, other=0.0).to(tl.float32) - total)
        made = (made - tl.where(column == label, 1.0, 0.0)) * weight
        tl.store(here, made.to(logits_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scales_at"])
def _scale_rows(
    x_at,
    values_at,
    scales_at,
    num_columns,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One row a program. Its scale is such that its product with itself is exact."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, place = column < num_columns, row * num_columns + column
    read = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(read), 0), SMALLEST) / LARGEST
    wide = read / scale
    values = wide.to(tl.float8e4nv)
    tl.store(values_at + place, values, mask=inside)
    square, along = tl.sum(wide * wide, 0), tl.sum(wide * values.to(tl.float32), 0)
    tl.store(scales_at + row, scale * (square + SMALLEST) / (along + SMALLEST))


@triton.jit(
    do_not_specialize=[
        *("entropy_at", "total_at", "best_at", "labels_at", "weights_at", "scales_at"),
        *("num_columns", "width", "num_blocks"),
    ]
)
def _shares(
    logits_at,
    out_at,
    entropy_at,
    total_at,
    best_at,
    labels_at,
    weights_at,
    scales_at,
    stride,
    out_stride,
    num_columns,
    width,
    num_blocks,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_REST: tl.constexpr,
):
    """One block of one row a program; the first of a row writes its scale."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    start = tl.program_id(0) % num_blocks * BLOCK
    row_at = logits_at + row * stride
    total = tl.load(total_at + row)
    label = tl.load(labels_at + row)
    highest = tl.exp(tl.load(row_at + tl.load(best_at + row)).to(tl.float32) - total)
    # Beside a label that is best itself: no more than it has, nor than what it leaves.
    rest = tl.maximum(1.0 - tl.exp(-tl.load(entropy_at + row)), LEAST_REST)
    scale = tl.minimum(highest, rest) / LARGEST
    factor = 1.0 / scale
    column = start + tl.arange(0, BLOCK)
    here, there = row_at + column, out_at + row * out_stride + column
    if start + BLOCK <= num_columns:  # without a mask, which would make loads and stores narrow
        made = tl.exp(tl.load(here).to(tl.float32) - total) * factor
        made = tl.minimum(tl.where(column == label, 0.0, made), LARGEST)
        tl.store(there, made.to(tl.float8e4nv))
    else:
        inside = column < num_columns
        read = tl.load(here, mask=inside, other=-float("inf")).to(tl.float32)
        made = tl.exp(read - total) * factor
        made = tl.minimum(tl.where(column == label, 0.0, made), LARGEST)
        tl.store(there, made.to(tl.float8e4nv), mask=column < width)
    if start == 0:
        tl.store(scales_at + row, scale * tl.load(weights_at + row))


@triton.jit(do_not_specialize=["entropy_at", "labels_at", "weights_at"])
def _add_label(
    grad_at, head_at, entropy_at, labels_at, weights_at, num_columns, BLOCK: tl.constexpr
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_at + row).to(tl.int64)
    slope = (tl.exp(-tl.load(entropy_at + row)) - 1.0) * tl.load(weights_at + row)
    column = tl.arange(0, BLOCK)
    inside, place = column < num_columns, row * num_columns + column
    made = tl.load(grad_at + place, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(head_at + label * num_columns + column, mask=inside, other=0.0)
    made += slope * wanted.to(tl.float32)
    tl.store(grad_at + place, made.to(grad_at.dtype.element_ty), mask=inside)
