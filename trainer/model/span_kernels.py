"""Attention of draft blocks as Triton kernels: a span of the context and the slot's own block.

A query sees the context keys ``low <= key < high`` and the keys of its own block, so a mask is two
numbers a query: no tile of it is stored, and only tiles at the ends of a span are masked at all.
Context and block keys stay apart and are never joined. Everything is deterministic: no atomics.
CUDA only; imported where used. Source of the algorithm: FlashAttention-2, arXiv 2307.08691.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.device import current_device
from trainer.errors import TargetError
from trainer.model.spans import KEY_GRADIENT, Spans, Tiles, why_no_spans

_LOG2_E = 1.4426950408889634

# Measured on an H200 with heads of 128 (docs/benchmarks.md).
FORWARD = Tiles(64, 64, 4, 3)
QUERY_GRADIENT = Tiles(64, 64, 4, 2)


def span_attention(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], spans: Spans
) -> Tensor:
    """Attend with grouped heads; differentiable in all five.

    Shapes: query [R, Q, H, d], context keys and values [R, S, K, d], own [R, Q, K, d] ->
    [R, Q, H, d]. Raises: TargetError for a d that spans.why_no_spans refuses.
    """
    refused = why_no_spans(query.shape[-1])
    if refused:
        raise TargetError(refused)
    apply: Any = _SpanAttention.apply  # torch gives it no types
    out: Tensor = apply(query, *context, *own, spans)
    return out


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        spans: Spans,
    ) -> Tensor:
        rows, count, heads, dim = query.shape
        out = query.new_empty(rows, count, heads, dim)
        lse = query.new_empty(rows, heads, count, dtype=torch.float32)
        tiles = FORWARD
        with current_device(query.device):
            _forward[(triton.cdiv(count, tiles.queries) * rows * heads,)](
                query, key, value, own_key, own_value, out, lse, spans.low, spans.high,
                *_strides(query, key, value, own_key, own_value, out),
                *_sizes(query, key), **_meta(spans, dim, tiles),
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, own_key, own_value, out, lse)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, out, lse = ctx.saved_tensors
        spans, (grad,) = ctx.spans, upstream
        rows, count, heads, dim = query.shape
        length, kv_heads = key.shape[1:3]
        made = [torch.empty_like(x) for x in (query, key, value, own_key, own_value)]
        d_query, d_key, d_value, d_own_key, d_own_value = made
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        delta = torch.empty_like(lse)
        sizes, tiles = _sizes(query, key), KEY_GRADIENT
        with current_device(query.device):
            _delta[(triton.cdiv(count, 64) * rows * heads,)](
                out, grad, delta, *_strides(out, grad), heads, count, DIM=dim, QUERIES=64
            )
            _key_gradient[(triton.cdiv(length, tiles.keys) * rows * kv_heads,)](
                query, key, value, grad, lse, delta, d_key, d_value,
                spans.low, spans.high, spans.reach,
                *_strides(query, key, value, grad, d_key, d_value),
                *sizes, **_meta(spans, dim, tiles),
            )  # fmt: skip
            _own_gradient[(triton.cdiv(count, tiles.keys) * rows * kv_heads,)](
                query, own_key, own_value, grad, lse, delta, d_own_key, d_own_value,
                *_strides(query, own_key, own_value, grad, d_own_key, d_own_value),
                *sizes, **_meta(spans, dim, tiles),
            )  # fmt: skip
            tiles = QUERY_GRADIENT
            _query_gradient[(triton.cdiv(count, tiles.queries) * rows * heads,)](
                query, key, value, own_key, own_value, grad, lse, delta, d_query,
                spans.low, spans.high,
                *_strides(query, key, value, own_key, own_value, grad, d_query),
                *sizes, **_meta(spans, dim, tiles),
            )  # fmt: skip
        return (*made, None)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of row, head and token of each."""
    return [x.stride(axis) for x in tensors for axis in (0, 2, 1)]


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int, float]:
    """Return heads, heads a group, queries, context keys, and the scale of scores in log2."""
    count, heads, dim = query.shape[1:]
    return heads, heads // key.shape[2], count, key.shape[1], _LOG2_E / dim**0.5


