"""Whether attention runs dense, told by the memory it takes: the last sign of a silent fall.

A step can compile something and its attention be dense all the same: flex attention compiles a
wrapper around its dense form, and warns of that once in a process. The scores it cannot hide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from trainer.model.attention import Attention, KeyValue, Mask
from trainer.model.masks import BlockLayout, MaskRule

P = ParamSpec("P")
R = TypeVar("R")

_FP32_BYTES = 4
_GB = 1e9
_PROGRAMS = 512  # two for each of 256 multiprocessors
_SPLIT_QUERIES = 128  # more are not split


@dataclass(frozen=True)
class Taken:
    """Bytes of one layer's attention in the forward.

    taken: all that was requested of the device, one request after the other. at_most: of attention
    that never holds scores. scores: of the scores in the queries' dtype.
    """

    taken: int
    at_most: int
    scores: int

    @property
    def share(self) -> float:
        """Part of what it may take; above 1 it held scores.

        It took more then than it may without, and more than they have.
        """
        return self.taken / max(self.at_most, self.scores, 1)

    def __str__(self) -> str:
        return (
            f"{self.taken / _GB:.3f} GB a layer (without scores at most {self.at_most / _GB:.3f},"
            f" the scores alone are {self.scores / _GB:.3f})"
        )


def most_without_scores(query: Tensor, context: KeyValue, own: KeyValue) -> int:
    """Return the most bytes that attention without scores may request in a forward.

    It makes the output, and of each input at most another layout, each in fp32 and each twice; keys
    and values joined and repeated for every query head; two fp32 numbers a query and head; and
    where the keys of few queries are split over a card, a part of the output for each program.
    Shapes: as Attention.attend.
    """
    rows, num_queries, heads, dim = query.shape
    num_keys, groups = context[0].shape[1] + own[0].shape[1], heads // own[0].shape[2]
    wide = max(_FP32_BYTES, query.element_size())
    tensors = 2 * rows * heads * dim * (num_queries + num_keys)  # query, output; key, value
    split = _PROGRAMS * groups * min(num_queries, _SPLIT_QUERIES) * dim * _FP32_BYTES
    return 2 * wide * tensors + 2 * _FP32_BYTES * rows * heads * num_queries + split


def bytes_of_scores(query: Tensor, context: KeyValue, own: KeyValue) -> int:
    """Return the bytes of every query's score of every key. Shapes: as Attention.attend."""
    rows, num_queries, heads, _ = query.shape
    num_keys = context[0].shape[1] + own[0].shape[1]
    return rows * heads * num_queries * num_keys * query.element_size()


class MeteredAttention:
    """An attention whose forwards are metered; ``meter`` tells the bytes requested so far.

    found: of the forward that took most of what it may.
    """

    def __init__(self, attention: Attention, meter: Callable[[], int]) -> None:
        self._attention, self._meter = attention, meter
        self.found = Taken(0, 0, 0)

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return those of the attention."""
        return self._attention.masks(layout, rules)

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend, and note what it took."""
        before = self._meter()
        out = self._attention.attend(query, context, own, mask)
        one = Taken(
            taken=self._meter() - before,
            at_most=most_without_scores(query, context, own),
            scores=bytes_of_scores(query, context, own),
        )
        if one.share > self.found.share:
            self.found = one
        return out

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return what the attention makes of it."""
        return self._attention.compiled(fn)


def meter_of(device: torch.device) -> Callable[[], int]:
    """Return the meter of a GPU: it counts what all threads request there. No peak is reset."""
    return partial(_requested_bytes, device)


def _requested_bytes(device: torch.device) -> int:
    # Not what was allocated: a cached block may be larger than what was asked for.
    return int(torch.cuda.memory_stats(device).get("requested_bytes.all.allocated", 0))
