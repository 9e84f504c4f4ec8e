"""The fp32 masters of a model's parameters, and their moving average.

Masters are whole or split. A whole one is a number of its own, or an fp32 parameter itself. A split
one is held by a bf16 parameter, its upper half, and 16 bits beside it: as whole numbers,
master = (weight << 16) + rest, with the rest in -32768..32767. That is 2 bytes a weight less to
hold, and to read and to write in a step, and no number but NaN changes by it: NaN stays one.

The weight is the master rounded to the nearest, as by torch; but of two that are equally near it
takes the one farther from zero, where torch takes the even one. One number in 65,536 is such a tie.
A master beyond the largest bf16 by half a step or more has an infinite weight, as by torch.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_HALF = 1 << 15


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Part fp32 numbers into weights, bf16, and what is left of them, int16. Shapes: any."""
    # The NaN that GPUs make has all bits set: rounded up, it would be a zero.
    bits = torch.where(master.isnan(), math.nan, master).view(torch.int32)
    upper = (bits + _HALF) >> 16
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def whole(weight: Tensor, rest: Tensor) -> Tensor:
    """Return the fp32 numbers whose ``halves`` these are. Shapes: equal ones, any."""
    bits = weight.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += rest
    return bits.view(torch.float32)


@dataclass(frozen=True)
class Layout:
    """Where each parameter begins in a flat tensor of ``total`` numbers."""

    shapes: tuple[torch.Size, ...]
    starts: list[int]
    total: int

    @classmethod
    def of(cls, params: Sequence[Tensor], alignment: int) -> "Layout":
        """Lay parameters one behind the other, each at a multiple of ``alignment`` numbers."""
        rooms = [math.ceil(param.numel() / alignment) * alignment for param in params]
        ends = list(itertools.accumulate(rooms, initial=0))
        return cls(tuple(param.shape for param in params), ends[:-1], ends[-1])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor [total]."""
        parts = zip(self.shapes, self.starts, strict=True)
        return [flat[start : start + shape.numel()].view(shape) for shape, start in parts]


class Masters(ABC):
    """The fp32 masters of parameters, by their place.

    flat: [P], fp32 masters, or what is left of split ones, int16. handles: what stands for each
    parameter in torch's optimisers.
    """

    flat: Tensor
    handles: Sequence[Tensor]

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._seen = self._marks()

    @abstractmethod
    def __getitem__(self, place: int) -> Tensor:
        """Return one master, fp32: a copy of a split one, a whole one itself."""

    def set(self, place: int, values: Tensor) -> None:
        """Give a parameter this master; the weight follows."""
        self._set(place, values)
        self._seen[place] = self._mark(place)

    def are_finite(self) -> bool:
        """Say whether every master is finite, and the weights of split ones. Waits for a device."""
        return bool(torch.linalg.vector_norm(self.flat, ord=math.inf).isfinite())

    def rewritten(self) -> list[int]:
        """Return the places of weights that somebody else has written, or moved, since.

        What their masters are is not known then: a split one has the upper half of one number and
        the rest of another, and a whole one would undo what was written. An fp32 weight is its
        master, and may be written.
        """
        return [place for place, mark in enumerate(self._seen) if mark != self._mark(place)]

    @abstractmethod
    def _set(self, place: int, values: Tensor) -> None:
        """Write a master and its weight, in a way that ``_mark`` does not see."""

    def _marks(self) -> list[tuple[int, int]]:
        return [self._mark(place) for place in range(len(self._params))]

    def _mark(self, place: int) -> tuple[int, int]:
        """Return what changes when torch writes a weight; kernels and ``data`` do not count."""
        param = self._params[place]
        version = 0 if param.dtype == torch.float32 else param._version
        return version, param.data_ptr()


class WholeMasters(Masters):
    """Masters in a flat fp32 tensor: fp32 parameters become views of it, others are rounded."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self.flat = torch.zeros(layout.total, dtype=torch.float32, device=params[0].device)
        self.handles = [nn.Parameter(view) for view in layout.views(self.flat)]
        self._rounded: list[tuple[Tensor, Tensor]] = []
        for param, master in zip(params, self.handles, strict=True):
            master.data.copy_(param.data)
            if param.dtype == torch.float32:
                param.data = master.data
            else:
                self._rounded.append((param.data, master.data))
        super().__init__(params)

    def __getitem__(self, place: int) -> Tensor:
        """Return one master (not a copy)."""
        return self.handles[place].data

    def write_back(self) -> None:
        """Round the masters into the weights that are not fp32."""
        for weight, master in self._rounded:
            weight.copy_(master)

    def _set(self, place: int, values: Tensor) -> None:
        self[place].copy_(values)
        self._params[place].data.copy_(self[place])  # an fp32 one to itself


class SplitMasters(Masters):
    """Masters of bf16 parameters, which are their upper halves, with the rest in a flat tensor."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self.flat = torch.zeros(layout.total, dtype=torch.int16, device=params[0].device)
        self.handles, self._rests = params, layout.views(self.flat)
        super().__init__(params)

    def __getitem__(self, place: int) -> Tensor:
        """Return one master (a copy)."""
        return whole(self._params[place].data, self._rests[place])

    def are_finite(self) -> bool:
        """Say whether every weight is finite: then every master is. Waits for a device."""
        # Half the bytes, and no fp32 copy.
        largest = [torch.linalg.vector_norm(p.data, ord=math.inf) for p in self._params]
        return bool(torch.stack(largest).isfinite().all())

    def _set(self, place: int, values: Tensor) -> None:
        weight, rest = halves(values.to(self.flat.device, torch.float32))
        self._params[place].data.copy_(weight)
        self._rests[place].copy_(rest)


class NamedMasters(Mapping[str, Tensor]):
    """Masters by the name of their parameter, fp32; split ones are made when they are asked for.

    So there are not all at once: 4 bytes a weight are much on a GPU. Use one after the other.
    """

    def __init__(self, names: Sequence[str], masters: Masters) -> None:
        self._places, self._masters = {name: place for place, name in enumerate(names)}, masters

    def __getitem__(self, name: str) -> Tensor:
        """Return one master: a copy of a split one, a whole one itself."""
        return self._masters[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the model's order."""
        return iter(self._places)

    def __len__(self) -> int:
        """Count the masters."""
        return len(self._places)


class WeightAverage:
    """An fp32 exponential moving average of weights in one flat tensor. Shapes: flat [P].

    The decay rises to its value, min(decay, (1 + step) / (10 + step)), so that the average of a
    short run is not that of its random start. Source: num_updates of TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self, flat: Tensor, decay: float) -> None:
        self.flat, self._decay = flat, decay

    def share(self, step: int) -> float:
        """Return how much of the weights comes in after the 0-based optimiser step ``step``."""
        return 1 - min(self._decay, (1 + step) / (10 + step))

    def follow(self, flat: Tensor, step: int) -> None:
        """Take in the weights after the 0-based optimiser step ``step``."""
        self.flat.lerp_(flat, self.share(step))
