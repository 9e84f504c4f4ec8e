"""Attention of the target over a packed row: every document by itself, with SDPA's own kernels.

Registered with transformers as the implementation ``NAME``. Outside ``packed_row`` it is SDPA with
the mask that transformers makes. Inside, no mask is made (a dense one has S x S entries and shuts
the fast kernels out) and each document is a call of its own: no key of another document exists in
it, and no padding either.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_packed"

_row = threading.local()  # of the thread whose forward this is


@contextmanager
def packed_row(lengths: Sequence[int]) -> Iterator[None]:
    """Let the forward of this thread see one row as documents of these lengths, one after another.

    The model must use the implementation ``NAME``, no cache and no mask.
    """
    _row.lengths = list(lengths)
    try:
        yield
    finally:
        _row.lengths = None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Shapes: query [R, H, S, d], key and value [R, G, S, d] -> [R, S, H, d]."""
    lengths = getattr(_row, "lengths", None)
    if lengths is None:
        found: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )[0]
        return found, None
    pieces = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
    parts = [sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in pieces]
    return torch.cat(parts, 1), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    if getattr(_row, "lengths", None) is not None:
        return None
    made: Tensor | None = sdpa_mask(*args, **options)
    return made


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
