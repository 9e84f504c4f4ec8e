"""AdamW over all parameters in one launch: gradients in, fp32 master and moments, weights out.

28 bytes a parameter with bf16 gradients and weights, where scaling, clipping, AdamW and the copy to
the weights by themselves take 68. Gradients and weights lie where they are, and a table of their
addresses goes to the device when one has moved; masters and moments are flat. What a step does is
decided on the device: nothing, when the scale of its gradient is not finite. CUDA only: the kernels
are Triton's, and are imported where used.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.device import current_device

ALIGNMENT = 64  # numbers; every tensor of a flat layout begins at a multiple, for wide loads
_ALIGNED_BYTES = 16  # what the kernels tell Triton of every address
_BLOCK = 2048  # numbers at a time
_TURNS = 4  # of one program, which works on one tensor
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Rates:
    """Numbers of one step that the host knows."""

    lr: float
    betas: tuple[float, float]
    eps: float


class _Part:
    """Parameters that one launch works on: of one type, and all ``wide`` or none.

    wide: whose number of numbers is a multiple of 16, so that nothing is masked within a load.
    """

    def __init__(self, places: list[int], owner: "FusedAdamw") -> None:
        self.places, self.dtype = places, owner.params[places[0]].dtype
        self.wide = _is_wide(owner.params[places[0]])
        counts = [owner.params[place].numel() for place in places]
        blocks = [triton.cdiv(count, _BLOCK * _TURNS) for count in counts]
        self.num_blocks = sum(blocks)
        self._device = owner.device
        self._fixed = [
            [first, owner.starts[place], count]
            for first, place, count in zip(
                itertools.accumulate(blocks, initial=0), places, counts, strict=False
            )
        ]
        number = torch.arange(len(places), dtype=torch.int32)
        self.owner = number.repeat_interleave(torch.tensor(blocks)).to(self._device)
        self.decay = torch.tensor([owner.decays[place] for place in places], device=self._device)
        self._sent: list[tuple[int, int]] = []
        self._table = torch.empty(0)

    def table(self, grads: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
        """Return the table of the kernels, sent again when an address has changed.

        Shapes: [tensors, 8] int64: first block, start, count, addresses of gradient and weight,
        and what makes a row 64 bytes.
        """
        addresses = [
            (0 if grads[place] is None else grads[place].data_ptr(), weights[place].data_ptr())  # type: ignore[union-attr]
            for place in self.places
        ]
        if addresses != self._sent:
            rows = [
                [*fixed, *moving, 0, 0, 0]
                for fixed, moving in zip(self._fixed, addresses, strict=True)
            ]
            pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._table = pinned.to(self._device, non_blocking=True)
            self._sent = addresses
        return self._table


class FusedAdamw:
    """Moments and step count of all parameters, and the launches over them.

    starts: where each begins in a flat tensor, multiples of ALIGNMENT. decays: weight decay by
    parameter. Shapes: master and the moments flat [P] fp32; step [] fp32.
    """

    def __init__(
        self, params: Sequence[Tensor], starts: Sequence[int], decays: Sequence[float]
    ) -> None:
        self.params, self.starts, self.decays = params, starts, decays
        self.device = params[0].device
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for place, param in enumerate(params):
            kinds.setdefault((param.dtype, _is_wide(param)), []).append(place)
        self._parts = [_Part(places, self) for places in kinds.values()]
        self._partial = torch.empty(
            sum(part.num_blocks for part in self._parts), dtype=torch.float32, device=self.device
        )

    @torch.no_grad()
    def norm(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the 2-norm of all gradients, [] fp32; it is finite if and only if they all are.

        An overflow of the sum of squares counts as not finite. None is a gradient of zeros.
        """
        grads = _laid(grads)
        for part, partial in self._with_partials():
            dtype = _TYPES[_dtype_of(part, grads)]
            with current_device(self.device):
                _squares[(part.num_blocks,)](
                    part.owner,
                    part.table(grads, self.params),
                    partial,
                    dtype,
                    part.wide,
                    _BLOCK,
                    _TURNS,
                    num_warps=_WARPS,
                )
        return self._partial.sum().sqrt()

    @torch.no_grad()
    def add_up(self, grads: Sequence[Tensor | None], sums: Tensor, *, fresh: bool) -> Tensor:
        """Add gradients to the flat fp32 ``sums``; returns the norm of the new sums as ``norm``.

        ``fresh``: the sums begin with these gradients, whatever they held. Shapes: sums [P].
        """
        grads = _laid(grads)
        for part, partial in self._with_partials():
            table, dtype = part.table(grads, self.params), _TYPES[part.dtype]
            with current_device(self.device):
                _add_up[(part.num_blocks,)](
                    part.owner,
                    table,
                    sums,
                    partial,
                    0.0 if fresh else 1.0,  # whole numbers would compile twice
                    dtype,
                    part.wide,
                    _BLOCK,
                    _TURNS,
                    num_warps=_WARPS,
                )
        return self._partial.sum().sqrt()

    @torch.no_grad()
    def step(
        self,
        grads: Sequence[Tensor | None],
        master: Tensor,
        state: "Moments",
        rates: Rates,
        scale: Tensor,
    ) -> None:
        """Take one step, as torch.optim.AdamW does it, and round the masters into the weights.

        ``scale`` [] fp32 multiplies the gradients first; where it is not finite nothing changes,
        the step count included. A weight may be its master itself.
        """
        grads = _laid(grads)
        state.step.add_(scale.isfinite())
        for part in self._parts:
            types = _TYPES[_dtype_of(part, grads)], _TYPES[part.dtype]
            table = part.table(grads, self.params)
            with current_device(self.device):
                _adamw[(part.num_blocks,)](
                    part.owner,
                    table,
                    part.decay,
                    master,
                    state.exp_avg,
                    state.exp_avg_sq,
                    state.step,
                    scale,
                    rates.lr,
                    *rates.betas,
                    rates.eps,
                    *types,
                    part.wide,
                    _BLOCK,
                    _TURNS,
                    num_warps=_WARPS,
                )

    def _with_partials(self) -> Iterable[tuple[_Part, Tensor]]:
        ends = itertools.accumulate(part.num_blocks for part in self._parts)
        return (
            (part, self._partial[end - part.num_blocks : end])
            for part, end in zip(self._parts, ends, strict=True)
        )


