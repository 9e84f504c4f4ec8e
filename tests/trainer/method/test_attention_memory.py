"""Attention that runs dense is found by the memory it takes, and no other."""

import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.assembly import worst_attention
from trainer.compile_gate import CompileGate, GateSettings
from trainer.model.attention import Attention, FlexAttention, KeyValue, SdpaAttention, SpanAttention
from trainer.model.attention_memory import (
    MeteredAttention,
    Taken,
    bytes_of_scores,
    meter_of,
    most_without_scores,
)
from trainer.model.masks import BlockLayout, MaskRule

RULES = {"full_attention": MaskRule(8)}
Case = tuple[BlockLayout, Tensor, KeyValue, KeyValue]


def case(
    rows: int, length: int, num_anchors: int, heads: tuple[int, int, int], device: str = "cpu"
) -> Case:
    """Random queries, keys and values; heads: of queries, of keys, and their width."""
    torch.manual_seed(0)
    anchors = torch.linspace(1, length - 2, num_anchors, device=device).long()
    layout = BlockLayout.of(
        anchors.expand(rows, -1),
        torch.ones(rows, num_anchors, dtype=torch.bool, device=device),
        torch.zeros(rows, length, dtype=torch.int32, device=device),
    )
    count, dtype = num_anchors * 8, torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(count, heads[0]), *((n, heads[1]) for n in (length, length, count, count))]
    query, *others = (
        torch.randn(rows, n, h, heads[2], device=device, dtype=dtype) for n, h in shapes
    )
    return layout, query, (others[0], others[1]), (others[2], others[3])


class Requested(TorchDispatchMode):
    """Counts the bytes that operations request of the CPU for what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        given = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and _place(one) not in given:
                self.bytes += one.untyped_storage().nbytes()
        return made


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class DenseAttention(SdpaAttention):
    """What flex attention does where it is not compiled."""

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Any) -> Tensor:
        pairs = zip(context, own, strict=True)
        groups = query.shape[2] // own[0].shape[2]
        key, value = (torch.cat(pair, 1).repeat_interleave(groups, 2) for pair in pairs)
        scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (shares @ value.transpose(1, 2)).transpose(1, 2)


def test_bounds_are_those_worked_out_by_hand():
    _, query, context, own = case(rows=1, length=24, num_anchors=1, heads=(4, 2, 16))
    query = query.bfloat16()
    # 8 queries and 24 + 8 keys of 4 heads: query, output, key and value are 5,120 numbers of 4
    # bytes, twice; 2 numbers of 4 bytes for each of 32 queries; and for 512 programs the output of
    # 8 queries of the 2 heads that share a key, 16 numbers of 4 bytes each.
    assert most_without_scores(query, context, own) == 5120 * 4 * 2 + 256 + 512 * 8 * 2 * 16 * 4
    assert bytes_of_scores(query, context, own) == 4 * 8 * 32 * 2


@pytest.mark.parametrize(("attention", "dense"), [(DenseAttention, True), (SdpaAttention, False)])
def test_attention_that_holds_its_scores_is_found(attention: type[SdpaAttention], dense: bool):
    layout, query, context, own = case(rows=1, length=512, num_anchors=64, heads=(8, 4, 8))
    counted = Requested()
    metered = MeteredAttention(attention(), lambda: counted.bytes)
    (mask,) = metered.masks(layout, RULES).values()
    with torch.no_grad(), counted:
        out = metered.attend(query, context, own, mask)
    assert out.shape == query.shape
    assert (metered.found.share > 1) == dense, str(metered.found)


def test_forward_that_took_most_of_what_it_may_is_kept():
    counted = Requested()
    whole = MeteredAttention(DenseAttention(), lambda: counted.bytes)
    shares = []
    for num_anchors in (32, 2, 16):
        layout, query, context, own = case(1, 128, num_anchors, (4, 4, 8))
        alone = MeteredAttention(DenseAttention(), lambda: counted.bytes)
        for metered in (whole, alone):
            (mask,) = metered.masks(layout, RULES).values()
            with torch.no_grad(), counted:
                metered.attend(query, context, own, mask)
        shares.append(alone.found.share)
    assert whole.found.share == max(shares) > min(shares)


def test_allocator_that_counts_nothing_is_told_once_and_measures_nothing():
    """As cudaMallocAsync: 0 bytes would pass for an attention that is never dense."""
    told: list[str] = []
    with closing(CompileGate(GateSettings(compile=False), report=told.append)) as gate:
        for _ in range(2):
            assert worst_attention(gate, [Taken(0, 4000, 300), Taken(0, 8000, 600)]) is None
        assert len(told) == 1
        assert told[0].startswith("whether attention runs dense could not be measured: ")
        measured = [Taken(10, 4000, 300), Taken(50, 4000, 300)]
        assert worst_attention(gate, measured) == measured[1]
        assert worst_attention(gate, []) is None
    assert len(told) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize("kind", ["flex", "spans", "flex uncompiled"])
def test_of_the_attentions_on_a_gpu_only_the_uncompiled_one_is_found(
    kind: str, heads: tuple[int, int, int]
):
    layout, query, context, own = case(2, 1536, 256, heads, "cuda")
    leaves = [one.requires_grad_() for one in (query, *context, *own)]
    with closing(CompileGate(GateSettings())) as gate, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        makers: dict[str, Attention] = {
            "flex": FlexAttention(gate),
            "spans": SpanAttention(gate),
            "flex uncompiled": FlexAttention(None),
        }
        metered = MeteredAttention(makers[kind], meter_of(query.device))
        with gate.trace():
            (mask,) = metered.masks(layout, RULES).values()
            makers[kind].attend(query, context, own, mask).sum().backward()  # compiles
            for one in leaves:
                one.grad = None
            metered.attend(query, context, own, mask)
    assert metered.found.taken >= query.numel() * query.element_size(), str(metered.found)
    assert (metered.found.share > 1) == (kind == "flex uncompiled"), str(metered.found)
