"""AdamW over all parameters in one launch: gradients in, masters, moments, average and weights out.

26 bytes a parameter with bf16 gradients and weights and split masters (see ``trainer.masters``),
where scaling, clipping, AdamW and the copy to the weights by themselves take 68. Gradients and
weights lie where they are, and a table of their addresses goes to the device when one has moved;
all else is flat. What a step does is decided on the device: nothing, when the scale of its gradient
is not finite. CUDA only: the kernels are Triton's, and this is imported where it is used.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer import adamw_kernels as kernels
from trainer.device import current_device

ALIGNMENT = 64  # numbers; every tensor of a flat layout begins at a multiple, for wide loads
_ALIGNED_BYTES = 16  # what the kernels tell Triton of every address
_BLOCK = 2048  # numbers at a time
_TURNS = 4  # of one program, which works on one tensor
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Rates:
    """Numbers of one step that the host knows; share: of the weights in their average."""

    lr: float
    betas: tuple[float, float]
    eps: float
    share: float = 0.0


@dataclass(frozen=True)
class Held:
    """What a step reads and writes besides the weights: flat [P] of all parameters, step count [].

    master: fp32, or int16: what is left of masters whose upper halves are the weights, bf16. The
    moments, the average of the masters, where one is kept, and the count of steps: fp32.
    """

    master: Tensor
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    average: Tensor | None

    @classmethod
    def begun(cls, master: Tensor, average: Tensor | None) -> "Held":
        """Return that of parameters that have taken no step."""
        counts = torch.zeros((), dtype=torch.float32, device=master.device)
        first, second = (torch.zeros_like(master, dtype=torch.float32) for _ in range(2))
        return cls(master, counts, first, second, average)


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
    """The launches over all parameters.

    starts: where each begins in a flat tensor, multiples of ALIGNMENT. decays: weight decay by
    parameter.
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
        self._scale = torch.empty((), dtype=torch.float32, device=self.device)
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
                kernels.squares[(part.num_blocks,)](
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
                kernels.add_up[(part.num_blocks,)](
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
    def decide(self, sums: Tensor, norm: Tensor, clip_norm: float, held: Held) -> Tensor:
        """Return by what to multiply the gradients, and count the step; until the next call.

        It divides by the weight sum and clips; it is not finite when the step is not to be taken,
        and is not counted then: when loss sum or norm is not finite, or no position had weight.
        Shapes: sums [K] fp64, the loss sum, the weight sum, more; norm [] fp64, of the sum of
        gradients -> [] fp32.
        """
        with current_device(self.device):
            kernels.decide[(1,)](sums, norm, self._scale, held.step, float(clip_norm))
        return self._scale

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], held: Held, rates: Rates, scale: Tensor) -> None:
        """Take one step, as torch.optim.AdamW does it, and round the masters into the weights.

        The step is the one that ``held.step`` counts; the average follows. ``scale`` [] fp32
        multiplies the gradients first; where it is not finite nothing changes. An fp32 weight has
        to be its master itself. Raises: ValueError for split masters of weights that are not bf16.
        """
        grads, split = _laid(grads), held.master.dtype == torch.int16
        for part in self._parts:
            if split and part.dtype != torch.bfloat16:
                raise ValueError(f"weights of {part.dtype} are not the upper halves of masters")
            types = _TYPES[_dtype_of(part, grads)], _TYPES[part.dtype]
            table = part.table(grads, self.params)
            with current_device(self.device):
                kernels.adamw[(part.num_blocks,)](
                    part.owner,
                    table,
                    part.decay,
                    held.master,
                    held.exp_avg,
                    held.exp_avg_sq,
                    held.average,
                    held.step,
                    scale,
                    rates.lr,
                    *rates.betas,
                    rates.eps,
                    rates.share,
                    *types,
                    split,
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
