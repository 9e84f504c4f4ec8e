"""Attention backends of the draft: flex on CUDA, dense SDPA elsewhere and as the check.

A backend makes the masks of a batch and applies them; both see the same rule of model.masks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compile_gate import CompileGate
from trainer.model.masks import BlockLayout, MaskRule, block_mask, dense_mask

P = ParamSpec("P")
R = TypeVar("R")

Mask = Tensor | BlockMask


class Attention(Protocol):
    """What a draft layer needs of a backend."""

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one mask for each layer type in ``rules``."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Attend with grouped heads. Shapes: [R, H, Q, d], [R, K, T, d] twice -> [R, H, Q, d]."""
        ...

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn``, the draft's work around attention, compiled where attention is."""
        ...


class SdpaAttention:
    """Dense boolean mask: exact everywhere, memory of queries x keys."""

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return one boolean mask [R, 1, Q, T] for each layer type."""
        return {kind: dense_mask(layout, rule) for kind, rule in rules.items()}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Attend through scaled_dot_product_attention; a mask of None shows every key."""
        if isinstance(mask, BlockMask):
            raise TypeError("sdpa attention was given a flex BlockMask; make masks with .masks()")
        groups = query.shape[1] // key.shape[1]
        # The heads of a group become further queries of one key head: nothing is copied per head,
        # and on a CPU this takes three quarters of the time of enable_gqa.
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        repeated = None if mask is None else mask.repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=repeated)
        return out.reshape(query.shape)  # some kernels return another memory order

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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Attend through flex_attention; a mask of None shows every key."""
        out: Tensor = self._flex(query, key, value, block_mask=mask, enable_gqa=True)
        return out

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` compiled by the gate."""
        return fn if self._gate is None else self._gate.wrap(fn)
