"""The mask as spans: what a query sees of the context is one stretch, two numbers a query.

This is all that model.span_kernels reads of a mask; it is made here without Triton, so that a CPU
can hold it against the dense mask.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.model.masks import BlockLayout, MaskRule, context_spans


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles: queries, keys, and how Triton runs it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


_NARROWEST_HEAD, _WIDEST_HEAD = 16, 256
# Of the kernel that makes the gradients of keys; measured on an H200 (docs/benchmarks.md).
KEY_GRADIENT = Tiles(64, 64, 4, 2)


@dataclass(frozen=True)
class Spans:
    """What the queries of a batch see, for one rule.

    block_size: slots of a block. causal: a slot sees no later slot of its block. low, high: context
    keys low <= key < high; equal where none. reach: for each tile of KEY_GRADIENT.keys context keys
    the tiles of KEY_GRADIENT.queries queries that may see it, [first, first whole, end whole, end):
    those between the inner two see every key of it. Shapes: low, high [R, Q] int32, reach
    [R, tiles, 4] int32.
    """

    block_size: int
    causal: bool
    low: Tensor
    high: Tensor
    reach: Tensor


def why_no_spans(head_dim: int) -> str:
    """Return why the kernels take no heads of this width, or an empty text."""
    if not head_dim & (head_dim - 1) and _NARROWEST_HEAD <= head_dim <= _WIDEST_HEAD:
        return ""
    return (
        f"draft.head_dim {head_dim}: the kernels want a power of two from {_NARROWEST_HEAD} to"
        f" {_WIDEST_HEAD}; set compile.attention to flex"
    )


def span_tensors(layout: BlockLayout, rule: MaskRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return low, high and reach of Spans. Shapes: [R, Q] twice, [R, tiles, 4], int32."""
    low, high = context_spans(layout, rule)
    return low, high, reach_of(low, high, layout.documents.shape[1], KEY_GRADIENT)


def reach_of(low: Tensor, high: Tensor, length: int, tiles: Tiles) -> Tensor:
    """Return Spans.reach of a context of ``length`` keys. Shapes: [R, Q] twice -> [R, tiles, 4]."""
    rows, num_queries = low.shape
    missing = -num_queries % tiles.queries
    # A query past the end sees nothing: it neither reaches a tile nor leaves one whole.
    low = F.pad(low, (0, missing)).view(rows, -1, 1, tiles.queries)
    high = F.pad(high, (0, missing)).view(rows, -1, 1, tiles.queries)
    start = torch.arange(-(-length // tiles.keys), device=low.device)[:, None] * tiles.keys
    stop = (start + tiles.keys).clamp(max=length)
    sees = ((low < stop) & (high > start) & (low < high)).any(-1)  # [R, query tiles, key tiles]
    whole = ((low <= start) & (high >= stop)).all(-1)
    count = whole.shape[1]
    number = torch.arange(count, device=low.device)[:, None]
    end = torch.where(sees, number + 1, 0).amax(1)
    first = torch.minimum(torch.where(sees, number, count).amin(1), end)
    first_whole = torch.where(whole, number, count).amin(1)
    # The first stretch of whole tiles alone, whatever the order of the anchors is.
    behind = ~whole & (number > first_whole[:, None])
    end_whole = torch.where(behind, number, count).amin(1)
    none = first_whole == count
    edges = (first, torch.where(none, end, first_whole), torch.where(none, end, end_whole), end)
    return torch.stack(edges, -1).int().contiguous()
