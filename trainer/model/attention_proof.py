"""The span kernels held against dense attention on the GPU at hand, before a run begins.

Compilers have made wrong code of sound kernels for some GPUs and versions; a draft trained with
wrong gradients looks like one that learns badly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TargetError
from trainer.model.attention import KeyValue, Mask, SdpaAttention
from trainer.model.draft_config import DraftConfig
from trainer.model.masks import BlockLayout, MaskRule, dense_mask
from trainer.model.spans import Spans, span_tensors

_LENGTH, _NUM_ANCHORS = 300, 21  # several tiles, the last ones not full
_LIMIT = 0.02  # relative; rounding to bf16 leaves 0.002 to 0.006
_NAMES = ("output", "queries", "context keys", "context values", "own keys", "own values")

Attend = Callable[[Tensor, KeyValue, KeyValue, Spans], Tensor]


def prove_spans(attend: Attend, config: DraftConfig, device: torch.device) -> float:
    """Compare ``attend`` and its gradients with dense attention in fp32; returns the worst.

    Takes the draft's heads and every rule of its layers, two documents and a padded anchor. Raises:
    TargetError naming what differs.
    """
    layout = _layout(device)
    count, dim = _NUM_ANCHORS * config.block_size, config.head_dim
    sizes = [(count, config.num_attention_heads)]
    sizes += [(n, config.num_key_value_heads) for n in (_LENGTH, _LENGTH, count, count)]
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, config.dtype)
    inputs = [torch.randn(1, n, h, dim, generator=draw).to(device, dtype) for n, h in sizes]
    upstream = torch.randn(1, *sizes[0], dim, generator=draw).to(device, dtype)
    worst = 0.0
    for kind, rule in config.rules.items():
        spans = Spans(rule.block_size, rule.causal, *span_tensors(layout, rule))
        ours = _with_gradients(attend, spans, inputs, upstream)
        wanted = _dense(layout, rule, inputs, upstream)
        for name, found, right in zip(_NAMES, ours, wanted, strict=True):
            difference = float((found.float() - right).norm() / right.norm())
            if not difference <= _LIMIT:
                what = name if name == "output" else f"gradient of the {name}"
                raise TargetError(
                    f"the span kernels give a wrong {what} in {kind} layers on {device}: it differs"
                    f" by {difference:.2g} of its size from dense attention (torch"
                    f" {torch.__version__}); set compile.attention to flex"
                )
            worst = max(worst, difference)
    return worst


def _layout(device: torch.device) -> BlockLayout:
    """One row of two documents; the last anchor is padding."""
    places = torch.arange(_LENGTH, device=device)
    anchors = torch.linspace(1, _LENGTH - 2, _NUM_ANCHORS, device=device).long()
    anchors[-1] = 0
    keep = torch.ones_like(anchors, dtype=torch.bool)
    keep[-1] = False
    return BlockLayout.of(anchors[None], keep[None], (places > _LENGTH // 3).int()[None])


def _dense(
    layout: BlockLayout, rule: MaskRule, inputs: Sequence[Tensor], upstream: Tensor
) -> list[Tensor]:
    wide = [x.float() for x in inputs]
    mask = dense_mask(layout, rule)
    return _with_gradients(SdpaAttention().attend, mask, wide, upstream.float())


def _with_gradients(
    attend: Callable[[Tensor, KeyValue, KeyValue, Any], Tensor],
    mask: Mask,
    inputs: Sequence[Tensor],
    upstream: Tensor,
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    query, key, value, own_key, own_value = leaves
    with torch.enable_grad():
        out = attend(query, (key, value), (own_key, own_value), mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
