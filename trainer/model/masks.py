"""Which keys a block slot may see: the rule once, as a dense mask and as flex tiles.

Keys are laid out [context 0..S-1 | blocks, N * B]; queries are the blocks alone. A slot sees the
context strictly before its anchor, in its own document, and its own block. Blocks of close anchors
overlap in position, so blocks are told apart by their INDEX, never by position.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

FULL = "full_attention"
SLIDING = "sliding_attention"
TILE = 128  # flex_attention's default tile

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskRule:
    """How one kind of layer sees.

    window: None, or the number of keys before and including the slot's own position. causal: a
    slot sees only itself and earlier slots of its block.
    """

    block_size: int
    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks stand.

    Shapes: anchors [R, N] row indices, ascending where kept, 0 where padded; anchor_keep [R, N];
    documents [R, S], -1 for padding; starts [R, N], the row index of each anchor's document.
    """

    anchors: Tensor
    anchor_keep: Tensor
    documents: Tensor
    starts: Tensor

    @classmethod
    def of(cls, anchors: Tensor, anchor_keep: Tensor, documents: Tensor) -> "BlockLayout":
        """Make the layout; a document is one stretch of its row.

        Shapes: anchors and anchor_keep [R, N], documents [R, S].
        """
        places = torch.arange(documents.shape[1], device=documents.device)
        begins = documents != torch.roll(documents, 1, 1)
        begins[:, 0] = True
        starts = torch.where(begins, places, 0).cummax(1).values
        return cls(anchors, anchor_keep, documents, starts.gather(1, anchors))


def rule_of(
    layer_type: str,
    block_size: int,
    sliding_window: int | None,
    *,
    causal: bool,
    sliding_non_causal: bool = False,
) -> MaskRule:
    """Return the rule of a layer type (full_attention or sliding_attention).

    Engines run a sliding layer causally in the block unless its checkpoint says otherwise.
    """
    if layer_type == SLIDING:
        return MaskRule(block_size, sliding_window, causal=causal or not sliding_non_causal)
    return MaskRule(block_size, None, causal)


def context_spans(layout: BlockLayout, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """Return the context keys that each query sees, ``low <= key < high``.

    A document is one stretch of its row, so that a query's keys are one too. Equal where it sees
    none: a padded anchor stands at 0. Shapes: [R, N * B] int32 twice.
    """
    anchor, low = layout.anchors[..., None], layout.starts[..., None]
    slots = torch.arange(rule.block_size, device=anchor.device)
    high = anchor.expand(-1, -1, rule.block_size)
    if rule.window is not None:
        low = torch.maximum(low, anchor + slots - (rule.window - 1))
    low = torch.minimum(low, high)
    return low.flatten(1).int().contiguous(), high.flatten(1).int().contiguous()


def mask_mod(layout: BlockLayout, rule: MaskRule) -> MaskMod:
    """Return the rule as flex's ``(row, head, query, key) -> bool``; its indices may broadcast.

    A query without any key would make the softmax NaN; even a padded block sees itself.
    """
    low, high = context_spans(layout, rule)
    size, length, causal = rule.block_size, layout.documents.shape[1], rule.causal

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        context = (key >= low[row, query]) & (key < high[row, query])
        own = (key >= length) & ((key - length) // size == query // size)
        if causal:
            own = own & ((key - length) % size <= query % size)
        return context | own

    return visible


def dense_mask(layout: BlockLayout, rule: MaskRule) -> Tensor:
    """Return the rule as a mask, True where visible. Shapes: [R, 1, N * B, S + N * B]."""
    rows, num_anchors = layout.anchors.shape
    num_queries = num_anchors * rule.block_size
    device = layout.anchors.device
    row = torch.arange(rows, device=device)[:, None, None]
    query = torch.arange(num_queries, device=device)[None, :, None]
    key = torch.arange(layout.documents.shape[1] + num_queries, device=device)[None, None, :]
    return mask_mod(layout, rule)(row, row, query, key)[:, None]


def block_mask(layout: BlockLayout, rule: MaskRule) -> BlockMask:
    """Return the rule as flex tiles, made from the sorted anchors.

    Nothing of size queries x keys is evaluated and nothing is compiled or traced. One thread at a
    time (CompileGate.mask): from torch 2.13 on, ``from_kv_blocks`` annotates a process-wide
    dictionary while it sorts. Neither S nor N * B has to be a multiple of the tile. The tiles may
    call "partial" what is full, never the reverse, and never leave out a visible pair.
    """
    size, length = rule.block_size, layout.documents.shape[1]
    num_anchors = layout.anchors.shape[1]
    num_queries = num_anchors * size
    device = layout.anchors.device
    tiles = -(-num_queries // TILE)
    key_start = torch.arange(-(-(length + num_queries) // TILE), device=device) * TILE
    key_end = key_start + TILE

    # Blocks touched by each query tile; B need not divide the tile, so neighbours may share one.
    first = torch.arange(tiles, device=device) * TILE // size
    last = ((torch.arange(tiles, device=device) + 1) * TILE - 1).clamp(max=num_queries - 1) // size
    member = first[:, None] + torch.arange(TILE // size + 2, device=device)
    member = torch.minimum(member, last[:, None])  # a repeated last block changes nothing

    anchor = layout.anchors[:, member]  # [R, tiles, blocks]
    lowest_any = lowest_all = layout.starts[:, member]  # first key of some slot, of every slot
    if rule.window is not None:
        lowest_any = torch.maximum(lowest_any, anchor - rule.window + 1)
        lowest_all = torch.maximum(lowest_all, anchor + size - rule.window)
    above = anchor[..., None]
    reaches = (above > key_start) & (lowest_any[..., None] < key_end)
    covers = (above >= key_end) & (lowest_all[..., None] <= key_start)
    some, full = reaches.any(2), covers.all(2)  # [R, tiles, key tiles]

    own = (key_start < length + (last[:, None] + 1) * size) & (
        key_end > length + first[:, None] * size
    )
    partial = (some | own) & ~full
    return BlockMask.from_kv_blocks(
        *_packed(partial),
        *_packed(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(layout, rule),
        seq_lengths=(num_queries, length + num_queries),
    )


def _packed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (count, indices with the chosen tiles first) with a head dimension of 1."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    return count[:, None], order[:, None]
