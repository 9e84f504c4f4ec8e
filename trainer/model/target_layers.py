"""What the decoder layers of known targets compute, as functions of tensors alone.

Whatever treats every token by itself is here and is compiled: norms, products, rotary embedding,
gates, the short convolution. Attention and the delta rule stay outside, in the kernels of their
libraries, so a layer is two functions around one kernel. Weights are arguments, so that all layers
of a kind share one graph; the number of tokens T is the only size that varies from call to call.

What the feed-forward of a layer makes is added to its residual by the next layer, where the sum is
read anyway: ``hidden`` and ``made`` go from layer to layer, and the output of one is their sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainer.model import row_scaled
from trainer.model.row_scaled import RowScaled

Weight = Tensor | RowScaled


@dataclass(frozen=True)
class Norm:
    """Root mean square normalisation; a centred one multiplies by 1 + weight."""

    eps: float
    centred: bool = False

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)


class Rotation(NamedTuple):
    """Rotary embedding of each token. Shapes: [T, r]; the first half of sin is negative."""

    cos: Tensor
    sin: Tensor


class AttentionInputs(NamedTuple):
    """Shapes: hidden [T, D], query [T, H, d], key and value [T, G, d]; gate [T, H, d] or None."""

    hidden: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None


class DeltaInputs(NamedTuple):
    """Shapes: hidden [T, D], the layer's input; mixed [T, C], to be convolved; decay (of the
    logarithm, fp32) and beta [T, V]; gate [T, V, e].
    """

    hidden: Tensor
    mixed: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


class DeltaHeads(NamedTuple):
    """Shapes: query and key [T, K, d], of length 1; value [T, V, e]."""

    query: Tensor
    key: Tensor
    value: Tensor


class AttentionWeights(NamedTuple):
    """Before attention. Shapes: norm [D], qkv [(H or 2H) d + 2 G d, D], q_norm and k_norm [d]."""

    norm: Tensor
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None


class DeltaWeights(NamedTuple):
    """Before the delta rule. Shapes: convolution [C, taps]; log_rate and step_bias [V].

    product gives query, key, value, gate and then, unless ``gates`` does, beta and step.
    """

    norm: Tensor
    product: Weight
    gates: Tensor | None
    convolution: Tensor
    log_rate: Tensor
    step_bias: Tensor


class MixedWeights(NamedTuple):
    """After the kernel. Shapes: mixed_norm [e] or None, output [D, ...], norm [D], gate_up [2F, D],
    down [D, F].
    """

    mixed_norm: Tensor | None
    output: Weight
    norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class AttentionSizes:
    """Of a layer of full attention; gated: its queries come with a gate, head by head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    norm: Norm


