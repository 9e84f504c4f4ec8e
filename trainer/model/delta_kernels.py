"""The short convolution before a delta rule, in one pass: SiLU, heads of length 1, three outputs.

Triton, CUDA only. Written plainly in ``target_layers.convolve_heads``; a compiler makes several
passes of that, the longest over sums in fp32.
"""

import triton
import triton.language as tl
from torch import Tensor

from trainer.device import current_device
from trainer.model.target_layers import DeltaHeads, DeltaSizes

_TOKENS = 16  # of one program, and all channels of one head


@triton.jit
def _convolve(
    x_at,
    position_at,
    kernel_at,
    query_at,
    key_at,
    value_at,
    stride,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of some tokens: the heads of queries, then of keys, then of values."""
    head = tl.program_id(0)  # the fastest, so that neighbours read neighbours
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = token < num_tokens
    channel = tl.arange(0, DIM)
    place = tl.load(position_at + token, mask=inside, other=0)
    total = tl.zeros((TOKENS, DIM), tl.float32)
    for back in tl.static_range(TAPS):
        weight = tl.load(kernel_at + (head * DIM + channel) * TAPS + (TAPS - 1 - back))
        x = tl.load(
            x_at + (token - back)[:, None] * stride + (head * DIM + channel)[None, :],
            mask=(inside & (place >= back))[:, None],
            other=0.0,
        )
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    out = total / (1.0 + tl.exp(-total))
    row = token[:, None]
    if head < 2 * KEY_HEADS:
        # Rounded as the kernel of a convolution would leave it.
        out = out.to(query_at.dtype.element_ty).to(tl.float32)
        out = out * tl.rsqrt(tl.sum(out * out, 1) + 1e-6)[:, None]
        if head < KEY_HEADS:
            at = query_at + (row * KEY_HEADS + head) * DIM + channel[None, :]
        else:
            at = key_at + (row * KEY_HEADS + head - KEY_HEADS) * DIM + channel[None, :]
        tl.store(at, out.to(query_at.dtype.element_ty), mask=inside[:, None])
    else:
        at = value_at + (row * VALUE_HEADS + head - 2 * KEY_HEADS) * DIM + channel[None, :]
        tl.store(at, out.to(value_at.dtype.element_ty), mask=inside[:, None])


def fits(sizes: DeltaSizes) -> bool:
    """Say whether the kernel takes heads of these sizes."""
    dim = sizes.key_dim
    return dim == sizes.value_dim and 16 <= dim <= 256 and dim & (dim - 1) == 0


def convolve_heads(x: Tensor, position: Tensor, kernel: Tensor, sizes: DeltaSizes) -> DeltaHeads:
    """Do what ``target_layers.convolve_heads`` does. Shapes: x [T, C], kernel [C, taps]."""
    num_tokens, dim = len(x), sizes.key_dim
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    query, key = (x.new_empty(num_tokens, key_heads, dim) for _ in range(2))
    value = x.new_empty(num_tokens, value_heads, dim)
    grid = (2 * key_heads + value_heads, triton.cdiv(num_tokens, _TOKENS))
    kernel = kernel.contiguous()
    with current_device(x.device):
        _convolve[grid](
            *(x, position, kernel, query, key, value),
            *(x.stride(0), num_tokens),
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            DIM=dim,
            TAPS=kernel.shape[1],
            TOKENS=_TOKENS,
        )
    return DeltaHeads(query, key, value)
