"""The Triton kernels on a CPU, by Triton's own interpreter: ``make kernels``."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trainer.model import row_scaled, scaled_head, target_layers
from trainer.model.attention import SdpaAttention
from trainer.model.attention_proof import prove_spans
from trainer.model.draft import DraftConfig
from trainer.model.logits import Score, padded, score
from trainer.model.masks import BlockLayout, MaskRule
from trainer.model.spans import Spans, span_tensors

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter: make kernels"
    ),
]

# Blocks that divide a tile of 64 and that do not, a window, one document and several, few tokens.
CASES = [
    (16, 8, 128, MaskRule(16), 1),
    (10, 7, 100, MaskRule(10, causal=True), 2),
    (8, 9, 77, MaskRule(8, window=24), 3),
    (4, 5, 33, MaskRule(4, window=8, causal=True), 1),
    (16, 6, 64, MaskRule(16), 4),
]


def _layout(num_anchors: int, length: int, num_documents: int) -> BlockLayout:
    """Two rows of equal documents; the last anchor of the second row is padding."""
    each, draw = length // num_documents, torch.Generator().manual_seed(3)
    places = torch.arange(length)
    anchors = torch.stack(
        [torch.randperm(each * num_documents, generator=draw)[:num_anchors] for _ in range(2)]
    )
    anchors = anchors.sort().values
    keep = torch.ones_like(anchors, dtype=torch.bool)
    anchors[1, -1], keep[1, -1] = 0, False
    return BlockLayout.of(anchors, keep, (places // each)[None].expand(2, -1).int())


@pytest.mark.parametrize(("size", "num_anchors", "length", "rule", "num_documents"), CASES)
def test_attention_over_spans_and_its_gradients_are_those_of_dense_attention(
    size: int, num_anchors: int, length: int, rule: MaskRule, num_documents: int
):
    from trainer.model.span_kernels import span_attention  # noqa: PLC0415 - needs Triton

    torch.manual_seed(0)
    layout = _layout(num_anchors, length, num_documents)
    count = num_anchors * size
    shapes = [(2, count, 4, 16), *[(2, n, 2, 16) for n in (length, length, count, count)]]
    query, key, value, own_key, own_value = (torch.randn(s, requires_grad=True) for s in shapes)
    inputs, upstream = (query, key, value, own_key, own_value), torch.randn(shapes[0])
    spans = Spans(size, rule.causal, *span_tensors(layout, rule))
    dense = SdpaAttention()
    mask = dense.masks(layout, {"": rule})[""]
    ours = span_attention(query, (key, value), (own_key, own_value), spans)
    wanted = dense.attend(query, (key, value), (own_key, own_value), mask)
    pairs = [(out, *torch.autograd.grad(out, inputs, upstream)) for out in (ours, wanted)]
    for ours, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


def test_the_proof_at_the_start_passes(draft_config: Callable[..., DraftConfig]):
    from trainer.model.span_kernels import span_attention  # noqa: PLC0415 - needs Triton

    config = draft_config(head_dim=16, block_size=4)
    assert prove_spans(span_attention, config, torch.device("cpu")) < 1e-5


@pytest.mark.parametrize("num_columns", [7, 2049])
def test_score_and_slope_are_those_of_cross_entropy(num_columns: int):
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    torch.manual_seed(0)
    logits = torch.randn(3, num_columns)
    labels, weights = torch.tensor([0, 5, 6]), torch.tensor([1.0, 0.0, 0.5])
    wide = logits.double()
    entropy, total, best = head_kernels.score(logits, labels)
    torch.testing.assert_close(entropy.double(), F.cross_entropy(wide, labels, reduction="none"))
    assert torch.equal(best, logits.argmax(-1))
    wanted = (wide.softmax(-1) - F.one_hot(labels, num_columns)) * weights[:, None]
    made = head_kernels.slope(logits, total, labels, weights)
    torch.testing.assert_close(made.double(), wanted, atol=1e-6, rtol=1e-4)


def _near_in_fp8(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter cuts off, and loses a carry, where a GPU rounds to e4m3: a factor of 2."""
    ours, right = found.float(), wanted.float()
    small = 2.0**-8
    assert torch.all((ours - right).abs() <= 0.5 * right.abs() + small)
    assert torch.equal(ours.sign()[right.abs() > small], right.sign()[right.abs() > small])


@pytest.mark.parametrize("width", [16, 80])
def test_rows_are_scaled_as_by_plain_torch(width: int):
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    torch.manual_seed(0)
    x = torch.randn(5, width).bfloat16()
    x[2] = 0
    values, scales = head_kernels.scale_rows(x)
    wanted, plain = row_scaled.scale_rows(x)
    _near_in_fp8(values, wanted)
    wide = x.float() / plain
    fit = wide.square().sum(1) / (wide * values.float()).sum(1)  # of its own rounding
    torch.testing.assert_close(scales[:, 0], plain[:, 0] * fit.nan_to_num(1.0))


@pytest.mark.parametrize("num_columns", [7, 4096, 4099])
def test_shares_and_the_labels_part_are_those_of_plain_torch(num_columns: int):
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    torch.manual_seed(0)
    memory = (torch.randn(5, padded(num_columns)) * 3).bfloat16()
    memory[:, num_columns:] = torch.inf  # what stands behind the logits is never read
    logits = memory[:, :num_columns]
    labels = torch.tensor([0, 5, 6, num_columns - 1, 3])
    logits[3, -1] = 30.0  # nearly sure, and right
    weights, found = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0]), score(logits, labels)
    read = Score(*head_kernels.score(logits, labels))
    ours = torch.full(memory.shape, 9.0).to(torch.float8_e4m3fn)
    wanted = ours.clone()
    scales = head_kernels.shares(logits, read, labels, weights, ours)
    wanted_scales = scaled_head.shares(logits, found, labels, weights, wanted)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-4, atol=0)
    _near_in_fp8(ours, wanted)
    assert not ours.float()[:, num_columns:].any()
    assert not ours.float()[range(5), labels].any()
    head, grad = torch.randn(num_columns, 48).bfloat16(), torch.randn(5, 48)
    added = grad.clone()
    head_kernels.add_label(grad, head, found.entropy, labels, weights)
    scaled_head.add_label(added, head, found.entropy, labels, weights)
    torch.testing.assert_close(grad, added, rtol=1e-5, atol=1e-6)


def test_convolution_before_a_delta_rule_is_the_plain_one():
    from trainer.model import delta_kernels  # noqa: PLC0415 - needs Triton

    torch.manual_seed(0)
    norm = target_layers.Norm(1e-6)
    sizes = target_layers.DeltaSizes(2, 3, 16, 16, norm, norm)
    x, kernel = torch.randn(21, 7 * 16 + 5)[:, : 7 * 16], torch.randn(7 * 16, 4)
    position = torch.cat([torch.arange(n) for n in (9, 1, 2, 9)]).int()
    found = delta_kernels.convolve_heads(x, position, kernel, sizes)
    wanted = target_layers.convolve_heads(sizes)(x, position, kernel)
    for one, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, plain, atol=2e-6, rtol=2e-6)