@dataclass(frozen=True)
class DeltaSizes:
    """Of a layer of the gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    norm: Norm
    gated_norm: Norm


def product(x: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T. Shapes: [T, K], [N, K] -> [T, N]."""
    if isinstance(weight, RowScaled):
        return row_scaled.multiply(x, weight)
    return functional.linear(x, weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of each head. Shapes: x [T, H, d], cos and sin [T, r].

    The first half of ``sin`` is negative: so the other half of a head is a matter of an index.
    """
    width = cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    other = turning.view(*x.shape[:-1], 2, width // 2).flip(-2).view(*x.shape[:-1], width)
    turned = turning * cos[:, None] + other * sin[:, None]
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def before_attention(
    sizes: AttentionSizes,
) -> Callable[[Tensor, Tensor, Rotation, AttentionWeights], AttentionInputs]:
    """Return the part of a layer before attention: hidden and made [T, D], rotation, weights."""
    heads, kv_heads, dim, norm = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.norm
    width = dim * (2 if sizes.gated else 1)
    gated = sizes.gated

    def before(
        hidden: Tensor, made: Tensor, rotation: Rotation, weights: AttentionWeights
    ) -> AttentionInputs:
        hidden = hidden + made
        all_heads = product(norm(hidden, weights.norm), weights.qkv)
        widths = [heads * width, kv_heads * dim, kv_heads * dim]
        query, key, value = torch.split(all_heads, widths, -1)
        query, key = query.view(-1, heads, width), key.view(-1, kv_heads, dim)
        gate = None
        if gated:
            query, gate = torch.split(query, dim, -1)
        if weights.q_norm is not None and weights.k_norm is not None:
            query, key = norm(query, weights.q_norm), norm(key, weights.k_norm)
        value = value.view(-1, kv_heads, dim)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        return AttentionInputs(hidden, query, key, value, gate)

    return before


def after_attention(
    sizes: AttentionSizes,
) -> Callable[[Tensor, Tensor, Tensor | None, MixedWeights], tuple[Tensor, Tensor]]:
    """Return the part of a layer after its attention: hidden, attended [T, H, d], gate, weights."""
    norm = sizes.norm

    def after(
        hidden: Tensor, mixed: Tensor, gate: Tensor | None, weights: MixedWeights
    ) -> tuple[Tensor, Tensor]:
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return _feed_forward(hidden, mixed.flatten(1), norm, weights)

    return after


def before_delta_rule(sizes: DeltaSizes) -> Callable[[Tensor, Tensor, DeltaWeights], DeltaInputs]:
    """Return the part before the convolution: hidden and made [T, D], weights."""
    norm, value_heads, value_dim = sizes.norm, sizes.num_value_heads, sizes.value_dim
    value_width = value_heads * value_dim
    widths = [2 * sizes.num_key_heads * sizes.key_dim + value_width, value_width]

    def before(hidden: Tensor, made: Tensor, weights: DeltaWeights) -> DeltaInputs:
        hidden = hidden + made
        x = norm(hidden, weights.norm)
        whole = product(x, weights.product)
        if weights.gates is None:
            parts = [*widths, value_heads, value_heads]
            mixed, gate, beta, step = torch.split(whole, parts, -1)
        else:
            mixed, gate = torch.split(whole, widths, -1)
            beta, step = functional.linear(x, weights.gates).chunk(2, -1)
        rate = -weights.log_rate.float().exp()
        decay = rate * functional.softplus(step.float() + weights.step_bias.float())
        gate = gate.view(-1, value_heads, value_dim)
        return DeltaInputs(hidden, mixed, decay, beta.sigmoid(), gate)

    return before


def convolve_heads(sizes: DeltaSizes) -> Callable[[Tensor, Tensor, Tensor], DeltaHeads]:
    """Return the part between: mixed [T, C], position in the document [T], kernel [C, taps].

    The convolution reads no token before its document's first.
    """
    heads, dim = sizes.num_key_heads, sizes.key_dim
    value_heads, value_dim = sizes.num_value_heads, sizes.value_dim
    widths = [heads * dim, heads * dim, value_heads * value_dim]

    def convolve(mixed: Tensor, position: Tensor, kernel: Tensor) -> DeltaHeads:
        wide = functional.silu(_convolve(mixed, position, kernel)).to(mixed.dtype)
        query, key, value = torch.split(wide, widths, -1)
        return DeltaHeads(
            _unit(query.view(-1, heads, dim)),
            _unit(key.view(-1, heads, dim)),
            value.reshape(-1, value_heads, value_dim),
        )

    return convolve


def after_delta_rule(
    sizes: DeltaSizes,
) -> Callable[[Tensor, Tensor, Tensor, MixedWeights], tuple[Tensor, Tensor]]:
    """Return the part after the delta rule: hidden, mixed and gate [T, V, e], weights."""
    norm, gated_norm = sizes.norm, sizes.gated_norm

    def after(
        hidden: Tensor, mixed: Tensor, gate: Tensor, weights: MixedWeights
    ) -> tuple[Tensor, Tensor]:
        assert weights.mixed_norm is not None  # noqa: S101 - for the type checker
        normed = gated_norm(mixed, weights.mixed_norm) * functional.silu(gate.float())
        mixed = normed.to(hidden.dtype).flatten(1)
        return _feed_forward(hidden, mixed, norm, weights)

    return after


def _feed_forward(
    hidden: Tensor, mixed: Tensor, norm: Norm, weights: MixedWeights
) -> tuple[Tensor, Tensor]:
    """Return the residual after the kernel, and what the feed-forward makes of it."""
    # Added in fp32, or the compiler asks the product to add, which copies the residual first.
    hidden = (hidden.float() + product(mixed, weights.output).float()).to(hidden.dtype)
    gate, up = product(norm(hidden, weights.norm), weights.gate_up).chunk(2, -1)
    return hidden, product(functional.silu(gate) * up, weights.down)


def _convolve(x: Tensor, position: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel over the tokens up to its own. Shapes: x [T, C], kernel [C, taps]."""
    num_taps = kernel.shape[1]
    wide, total = x.float(), x.float() * kernel[:, -1].float()
    for back in range(1, num_taps):
        earlier = functional.pad(wide, (0, 0, back, 0))[: x.shape[0]]
        inside = (position >= back)[:, None]
        total = total + torch.where(inside, earlier, 0.0) * kernel[:, num_taps - 1 - back].float()
    return total


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
