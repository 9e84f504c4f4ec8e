"""Backends against a plain softmax and against each other."""

import threading
from contextlib import closing

import pytest
import torch
from torch import Tensor

from trainer.compile_gate import CompileGate, GateSettings
from trainer.model.attention import FlexAttention, SdpaAttention
from trainer.model.masks import BlockLayout, MaskRule, dense_mask

RULES = {
    "full_attention": MaskRule(4),
    "sliding_attention": MaskRule(4, window=20, causal=True),
}


def random_case(length: int = 150, num_anchors: int = 37, device: str = "cpu"):
    torch.manual_seed(0)
    split = length // 2
    documents = torch.arange(length) // split
    positions = torch.arange(length) % split
    anchors = torch.randperm(length)[:num_anchors].sort().values
    anchors[-2:] = 0
    keep = torch.ones(num_anchors, dtype=torch.bool)
    keep[-2:] = False
    layout = BlockLayout.of(
        *(t[None].expand(2, -1).to(device) for t in (anchors, keep, documents.int(), positions))
    )
    queries = num_anchors * 4
    shape = (2, 2, length + queries, 16)
    query = torch.randn(2, 6, queries, 16, device=device, requires_grad=True)
    key = torch.randn(shape, device=device, requires_grad=True)
    value = torch.randn(shape, device=device, requires_grad=True)
    return layout, query, key, value


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (t.repeat_interleave(3, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / 16**0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("kind", RULES)
def test_sdpa_equals_a_plain_softmax(kind: str):
    layout, query, key, value = random_case()
    backend = SdpaAttention()
    found = backend.attend(query, key, value, backend.masks(layout, RULES)[kind])
    wanted = eager(query, key, value, dense_mask(layout, RULES[kind]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("length", [128, 150])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_sdpa(kind: str, length: int):
    layout, *inputs = random_case(length)
    query, key, value = (t.detach() for t in inputs)  # flex has no backward on a CPU
    flex, sdpa = FlexAttention(None), SdpaAttention()
    found = flex.attend(query, key, value, flex.masks(layout, RULES)[kind])
    wanted = sdpa.attend(query, key, value, sdpa.masks(layout, RULES)[kind])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", RULES)
def test_compiled_flex_and_its_gradients_equal_sdpa_on_a_gpu(kind: str):
    layout, *inputs = random_case(device="cuda")
    results = []
    for backend in (FlexAttention(CompileGate(GateSettings())), SdpaAttention()):
        found = backend.attend(*inputs, backend.masks(layout, RULES)[kind])
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)


def test_a_mask_of_the_other_backend_is_refused():
    layout, query, key, value = random_case()
    masks = FlexAttention(None).masks(layout, RULES)
    with pytest.raises(TypeError, match="make masks with"):
        SdpaAttention().attend(query, key, value, masks["full_attention"])


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
