"""The mask rule, by hand, and its flex tiles."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from trainer.model.masks import BlockLayout, MaskRule, block_mask, dense_mask, mask_mod, rule_of
from trainer.model.spans import KEY_GRADIENT, reach_of, span_tensors, why_no_spans


def layout_of(
    anchors: list[int], lengths: list[int], padding: int, num_padded: int = 0
) -> BlockLayout:
    """One row of documents one after another, then padding; padded anchors stand at 0."""
    documents = [d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    keep = [True] * len(anchors) + [False] * num_padded
    return BlockLayout.of(
        torch.tensor([anchors + [0] * num_padded]),
        torch.tensor([keep]),
        torch.tensor([documents], dtype=torch.int32),
    )


def drawn(mask: Tensor) -> list[str]:
    """Rows as text, with a bar between the context and the blocks' keys by the caller's width."""
    return ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()]


def test_packed_row_of_two_documents_has_the_hand_written_mask():
    # document 0: rows 0-3, document 1: rows 4-6, row 7 padding; the third block is padding
    layout = layout_of([2, 5], [4, 3], padding=1, num_padded=1)
    found = drawn(dense_mask(layout, MaskRule(block_size=2)))
    assert found == [
        "xx......" + "xx....",
        "xx......" + "xx....",
        "....x..." + "..xx..",
        "....x..." + "..xx..",
        "........" + "....xx",
        "........" + "....xx",
    ]


def test_overlapping_blocks_do_not_see_each_other():
    layout = layout_of([2, 3], [5], padding=0)
    found = drawn(dense_mask(layout, MaskRule(block_size=3)))
    assert found == ["xx...xxx..."] * 3 + ["xxx.....xxx"] * 3


def test_context_at_the_anchor_itself_is_hidden():
    layout = layout_of([3], [6], padding=0)
    assert not dense_mask(layout, MaskRule(block_size=2))[..., 3:6].any()


def test_sliding_layer_is_causal_in_the_block_and_counts_the_window_from_each_slot():
    layout = layout_of([4], [6], padding=0)
    rule = rule_of("sliding_attention", block_size=3, sliding_window=3, causal=False)
    # slot i stands at 4 + i and sees keys above 4 + i - 3, itself included
    assert drawn(dense_mask(layout, rule)) == ["..xx..x..", "...x..xx.", "......xxx"]


def test_sliding_layer_told_not_to_be_causal_sees_its_whole_block():
    layout = layout_of([4], [6], padding=0)
    rule = rule_of("sliding_attention", 3, 3, causal=False, sliding_non_causal=True)
    assert drawn(dense_mask(layout, rule)) == ["..xx..xxx", "...x..xxx", "......xxx"]
    assert rule_of("sliding_attention", 3, 3, causal=True, sliding_non_causal=True).causal


def test_causal_draft_hides_later_slots_in_full_layers():
    layout = layout_of([1], [3], padding=0)
    rule = rule_of("full_attention", block_size=3, sliding_window=None, causal=True)
    assert drawn(dense_mask(layout, rule)) == ["x..x..", "x..xx.", "x..xxx"]


def test_every_query_sees_a_key_even_when_its_anchor_is_padding():
    layout = layout_of([], [4], padding=4, num_padded=3)
    mask = dense_mask(layout, MaskRule(block_size=4))
    assert mask.any(-1).all()


def expanded(layout: BlockLayout, rule: MaskRule) -> Tensor:
    """What the kernel computes from the tiles: full tiles whole, partial ones through the rule."""
    made = block_mask(layout, rule)
    dense = dense_mask(layout, rule)
    seen = torch.zeros_like(dense)
    parts = (
        (made.kv_num_blocks, made.kv_indices, False),
        (made.full_kv_num_blocks, made.full_kv_indices, True),
    )
    for count, indices, full in parts:
        for row in range(dense.shape[0]):
            for tile in range(count.shape[2]):
                for column in indices[row, 0, tile, : count[row, 0, tile]].tolist():
                    box = (
                        row,
                        0,
                        slice(tile * 128, tile * 128 + 128),
                        slice(column * 128, column * 128 + 128),
                    )
                    seen[box] = True if full else dense[box]
    return seen


CASES = [
    (16, None, 384, 24),
    (16, None, 300, 17),
    (10, None, 256, 40),
    (10, 100, 290, 33),
    (4, None, 96, 32),
    (8, 64, 512, 64),
    (16, 2048, 256, 16),
]


def random_layout(block_size: int, length: int, num_anchors: int) -> BlockLayout:
    generator = torch.Generator().manual_seed(block_size * length)
    documents = torch.full((2, length), -1, dtype=torch.int32)
    anchors = torch.zeros(2, num_anchors, dtype=torch.long)
    keep = torch.zeros(2, num_anchors, dtype=torch.bool)
    for row, lengths in enumerate(([length // 3, length // 2], [length])):
        start = 0
        for number, size in enumerate(lengths):
            documents[row, start : start + size] = number
            start += size
        used = num_anchors - 3 * row
        anchors[row, :used] = torch.randperm(start, generator=generator)[:used].sort().values
        keep[row, :used] = True
    return BlockLayout.of(anchors, keep, documents)


@pytest.mark.parametrize(("block_size", "window", "length", "num_anchors"), CASES)
def test_tiles_from_sorted_anchors_show_exactly_the_dense_mask(
    block_size: int, window: int | None, length: int, num_anchors: int
):
    layout = random_layout(block_size, length, num_anchors)
    for causal in (False, True):
        rule = MaskRule(block_size, window, causal)
        assert torch.equal(expanded(layout, rule), dense_mask(layout, rule))


@pytest.mark.parametrize(("block_size", "window", "length", "num_anchors"), CASES)
def test_spans_are_the_context_of_the_dense_mask_and_their_reach_leaves_nothing_out(
    block_size: int, window: int | None, length: int, num_anchors: int
):
    layout = random_layout(block_size, length, num_anchors)
    rule = MaskRule(block_size, window)
    low, high, reach = span_tensors(layout, rule)
    context = dense_mask(layout, rule)[:, 0, :, :length]
    keys = torch.arange(length)
    assert torch.equal(context, (keys >= low[..., None]) & (keys < high[..., None]))
    queries, size = KEY_GRADIENT.queries, KEY_GRADIENT.keys
    for row in range(2):
        for tile, (first, first_whole, end_whole, end) in enumerate(reach[row].tolist()):
            part = context[row, :, tile * size : (tile + 1) * size]
            assert not part[: first * queries].any()
            assert not part[end * queries :].any()
            assert part[first_whole * queries : end_whole * queries].all()
            assert first <= first_whole <= end_whole <= end


def test_reach_counts_no_tile_as_whole_between_two_whole_ones():
    # the first and the last 64 queries see all 64 keys, those between them only the first key
    high = torch.tensor([[64] * 64 + [1] * 64 + [64] * 64], dtype=torch.int32)
    assert reach_of(torch.zeros_like(high), high, 64, KEY_GRADIENT).tolist() == [[[0, 0, 1, 3]]]


@pytest.mark.parametrize(("block_size", "window", "length", "num_anchors"), CASES)
def test_tiles_are_those_of_the_library_which_evaluates_every_pair(
    block_size: int, window: int | None, length: int, num_anchors: int
):
    layout = random_layout(block_size, length, num_anchors)
    rule = MaskRule(block_size, window, causal=window is not None)
    queries = num_anchors * block_size
    theirs = create_block_mask(
        mask_mod(layout, rule), 2, None, queries, length + queries, device="cpu"
    )
    ours = block_mask(layout, rule)
    assert ours.seq_lengths == theirs.seq_lengths
    visited = ours.to_dense().bool()
    needed = theirs.to_dense().bool()
    assert torch.equal(visited | needed, visited)
    assert int(visited.sum()) <= int(needed.sum()) + int(needed.sum()) // 10


def test_span_kernels_refuse_heads_that_are_no_power_of_two_or_too_narrow_or_wide():
    assert [dim for dim in (8, 16, 64, 96, 128, 192, 256, 512) if not why_no_spans(dim)] == [
        *(16, 64, 128, 256)
    ]
    assert "draft.head_dim 96" in why_no_spans(96)
