"""Triton kernels of the fused AdamW, one program for some blocks of one tensor.

Tensors lie where the table says (``fused_adamw``): of each a row of eight int64, first program,
start in what is flat, count of numbers, addresses of gradient and weight. WIDE: the count is a
multiple of 16, so that nothing is masked within a load of 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def _row(owner_at, table_at, WIDE: tl.constexpr, SPAN: tl.constexpr):
    """Return the program's tensor, its row of the table, where to begin in it, and its length."""
    which = tl.load(owner_at + tl.program_id(0))
    row = table_at + which * 8
    first = tl.program_id(0).to(tl.int64) - tl.load(row)
    count = tl.load(row + 2)
    if WIDE:
        count = tl.multiple_of(count, 16)
    return which, row, tl.multiple_of(first * SPAN, 16), count


@triton.jit
def _gradient(address, inside, exists, DTYPE: tl.constexpr):
    at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)) + inside, 16)
    there = tl.where(address != 0, exists, False)
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def squares(
    owner_at,
    table_at,
    partial_at,
    GRAD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Sum up the squares of the gradients; of each program, one number."""
    _, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
    address, total = tl.load(row + 3), tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        inside = begin + turn * BLOCK + tl.arange(0, BLOCK)
        grad = _gradient(address, inside, inside < count, GRAD)
        total += grad * grad
    tl.store(partial_at + tl.program_id(0), tl.sum(total))


@triton.jit
def add_up(
    owner_at,
    table_at,
    sums_at,
    partial_at,
    kept,
    GRAD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Add gradients to their sums, ``kept`` 1, or begin them, 0; and sum up the sums' squares."""
    _, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
    start, address = tl.load(row + 1), tl.load(row + 3)
    squares_of_sums = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        inside = begin + turn * BLOCK + tl.arange(0, BLOCK)
        exists = inside < count
        total = _gradient(address, inside, exists, GRAD)
        at = tl.multiple_of(sums_at + start + inside, 16)
        total += tl.load(at, mask=tl.where(kept > 0, exists, False), other=0.0)
        tl.store(at, total, mask=exists)
        squares_of_sums += total * total
    tl.store(partial_at + tl.program_id(0), tl.sum(squares_of_sums))


# Not for aligned addresses alone: another kind would compile in the midst of a run.
@triton.jit(do_not_specialize_on_alignment=["sums_at", "norm_at"])
def decide(sums_at, norm_at, scale_at, step_at, clip_norm):
    """Find the scale of the gradients, NaN where no step is to be taken, and count the step."""
    loss, weight, norm = tl.load(sums_at), tl.load(sums_at + 1), tl.load(norm_at)
    good = (tl.abs(loss) < float("inf")) & (tl.abs(norm) < float("inf")) & (weight != 0.0)
    weight = tl.where(good, weight, 1.0)
    norm = tl.where(good, norm, 0.0)
    clip = tl.minimum(clip_norm / (norm / weight + 1e-6), 1.0)
    scale = tl.where(good, clip / weight, float("nan")).to(tl.float32)
    tl.store(scale_at, scale)
    tl.store(step_at, tl.load(step_at) + (tl.abs(scale) < float("inf")).to(tl.float32))


@triton.jit
def _whole(upper, rest):
    """Return fp32 masters from their halves, both int16; see ``trainer.masters``."""
    return ((upper.to(tl.int32) << 16) + rest.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _halves(master):
    """Part masters as ``trainer.masters`` does; both int16."""
    # The NaN that GPUs make has all bits set: rounded up, it would be a zero.
    bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
    upper = (bits + 0x8000) >> 16
    return upper.to(tl.int16), (bits - (upper << 16)).to(tl.int16)


@triton.jit
def adamw(
    owner_at,
    table_at,
    decay_at,
    master_at,
    first_at,
    second_at,
    average_at,
    step_at,
    scale_at,
    lr,
    beta1,
    beta2,
    eps,
    share,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Take a step, unless the scale of its gradients is not finite.

    SPLIT: ``master_at`` has what is left of the masters, int16, and the weights are their upper
    halves. ``average_at``: None where no average is kept.
    """
    scale = tl.load(scale_at)
    if tl.abs(scale) < float("inf"):  # NaN is not less either
        which, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
        start, address = tl.load(row + 1), tl.load(row + 3)
        weight_at = tl.load(row + 4).to(tl.pointer_type(tl.int16 if SPLIT else WEIGHT))
        step, kept = tl.load(step_at), 1.0 - lr * tl.load(decay_at + which)
        rate = lr / (1.0 - tl.exp(step * tl.log(beta1)))
        root = tl.sqrt(1.0 - tl.exp(step * tl.log(beta2)))
        for turn in tl.static_range(TURNS):
            inside = begin + turn * BLOCK + tl.arange(0, BLOCK)
            exists, flat = inside < count, start + inside
            grad = _gradient(address, inside, exists, GRAD) * scale
            master_to = tl.multiple_of(master_at + flat, 16)
            first_to = tl.multiple_of(first_at + flat, 16)
            second_to = tl.multiple_of(second_at + flat, 16)
            weight_to = tl.multiple_of(weight_at + inside, 16)
            master = tl.load(master_to, mask=exists, other=0)
            if SPLIT:
                master = _whole(tl.load(weight_to, mask=exists, other=0), master)
            first = tl.load(first_to, mask=exists, other=0.0)
            second = tl.load(second_to, mask=exists, other=0.0)
            first = first + (grad - first) * (1.0 - beta1)
            second = second * beta2 + grad * grad * (1.0 - beta2)
            master = master * kept - rate * first / (tl.sqrt(second) / root + eps)
            tl.store(first_to, first, mask=exists)
            tl.store(second_to, second, mask=exists)
            if SPLIT:
                weight, rest = _halves(master)
                tl.store(master_to, rest, mask=exists)
                tl.store(weight_to, weight, mask=exists)
            else:
                tl.store(master_to, master, mask=exists)
                if WEIGHT != tl.float32:  # noqa: SIM300 - else it is its master
                    tl.store(weight_to, master.to(WEIGHT), mask=exists)
            if average_at is not None:
                average_to = tl.multiple_of(average_at + flat, 16)
                average = tl.load(average_to, mask=exists, other=0.0)
                tl.store(average_to, average + (master - average) * share, mask=exists)
