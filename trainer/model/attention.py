"""Attention backends of the draft: Triton kernels or flex on CUDA, dense SDPA elsewhere.

A backend makes the masks of a batch and applies them; all see the same rule of model.masks. Keys
and values of the context and of the blocks come apart: only some backends have to join them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compile_gate import CompileGate
from trainer.model.masks import BlockLayout, MaskRule, block_mask, dense_mask
from trainer.model.spans import Spans, span_tensors

P = ParamSpec("P")
R = TypeVar("R")

Mask = Tensor | BlockMask | Spans
KeyValue = tuple[Tensor, Tensor]


class Attention(Protocol):
    """What a draft layer needs of a backend."""

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one mask for each layer type in ``rules``."""
        ...

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend with grouped heads to the context and to the blocks.

        Shapes: query [R, Q, H, d], context keys and values [R, S, K, d], own [R, Q, K, d] ->
        [R, Q, H, d].
        """
        ...

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn``, the draft's work around attention, compiled where attention is."""
        ...


class SdpaAttention:
    """Dense boolean mask: exact everywhere, memory of queries x keys."""

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one boolean mask [R, 1, Q, S + Q] for each layer type."""
        return {kind: dense_mask(layout, rule) for kind, rule in rules.items()}

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend through scaled_dot_product_attention. Shapes: as Attention.attend.

        Raises: TypeError for a mask of another attention.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"sdpa was given a {type(mask).__name__}; make masks with .masks()")
        query, (key, value) = query.transpose(1, 2), _joined(context, own)
        groups = query.shape[1] // key.shape[1]
        # The heads of a group become further queries of one key head: nothing is copied per head,
        # and on a CPU this takes three quarters of the time of enable_gqa.
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        repeated = mask.repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=repeated)
        return out.reshape(query.shape).transpose(1, 2)  # kernels differ in their memory order

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` as it is."""
        return fn


class FlexAttention:
    """Block-sparse flex_attention.

    gate: compiles, and lets one thread at a time build masks; None runs flex uncompiled, which is
    dense in memory, has no backward on CPU and is meant for checks in one thread.
    """

    def __init__(self, gate: CompileGate | None) -> None:
        plain: Any = flex_attention
        self._gate = gate
        self._flex: Callable[..., Any] = plain if gate is None else gate.wrap(plain)

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one BlockMask for each layer type."""
        with nullcontext() if self._gate is None else self._gate.mask():
            return {kind: block_mask(layout, rule) for kind, rule in rules.items()}

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend through flex_attention. Shapes: as Attention.attend."""
        query, (key, value) = query.transpose(1, 2), _joined(context, own)
        out: Tensor = self._flex(query, key, value, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` compiled by the gate."""
        return fn if self._gate is None else self._gate.wrap(fn)


class SpanAttention:
    """Triton kernels for exactly this mask (model.span_kernels): CUDA only.

    Nothing of it is traced; what lies around it is compiled by ``gate``.
    """

    def __init__(self, gate: CompileGate) -> None:
        from trainer.model.span_kernels import span_attention  # noqa: PLC0415 - needs Triton

        self._gate, self._attend = gate, span_attention
        self._tensors = gate.wrap(span_tensors)

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one Spans for each layer type."""
        with torch.no_grad():
            return {
                kind: Spans(rule.block_size, rule.causal, *self._tensors(layout, rule))
                for kind, rule in rules.items()
            }

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend through the kernels. Shapes: as Attention.attend.

        Raises: TypeError for a mask of another attention.
        """
        if not isinstance(mask, Spans):
            raise TypeError(f"spans were given a {type(mask).__name__}; make masks with .masks()")
        return self._attend(query, context, own, mask)

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` compiled by the gate."""
        return self._gate.wrap(fn)


def _joined(context: KeyValue, own: KeyValue) -> KeyValue:
    """Return keys and values of both, heads first: [R, K, S + Q, d]."""
    key, value = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(context, own, strict=True))
    return key, value
