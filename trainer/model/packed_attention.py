"""Attention of the target over a packed row: every document by itself, with torch's own kernels.

Registered with transformers as the implementation ``NAME``. Outside ``packed_row`` it is SDPA with
the mask that transformers makes. Inside, no mask is made (a dense one has S x S entries and shuts
the fast kernels out): a kernel that is told where documents begin takes the row, where there is
one, else each document is a call of SDPA's.
"""

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_packed"
_MAX_HEAD_DIM = 256  # of the flash kernel

_row = threading.local()  # of the thread whose forward this is


@contextmanager
def packed_row(lengths: Sequence[int]) -> Iterator[None]:
    """Let the forward of this thread see one row as documents of these lengths, one after another.

    The model must use the implementation ``NAME``, no cache and no mask.
    """
    _row.lengths, _row.boundaries = list(lengths), None
    try:
        yield
    finally:
        _row.lengths = _row.boundaries = None


def boundaries_of(lengths: Sequence[int]) -> Tensor:
    """Return where documents begin and the last one ends. Shapes: [documents + 1] int32."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def takes_boundaries(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether ``attend_within`` takes these; their last dimension is that of a head."""
    dim = query.shape[-1]
    return (
        _VARLEN is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim == key.shape[-1] == value.shape[-1]
        and dim % 8 == 0
        and dim <= _MAX_HEAD_DIM
    )


def attend_within(
    heads: Sequence[Tensor], boundaries: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Attend causally within documents. Shapes: query [T, H, d], key and value [T, G, d] -> query.

    SDPA would take cuDNN's kernel on Hopper, which plans anew for every length of a document.
    """
    assert _VARLEN is not None  # noqa: S101 - takes_boundaries has looked
    out: Tensor = _VARLEN(*heads, boundaries, boundaries, longest, longest, scale=scale)
    return out


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
    if takes_boundaries(query, key, value) and not options.get("dropout"):
        if _row.boundaries is None:
            _row.boundaries = boundaries_of(lengths).to(query.device)
        heads = [x[0].transpose(0, 1) for x in (query, key, value)]
        scale = options.get("scaling")
        return attend_within(heads, _row.boundaries, max(lengths), scale)[None], None
    pieces = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
    parts = [sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in pieces]
    return torch.cat(parts, 1), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    if getattr(_row, "lengths", None) is not None:
        return None
    made: Tensor | None = sdpa_mask(*args, **options)
    return made


def _varlen_attention() -> Callable[..., Any] | None:
    """Return torch's attention with boundaries, causal and with grouped heads, where it has one."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every build
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    # Up to torch 2.11 grouped heads need no word.
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    return functools.partial(varlen_attn, window_size=(-1, 0), **options)


_VARLEN = _varlen_attention()

AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