@dataclass(frozen=True)
class Moments:
    """Flat moments [P] of all parameters and their step count [], fp32."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def zero(cls, master: Tensor) -> "Moments":
        """Return those of parameters that have taken no step."""
        step = torch.zeros((), dtype=torch.float32, device=master.device)
        return cls(step, torch.zeros_like(master), torch.zeros_like(master))


def _laid(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients as the kernels read them: contiguous, at an aligned address."""
    laid = []
    for grad in grads:
        good = grad is None or (grad.is_contiguous() and grad.data_ptr() % _ALIGNED_BYTES == 0)
        laid.append(grad if good else grad.clone(memory_format=torch.contiguous_format))  # type: ignore[union-attr]
    return laid


def _is_wide(param: Tensor) -> bool:
    return param.numel() % 16 == 0


def _dtype_of(part: _Part, grads: Sequence[Tensor | None]) -> torch.dtype:
    """Return the type of a part's gradients: that of its parameters, or fp32 for their sums."""
    return next((g.dtype for g in (grads[p] for p in part.places) if g is not None), part.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _row(owner_at, table_at, WIDE: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Return the program's tensor, its row of the table, where to begin in it, and its length."""
    which = tl.load(owner_at + tl.program_id(0))
    row = table_at + which * 8
    first = tl.program_id(0).to(tl.int64) - tl.load(row)
    count = tl.load(row + 2)
    if WIDE:
        count = tl.multiple_of(count, 16)
    return which, row, tl.multiple_of(first * SPAN, 16), count


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(address, inside, exists, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)) + inside, 16)
    return tl.load(at, mask=exists & (address != 0), other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _squares(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913
    owner_at,  # noqa: ANN001
    table_at,  # noqa: ANN001
    partial_at,  # noqa: ANN001
    GRAD: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
):
    _, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
    address, squares = tl.load(row + 3), tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        inside = begin + turn * BLOCK + tl.arange(0, BLOCK)
        grad = _gradient(address, inside, inside < count, GRAD)
        squares += grad * grad
    tl.store(partial_at + tl.program_id(0), tl.sum(squares))


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913
    owner_at,  # noqa: ANN001
    table_at,  # noqa: ANN001
    sums_at,  # noqa: ANN001
    partial_at,  # noqa: ANN001
    kept,  # noqa: ANN001
    GRAD: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
):
    _, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
    start, address = tl.load(row + 1), tl.load(row + 3)
    squares = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        inside = begin + turn * BLOCK + tl.arange(0, BLOCK)
        exists = inside < count
        total = _gradient(address, inside, exists, GRAD)
        at = tl.multiple_of(sums_at + start + inside, 16)
        total += tl.load(at, mask=exists & (kept > 0), other=0.0)
        tl.store(at, total, mask=exists)
        squares += total * total
    tl.store(partial_at + tl.program_id(0), tl.sum(squares))


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913
    owner_at,  # noqa: ANN001
    table_at,  # noqa: ANN001
    decay_at,  # noqa: ANN001
    master_at,  # noqa: ANN001
    first_at,  # noqa: ANN001
    second_at,  # noqa: ANN001
    step_at,  # noqa: ANN001
    scale_at,  # noqa: ANN001
    lr,  # noqa: ANN001
    beta1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    eps,  # noqa: ANN001
    GRAD: tl.constexpr,  # noqa: N803
    WEIGHT: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
):
    scale = tl.load(scale_at)
    if tl.abs(scale) < float("inf"):  # NaN is not less either
        which, row, begin, count = _row(owner_at, table_at, WIDE, BLOCK * TURNS)
        start, address = tl.load(row + 1), tl.load(row + 3)
        weight_at = tl.load(row + 4).to(tl.pointer_type(WEIGHT))
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
            master = tl.load(master_to, mask=exists, other=0.0)
            first = tl.load(first_to, mask=exists, other=0.0)
            second = tl.load(second_to, mask=exists, other=0.0)
            first = first + (grad - first) * (1.0 - beta1)
            second = second * beta2 + grad * grad * (1.0 - beta2)
            master = master * kept - rate * first / (tl.sqrt(second) / root + eps)
            tl.store(first_to, first, mask=exists)
            tl.store(second_to, second, mask=exists)
            tl.store(master_to, master, mask=exists)
            weight_to = tl.multiple_of(weight_at + inside, 16)
            tl.store(weight_to, master.to(WEIGHT), mask=exists)
