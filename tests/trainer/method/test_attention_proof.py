"""The proof of the span kernels: it passes what is right, and names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.errors import TargetError
from trainer.model.attention import KeyValue, SdpaAttention
from trainer.model.attention_proof import prove_spans
from trainer.model.draft import DraftConfig
from trainer.model.spans import Spans

SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 40}


def as_spans_say(query: Tensor, context: KeyValue, own: KeyValue, spans: Spans) -> Tensor:
    """Dense attention over a mask made from the spans alone."""
    keys = torch.arange(context[0].shape[1])
    seen = (keys >= spans.low[..., None]) & (keys < spans.high[..., None])
    slots = torch.arange(query.shape[1])
    same = slots[:, None] // spans.block_size == slots // spans.block_size
    if spans.causal:
        same = same & (slots <= slots[:, None])
    mask = torch.cat((seen, same.expand(len(seen), -1, -1)), -1)[:, None]
    return SdpaAttention().attend(query, context, own, mask)


class WrongGradient(torch.autograd.Function):
    """Passes a tensor on, and takes a third off the gradient of its last 64 tokens."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *upstream: Tensor) -> Tensor:
        grad = upstream[0].clone()
        grad[:, -64:] *= 0.67
        return grad


def test_right_attention_passes(draft_config: Callable[..., DraftConfig]):
    assert prove_spans(as_spans_say, draft_config(**SLIDING), torch.device("cpu")) < 1e-5


def test_wrong_gradient_of_a_few_keys_is_named(draft_config: Callable[..., DraftConfig]):
    def wrong(query: Tensor, context: KeyValue, own: KeyValue, spans: Spans) -> Tensor:
        key: Tensor = WrongGradient.apply(context[0])  # type: ignore[no-untyped-call]
        return as_spans_say(query, (key, context[1]), own, spans)

    with pytest.raises(TargetError, match="wrong gradient of the context keys in full_attention"):
        prove_spans(wrong, draft_config(**SLIDING), torch.device("cpu"))


def test_attention_that_forgets_the_causal_rule_is_named(draft_config: Callable[..., DraftConfig]):
    def wrong(query: Tensor, context: KeyValue, own: KeyValue, spans: Spans) -> Tensor:
        all_see = Spans(spans.block_size, False, spans.low, spans.high, spans.reach)
        return as_spans_say(query, context, own, all_see)

    with pytest.raises(TargetError, match="wrong output in sliding_attention layers on cpu"):
        prove_spans(wrong, draft_config(**SLIDING), torch.device("cpu"))


def test_numbers_that_are_not_finite_are_wrong(draft_config: Callable[..., DraftConfig]):
    def wrong(query: Tensor, context: KeyValue, own: KeyValue, spans: Spans) -> Tensor:
        return as_spans_say(query, context, own, spans) * torch.nan

    with pytest.raises(TargetError, match=r"set compile\.attention to flex"):
        prove_spans(wrong, draft_config(**SLIDING), torch.device("cpu"))