def _meta(spans: Spans, dim: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK": spans.block_size,
        "CAUSAL": spans.causal,
        "DIM": dim,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


# The kernels. Programs are numbered so that those with the most work of all heads start first.
# Everything with a mask of its own row reads 0 outside and writes nothing there.


@triton.jit
def _load_tile(base, tokens, count, step, DIM: tl.constexpr):
    dims = tl.arange(0, DIM)
    at = base + tokens[:, None].to(tl.int64) * step + dims[None, :]
    return tl.load(at, mask=(tokens < count)[:, None], other=0.0)


@triton.jit
def _store_tile(base, tokens, count, step, values, DIM: tl.constexpr):
    dims = tl.arange(0, DIM)
    at = base + tokens[:, None].to(tl.int64) * step + dims[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(tokens < count)[:, None])


@triton.jit
def _whole_blocks(tile, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the blocks begin and end that a tile of slots touches."""
    last = tl.minimum(tile * SIZE + SIZE, count) - 1
    return tile * SIZE // BLOCK * BLOCK, tl.minimum(last // BLOCK * BLOCK + BLOCK, count)


@triton.jit
def _own(queries, keys, count, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether a slot sees a key of the blocks; both broadcast."""
    seen = (queries // BLOCK == keys // BLOCK) & (keys < count)
    if CAUSAL:
        seen = seen & (keys <= queries)
    return seen


@triton.jit
def _attend_tile(q, k, v, seen, acc, top, total, scale, MASKED: tl.constexpr):
    """Take a tile of keys into the running softmax of a tile of queries; ``seen``: [q, keys].

    A query may see nothing of a tile, the first one included.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, -1e30)  # finite, so that no difference is NaN
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    p = tl.exp2(scores - higher[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, higher, total


@triton.jit
def _attend_own(
    acc, top, total, q, k_at, v_at, k_t, v_t, begin, end, queries, count, scale,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """``_attend_tile`` of tiles of the blocks' keys."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(k_at, keys, count, k_t, DIM)
        v = _load_tile(v_at, keys, count, v_t, DIM)
        seen = _own(queries[:, None], keys[None, :], count, BLOCK, CAUSAL)
        seen = seen | (queries >= count)[:, None]  # their sums, stored nowhere, are not zero then
        acc, top, total = _attend_tile(q, k, v, seen, acc, top, total, scale, True)
    return acc, top, total


@triton.jit
def _attend_context(
    acc, top, total, q, k_at, v_at, k_t, v_t, begin, end, low, high, length, scale,
    MASKED: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """``_attend_tile`` of tiles of context keys."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(k_at, keys, length, k_t, DIM)
        v = _load_tile(v_at, keys, length, v_t, DIM)
        seen = keys[None, :] < length
        if MASKED:
            seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        acc, top, total = _attend_tile(q, k, v, seen, acc, top, total, scale, MASKED)
    return acc, top, total


@triton.jit
def _span(low_at, high_at, queries, count, length, KEYS: tl.constexpr):
    """Return each query's span, and the ends of the keys that some and that all of them see."""
    inside = queries < count
    low = tl.load(low_at + queries, mask=inside, other=0)
    high = tl.load(high_at + queries, mask=inside, other=0)
    begin = tl.min(tl.where(high > low, low, length), 0) // KEYS * KEYS
    end = tl.max(high, 0)
    whole = tl.minimum((tl.max(low, 0) + KEYS - 1) // KEYS * KEYS, (end + KEYS - 1) // KEYS * KEYS)
    whole = tl.maximum(whole, begin)
    whole_end = tl.maximum(tl.min(high, 0) // KEYS * KEYS, whole)
    return low, high, begin, whole, whole_end, end


@triton.jit
def _forward(
    q_at, k_at, v_at, ok_at, ov_at, out_at, lse_at, low_at, high_at,
    q_r, q_h, q_t, k_r, k_h, k_t, v_r, v_h, v_t, ok_r, ok_h, ok_t, ov_r, ov_h, ov_t,
    out_r, out_h, out_t,
    heads, group, count, length, scale,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(count, QUERIES)
    num_heads = tl.num_programs(0) // num_tiles
    tile = num_tiles - 1 - tl.program_id(0) // num_heads  # late anchors see the most
    row = (tl.program_id(0) % num_heads // heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads % heads).to(tl.int64)
    kv = head // group
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    low, high, begin, whole, whole_end, end = _span(
        low_at + row * count, high_at + row * count, queries, count, length, KEYS
    )
    q = _load_tile(q_at + row * q_r + head * q_h, queries, count, q_t, DIM)
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)

    # Its own block first: every query sees a key of it, so ``top`` is finite from here on.
    k_at += row * k_r + kv * k_h
    v_at += row * v_r + kv * v_h
    ok_at += row * ok_r + kv * ok_h
    ov_at += row * ov_r + kv * ov_h
    first, last = _whole_blocks(tile, count, QUERIES, BLOCK)
    acc, top, total = _attend_own(
        acc, top, total, q, ok_at, ov_at, ok_t, ov_t, first, last, queries, count, scale,
        BLOCK, CAUSAL, DIM, KEYS,
    )  # fmt: skip
    acc, top, total = _attend_context(
        acc, top, total, q, k_at, v_at, k_t, v_t, begin, whole, low, high, length, scale,
        True, DIM, KEYS,
    )  # fmt: skip
    acc, top, total = _attend_context(
        acc, top, total, q, k_at, v_at, k_t, v_t, whole, whole_end, low, high, length, scale,
        False, DIM, KEYS,
    )  # fmt: skip
    acc, top, total = _attend_context(
        acc, top, total, q, k_at, v_at, k_t, v_t, whole_end, end, low, high, length, scale,
        True, DIM, KEYS,
    )  # fmt: skip

    acc = acc / total[:, None]
    _store_tile(out_at + row * out_r + head * out_h, queries, count, out_t, acc, DIM)
    at = lse_at + (row * heads + head) * count + queries
    tl.store(at, top + tl.log2(total), mask=queries < count)


@triton.jit
def _delta(
    out_at, grad_at, delta_at, out_r, out_h, out_t, grad_r, grad_h, grad_t, heads, count,
    DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(count, QUERIES)
    tile, number = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    row, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    out = _load_tile(out_at + row * out_r + head * out_h, queries, count, out_t, DIM)
    grad = _load_tile(grad_at + row * grad_r + head * grad_h, queries, count, grad_t, DIM)
    made = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_at + (row * heads + head) * count + queries, made, mask=queries < count)


@triton.jit
def _key_tile(
    q_at, grad_at, lse_at, delta_at, q_t, grad_t, queries, count, k, v, seen, d_k, d_v, scale,
    MASKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Add what a tile of queries gives to the gradients of a tile of keys; ``seen``: [keys, q]."""
    q = _load_tile(q_at, queries, count, q_t, DIM)
    grad = _load_tile(grad_at, queries, count, grad_t, DIM)
    inside = queries < count
    lse = tl.load(lse_at + queries, mask=inside, other=float("inf"))
    delta = tl.load(delta_at + queries, mask=inside, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    p = tl.exp2(scores - lse[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    d_v = tl.dot(p.to(grad.dtype), grad, d_v, input_precision="ieee")
    d_p = tl.dot(v, tl.trans(grad), input_precision="ieee")
    d_s = p * (d_p - delta[None, :])
    d_k = tl.dot(d_s.to(q.dtype), q, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit
def _key_tiles(
    d_k, d_v, k, v, keys, q_at, grad_at, lse_at, delta_at, low_at, high_at, q_t, grad_t,
    first, end, count, scale, MASKED: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """``_key_tile`` of the numbered tiles of queries, for a tile of context keys."""
    for number in range(first, end):
        queries = number * QUERIES + tl.arange(0, QUERIES)
        seen = queries[None, :] < count
        if MASKED:
            low = tl.load(low_at + queries, mask=queries < count, other=0)
            high = tl.load(high_at + queries, mask=queries < count, other=0)
            seen = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
        d_k, d_v = _key_tile(
            q_at, grad_at, lse_at, delta_at, q_t, grad_t, queries, count,
            k, v, seen, d_k, d_v, scale, MASKED, DIM,
        )  # fmt: skip
    return d_k, d_v


@triton.jit
def _key_gradient(
    q_at, k_at, v_at, grad_at, lse_at, delta_at, d_k_at, d_v_at, low_at, high_at, reach_at,
    q_r, q_h, q_t, k_r, k_h, k_t, v_r, v_h, v_t, grad_r, grad_h, grad_t,
    d_k_r, d_k_h, d_k_t, d_v_r, d_v_h, d_v_t,
    heads, group, count, length, scale,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(length, KEYS)
    num_heads = tl.num_programs(0) // num_tiles
    tile = tl.program_id(0) // num_heads  # early keys are seen by the most
    kv_heads = heads // group
    row = (tl.program_id(0) % num_heads // kv_heads).to(tl.int64)
    kv = (tl.program_id(0) % num_heads % kv_heads).to(tl.int64)
    keys = tile * KEYS + tl.arange(0, KEYS)
    k = _load_tile(k_at + row * k_r + kv * k_h, keys, length, k_t, DIM)
    v = _load_tile(v_at + row * v_r + kv * v_h, keys, length, v_t, DIM)
    d_k = tl.zeros((KEYS, DIM), tl.float32)
    d_v = tl.zeros((KEYS, DIM), tl.float32)
    reach_at += (row * num_tiles + tile) * 4
    first, first_whole = tl.load(reach_at), tl.load(reach_at + 1)
    end_whole, end = tl.load(reach_at + 2), tl.load(reach_at + 3)
    low_at += row * count
    high_at += row * count
    for member in range(group):
        head = kv * group + member
        q_one, grad_one = q_at + row * q_r + head * q_h, grad_at + row * grad_r + head * grad_h
        at = (row * heads + head) * count
        d_k, d_v = _key_tiles(
            d_k, d_v, k, v, keys, q_one, grad_one, lse_at + at, delta_at + at, low_at, high_at,
            q_t, grad_t, first, first_whole, count, scale, True, DIM, QUERIES,
        )  # fmt: skip
        d_k, d_v = _key_tiles(
            d_k, d_v, k, v, keys, q_one, grad_one, lse_at + at, delta_at + at, low_at, high_at,
            q_t, grad_t, first_whole, end_whole, count, scale, False, DIM, QUERIES,
        )  # fmt: skip
        d_k, d_v = _key_tiles(
            d_k, d_v, k, v, keys, q_one, grad_one, lse_at + at, delta_at + at, low_at, high_at,
            q_t, grad_t, end_whole, end, count, scale, True, DIM, QUERIES,
        )  # fmt: skip
    d_k = d_k * (scale / 1.4426950408889634)
    _store_tile(d_k_at + row * d_k_r + kv * d_k_h, keys, length, d_k_t, d_k, DIM)
    _store_tile(d_v_at + row * d_v_r + kv * d_v_h, keys, length, d_v_t, d_v, DIM)


@triton.jit
def _own_gradient(
    q_at, k_at, v_at, grad_at, lse_at, delta_at, d_k_at, d_v_at,
    q_r, q_h, q_t, k_r, k_h, k_t, v_r, v_h, v_t, grad_r, grad_h, grad_t,
    d_k_r, d_k_h, d_k_t, d_v_r, d_v_h, d_v_t,
    heads, group, count, length, scale,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(count, KEYS)
    kv_heads = heads // group
    tile, number = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    row, kv = (number // kv_heads).to(tl.int64), (number % kv_heads).to(tl.int64)
    keys = tile * KEYS + tl.arange(0, KEYS)
    k = _load_tile(k_at + row * k_r + kv * k_h, keys, count, k_t, DIM)
    v = _load_tile(v_at + row * v_r + kv * v_h, keys, count, v_t, DIM)
    d_k = tl.zeros((KEYS, DIM), tl.float32)
    d_v = tl.zeros((KEYS, DIM), tl.float32)
    first, last = _whole_blocks(tile, count, KEYS, BLOCK)
    for member in range(group):
        head = kv * group + member
        q_one, grad_one = q_at + row * q_r + head * q_h, grad_at + row * grad_r + head * grad_h
        at = (row * heads + head) * count
        for start in range(first, last, QUERIES):
            queries = start + tl.arange(0, QUERIES)
            seen = _own(queries[None, :], keys[:, None], count, BLOCK, CAUSAL)
            d_k, d_v = _key_tile(
                q_one, grad_one, lse_at + at, delta_at + at, q_t, grad_t, queries, count,
                k, v, seen, d_k, d_v, scale, True, DIM,
            )  # fmt: skip
    d_k = d_k * (scale / 1.4426950408889634)
    _store_tile(d_k_at + row * d_k_r + kv * d_k_h, keys, count, d_k_t, d_k, DIM)
    _store_tile(d_v_at + row * d_v_r + kv * d_v_h, keys, count, d_v_t, d_v, DIM)


@triton.jit
def _query_tile(q, grad, k, v, seen, lse, delta, d_q, scale, MASKED: tl.constexpr):
    """Add what a tile of keys gives to the gradient of a tile of queries; ``seen``: [q, keys]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.exp2(scores - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    d_p = tl.dot(grad, tl.trans(v), input_precision="ieee")
    d_s = p * (d_p - delta[:, None])
    return tl.dot(d_s.to(k.dtype), k, d_q, input_precision="ieee")


@triton.jit
def _query_tiles(
    d_q, q, grad, lse, delta, k_at, v_at, k_t, v_t, begin, end, low, high, length, scale,
    MASKED: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """``_query_tile`` of tiles of context keys."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(k_at, keys, length, k_t, DIM)
        v = _load_tile(v_at, keys, length, v_t, DIM)
        seen = keys[None, :] < length
        if MASKED:
            seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        d_q = _query_tile(q, grad, k, v, seen, lse, delta, d_q, scale, MASKED)
    return d_q


@triton.jit
def _query_gradient(
    q_at, k_at, v_at, ok_at, ov_at, grad_at, lse_at, delta_at, d_q_at, low_at, high_at,
    q_r, q_h, q_t, k_r, k_h, k_t, v_r, v_h, v_t, ok_r, ok_h, ok_t, ov_r, ov_h, ov_t,
    grad_r, grad_h, grad_t, d_q_r, d_q_h, d_q_t,
    heads, group, count, length, scale,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(count, QUERIES)
    num_heads = tl.num_programs(0) // num_tiles
    tile = num_tiles - 1 - tl.program_id(0) // num_heads
    row = (tl.program_id(0) % num_heads // heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads % heads).to(tl.int64)
    kv = head // group
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    low, high, begin, whole, whole_end, end = _span(
        low_at + row * count, high_at + row * count, queries, count, length, KEYS
    )
    q = _load_tile(q_at + row * q_r + head * q_h, queries, count, q_t, DIM)
    grad = _load_tile(grad_at + row * grad_r + head * grad_h, queries, count, grad_t, DIM)
    at = (row * heads + head) * count + queries
    lse = tl.load(lse_at + at, mask=queries < count, other=float("inf"))
    delta = tl.load(delta_at + at, mask=queries < count, other=0.0)
    d_q = tl.zeros((QUERIES, DIM), tl.float32)
    k_at += row * k_r + kv * k_h
    v_at += row * v_r + kv * v_h
    ok_at += row * ok_r + kv * ok_h
    ov_at += row * ov_r + kv * ov_h
    first, last = _whole_blocks(tile, count, QUERIES, BLOCK)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(ok_at, keys, count, ok_t, DIM)
        v = _load_tile(ov_at, keys, count, ov_t, DIM)
        seen = _own(queries[:, None], keys[None, :], count, BLOCK, CAUSAL)
        d_q = _query_tile(q, grad, k, v, seen, lse, delta, d_q, scale, True)
    d_q = _query_tiles(
        d_q, q, grad, lse, delta, k_at, v_at, k_t, v_t, begin, whole, low, high, length, scale,
        True, DIM, KEYS,
    )  # fmt: skip
    d_q = _query_tiles(
        d_q, q, grad, lse, delta, k_at, v_at, k_t, v_t, whole, whole_end, low, high, length, scale,
        False, DIM, KEYS,
    )  # fmt: skip
    d_q = _query_tiles(
        d_q, q, grad, lse, delta, k_at, v_at, k_t, v_t, whole_end, end, low, high, length, scale,
        True, DIM, KEYS,
    )  # fmt: skip
    d_q = d_q * (scale / 1.4426950408889634)
    _store_tile(d_q_at + row * d_q_r + head * d_q_h, queries, count, d_q_t, d_q, DIM)
