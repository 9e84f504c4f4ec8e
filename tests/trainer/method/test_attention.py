"""Backends against a plain softmax and against each other."""

import threading
from contextlib import closing

import pytest
import torch
from torch import Tensor

from trainer.compile_gate import CompileGate, GateSettings
from trainer.model.attention import FlexAttention, KeyValue, SdpaAttention, SpanAttention
from trainer.model.masks import BlockLayout, MaskRule, dense_mask

RULES = {
    "full_attention": MaskRule(4),
    "sliding_attention": MaskRule(4, window=20, causal=True),
}


def random_case(length: int = 150, num_anchors: int = 37, device: str = "cpu"):
    """Layout, query, and keys and values of the context and of the blocks."""
    torch.manual_seed(0)
    split = length // 2
    documents = torch.arange(length) // split
    anchors = torch.randperm(length)[:num_anchors].sort().values
    anchors[-2:] = 0
    keep = torch.ones(num_anchors, dtype=torch.bool)
    keep[-2:] = False
    layout = BlockLayout.of(
        *(t[None].expand(2, -1).to(device) for t in (anchors, keep, documents.int()))
    )
    queries = num_anchors * 4
    shapes = [(2, queries, 6, 16)] + [(2, n, 2, 16) for n in (length, length, queries, queries)]
    query, *others = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
    return layout, query, tuple(others[:2]), tuple(others[2:])


def eager(query: Tensor, context: KeyValue, own: KeyValue, mask: Tensor) -> Tensor:
    pairs = zip(context, own, strict=True)
    key, value = (torch.cat(pair, 1).repeat_interleave(3, 2).transpose(1, 2) for pair in pairs)
    scores = query.transpose(1, 2) @ key.transpose(-1, -2) / 16**0.5
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kind", RULES)
def test_sdpa_equals_a_plain_softmax(kind: str):
    layout, *inputs = random_case()
    backend = SdpaAttention()
    found = backend.attend(*inputs, backend.masks(layout, RULES)[kind])
    wanted = eager(*inputs, dense_mask(layout, RULES[kind]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("length", [128, 150])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_sdpa(kind: str, length: int):
    layout, query, context, own = random_case(length)
    for one in (query, *context, *own):
        one.requires_grad_(requires_grad=False)  # flex has no backward on a CPU
    results = [
        backend.attend(query, context, own, backend.masks(layout, RULES)[kind])
        for backend in (FlexAttention(None), SdpaAttention())
    ]
    found, wanted = results
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("kernels", [FlexAttention, SpanAttention])
def test_kernels_and_their_gradients_equal_sdpa_on_a_gpu(kind: str, kernels: type):
    layout, query, context, own = random_case(device="cuda")
    results = []
    with closing(CompileGate(GateSettings())) as gate:
        for backend in (kernels(gate), SdpaAttention()):
            with gate.trace():  # it may compile
                found = backend.attend(query, context, own, backend.masks(layout, RULES)[kind])
                gradients = torch.autograd.grad(found.square().sum(), (query, *context, *own))
            results.append((found, *gradients))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)


def test_a_mask_of_the_other_backend_is_refused():
    layout, *inputs = random_case()
    masks = FlexAttention(None).masks(layout, RULES)
    with pytest.raises(TypeError, match="make masks with"):
        SdpaAttention().attend(*inputs, masks["full_attention"])


def test_a_thread_waits_for_the_gate_before_it_builds_block_masks():
    layout, *_ = random_case()
    with closing(CompileGate(GateSettings())) as gate:
        backend = FlexAttention(gate)
        builder = threading.Thread(target=backend.masks, args=(layout, RULES))
        with gate.mask():
            builder.start()
            builder.join(0.5)  # building takes milliseconds
            assert builder.is_alive()
        builder.join(20)
        assert not builder.is_alive()
