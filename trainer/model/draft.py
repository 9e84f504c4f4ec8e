"""The draft network: a small Qwen3 stack whose layers attend to fused hidden states of the target.

Source: DFlash, arXiv 2602.06036. Tensors carry the published names: fc, hidden_norm, norm and
eleven a layer, 3 + 11 * L in all, and those of the variant; embedding and head belong to the target
and are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainer.errors import TargetError
from trainer.model.attention import Attention, Mask, SdpaAttention
from trainer.model.draft_config import DraftConfig
from trainer.model.layers import DraftLayer, RmsNorm, Rotary
from trainer.model.masks import MaskRule
from trainer.model.target import FrozenHead
from trainer.model.variants import VARIANTS
from trainer.model.variants.variant import Extra

__all__ = ["DraftCache", "DraftConfig", "DraftModel", "measured_tap_scale"]

INIT_STD = 0.02  # as Qwen3
# With tied embeddings an untrained draft puts all its weight on the mask token itself (its own
# embedding is its head row; first loss about 60); a small final norm starts near uniform instead.
TIED_FINAL_NORM = 0.3


@dataclass
class DraftCache:
    """Context keys and values of each layer while decoding; ``length`` tokens are held."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0


class DraftModel(nn.Module):
    """The whole draft. Replicas built with the same seed on the same kind of device are equal."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.variant = VARIANTS[config.variant]
        for fault in self.variant.faults(config):
            raise TargetError(f"draft.{fault}; change it in the training configuration")
        self.attention: Attention = attention or SdpaAttention()
        hidden = config.hidden_size
        with torch.device(device):  # built where it lives: moving 1.7 B weights takes a minute
            self.fc = nn.Linear(config.num_taps * hidden, hidden, bias=False)
            self.hidden_norm = RmsNorm(hidden, config.rms_norm_eps)
            self.norm = RmsNorm(hidden, config.rms_norm_eps)
            kind = self.variant.layer
            self.layers = nn.ModuleList(kind(config) for _ in range(config.num_draft_layers))
            for name, module in self.variant.modules(config).items():
                self.add_module(name, module)
            self.tap_scale: Tensor
            self.register_buffer("tap_scale", torch.ones(config.num_taps))
        self._initialise(seed)
        self.to(getattr(torch, config.dtype))
        # What lies before, between and behind the layers' attention; attention stays outside.
        self._contexts = self.attention.compiled(_contexts)
        self._enter = self.attention.compiled(_enter)
        self._enter_masked = self.attention.compiled(_enter_masked)
        self._between = self.attention.compiled(_between)
        self._leave = self.attention.compiled(_leave)
        self._leave_drafted = self.attention.compiled(_leave_drafted)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator(device=self.fc.weight.device).manual_seed(seed)
        extras = [module for module in self.modules() if isinstance(module, Extra)]
        theirs = {inner for module in extras for inner in module.modules()}
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear) and module not in theirs:
                    module.weight.normal_(0.0, INIT_STD, generator=generator)
            if self.config.tied_target:
                self.norm.weight.fill_(TIED_FINAL_NORM)
            for module in extras:
                module.reset(generator)

    def fc_weight(self) -> Tensor:
        """Return fc with the tap scales folded in; export writes this. Shapes: [D, n * D]."""
        if not self.config.normalise_taps:
            return self.fc.weight
        columns = self.tap_scale.to(self.fc.weight.dtype).repeat_interleave(self.config.hidden_size)
        return self.fc.weight * columns

    def fuse(self, target_hidden: Tensor) -> Tensor:
        """Fuse the taps into the context every layer sees. Shapes: [R, S, n * D] -> [R, S, D]."""
        return _fuse(self.hidden_norm, target_hidden, self.fc_weight())

    def forward(
        self,
        block_embeddings: Tensor,
        target_hidden: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: dict[str, Mask],
        *,
        drafted: bool = False,
    ) -> Tensor:
        """Return the normed hidden states of every slot, for the target's head.

        ``drafted``: every block is its anchor and masks, as in training, and only the masks' hidden
        states are wanted; what is the same in all masks is then done once, and what only the
        anchors need not at all. Shapes: block_embeddings [R, N * B, D], target_hidden
        [R, S, n * D], context_positions [R, S], block_positions [R, N * B], masks one a layer type
        -> [R, N * B, D], or [R, N * (B - 1), D] when drafted.
        """
        x = block_embeddings.to(self.fc.weight.dtype)
        layers, kinds = self._layers(), self.config.layer_types
        rotary = Rotary.at(context_positions, self.config, x.dtype)
        contexts = self._contexts(
            layers, self.hidden_norm, target_hidden, self.fc_weight(), rotary.cos, rotary.sin
        )
        rotary = Rotary.at(block_positions, self.config, x.dtype)
        by_slot, size = drafted and not layers[0].mixes_slots, self.config.block_size
        if by_slot:
            inner = self._enter_masked(layers[0], x, rotary.cos, rotary.sin, size)
        else:
            inner = self._enter(layers[0], x, rotary.cos, rotary.sin)
        for i, (layer, context, kind) in enumerate(zip(layers, contexts, kinds, strict=True)):
            query, *own, kept = inner
            attended = self.attention.attend(query, context, (own[0], own[1]), masks[kind])
            if i + 1 < len(layers):
                x, inner = self._between(
                    (layer, layers[i + 1]), x, attended, kept, rotary.cos, rotary.sin
                )
        if by_slot:
            return self._leave_drafted(layers[-1], self.norm, x, attended, size)
        out = self._leave(layers[-1], self.norm, x, attended, kept)
        return _without_anchors(out, size) if drafted else out

    def new_cache(self) -> DraftCache:
        """Return an empty cache for one sequence."""
        return DraftCache()

    @torch.no_grad()
    def append(self, cache: DraftCache, features: Tensor) -> None:
        """Add the taps of further accepted tokens. Shapes: features [1, T, n * D]."""
        context = self.fuse(features)
        positions = torch.arange(context.shape[1], device=context.device)[None] + cache.length
        rotary = Rotary.at(positions, self.config, context.dtype)
        for i, layer in enumerate(self._layers()):
            key, value = layer.self_attn.keys_values(context, rotary)
            if cache.length == 0:
                cache.keys.append(key)
                cache.values.append(value)
            else:
                cache.keys[i] = torch.cat((cache.keys[i], key), 1)
                cache.values[i] = torch.cat((cache.values[i], value), 1)
        cache.length += context.shape[1]

    @torch.no_grad()
    def draft_block(self, cache: DraftCache, block_embeddings: Tensor, anchor: int) -> Tensor:
        """Draft one block behind the cached context; the cache is left as it was.

        ``anchor`` is the block's first position and so the number of cached tokens. Shapes:
        block_embeddings [1, B, D] -> [1, B, D]. Raises: ValueError when the cache holds another
        number of tokens.
        """
        if anchor != cache.length:
            raise ValueError(f"block at {anchor}, but the cache holds {cache.length} tokens")
        x = block_embeddings.to(self.fc.weight.dtype)
        size = x.shape[1]
        positions = torch.arange(size, device=x.device)[None] + anchor
        rotary = Rotary.at(positions, self.config, x.dtype)
        masks = {
            kind: _decoding_mask(rule, size, anchor, x.device)
            for kind, rule in self.config.rules.items()
        }
        for i, layer in enumerate(self._layers()):
            normed, kept = layer.enter(x)
            query = layer.self_attn.queries(normed, rotary)
            key, value = layer.self_attn.keys_values(normed, rotary)
            key = torch.cat((cache.keys[i], key), 1)
            value = torch.cat((cache.values[i], value), 1)
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=masks[self.config.layer_types[i]], enable_gqa=True
            )
            x = layer.finish(x, attended.transpose(1, 2), kept)
        out: Tensor = self.norm(x)
        return out

    def choose(self, head: FrozenHead, hidden: Tensor, first: Tensor) -> Tensor:
        """Return the tokens drafted greedily in blocks, as the variant chooses them.

        Shapes: hidden [K, B, D] of ``forward`` or ``draft_block``, first [K] the blocks' anchor
        tokens -> [K, B - 1].
        """
        return self.variant.choose(self, head, hidden, first)

    def _layers(self) -> Sequence[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]


def _fuse(hidden_norm: RmsNorm, target_hidden: Tensor, fc_weight: Tensor) -> Tensor:
    fused: Tensor = hidden_norm(F.linear(target_hidden.to(fc_weight.dtype), fc_weight))
    return fused


def _contexts(
    layers: Sequence[DraftLayer],
    hidden_norm: RmsNorm,
    target_hidden: Tensor,
    fc_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of the context for each layer.

    One product makes them all, and one the gradient of the context, which so is never a sum of
    rounded parts. Shapes: target_hidden [R, S, n * D] -> [R, S, kv heads, d] twice a layer.
    """
    context = _fuse(hidden_norm, target_hidden, fc_weight)
    attentions = [layer.self_attn for layer in layers]
    weights = [w for one in attentions for w in (one.k_proj.weight, one.v_proj.weight)]
    projected = F.linear(context, torch.cat(weights)).chunk(len(weights), -1)
    rotary = Rotary(cos, sin)
    return [
        one.placed(projected[2 * i], projected[2 * i + 1], rotary)
        for i, one in enumerate(attentions)
    ]


_Inner = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _enter(layer: DraftLayer, x: Tensor, cos: Tensor, sin: Tensor) -> _Inner:
    """Return query, key and value of the blocks in a layer, and what its ``finish`` wants back.

    Shapes: x [R, Q, D] -> [R, Q, heads, d], [R, Q, kv heads, d] twice.
    """
    rotary = Rotary(cos, sin)
    normed, kept = layer.enter(x)
    query = layer.self_attn.queries(normed, rotary)
    return query, *layer.self_attn.keys_values(normed, rotary), kept


def _enter_masked(
    layer: DraftLayer, x: Tensor, cos: Tensor, sin: Tensor, block_size: int
) -> _Inner:
    """``_enter`` of blocks whose slots after the first are all alike: one row stands for them."""
    rotary, attention = Rotary(cos, sin), layer.self_attn
    blocks = x.reshape(len(x), -1, block_size, x.shape[-1])
    rows, _ = layer.enter(torch.cat((blocks[:, :, 0], blocks[:, :1, 1]), 1))

    def spread(made: Tensor) -> Tensor:
        first, rest = made[:, :-1, None], made[:, -1:, None]
        rest = rest.expand(-1, first.shape[1], block_size - 1, -1)
        return torch.cat((first, rest), 2).flatten(1, 2)

    query = attention.placed_query(spread(attention.q_proj(rows)), rotary)
    key, value = spread(attention.k_proj(rows)), spread(attention.v_proj(rows))
    return query, *attention.placed(key, value, rotary), None


def _between(
    layers: tuple[DraftLayer, DraftLayer],
    x: Tensor,
    attended: Tensor,
    kept: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, _Inner]:
    """Finish a layer and enter the next; returns the residual stream as well."""
    layer, following = layers
    x = layer.finish(x, attended, kept)
    return x, _enter(following, x, cos, sin)


def _without_anchors(x: Tensor, block_size: int) -> Tensor:
    """Shapes: [R, N * B, D] -> [R, N * (B - 1), D]."""
    return x.reshape(len(x), -1, block_size, x.shape[-1])[:, :, 1:].flatten(1, 2)


def _leave_drafted(
    layer: DraftLayer, norm: RmsNorm, x: Tensor, attended: Tensor, block_size: int
) -> Tensor:
    """``_leave`` without the anchors, whose hidden states nothing reads behind this attention."""
    rows, _, heads, dim = attended.shape
    attended = _without_anchors(attended.flatten(2), block_size).view(rows, -1, heads, dim)
    return _leave(layer, norm, _without_anchors(x, block_size), attended, None)


def _leave(
    layer: DraftLayer, norm: RmsNorm, x: Tensor, attended: Tensor, kept: Tensor | None
) -> Tensor:
    out: Tensor = norm(layer.finish(x, attended, kept))
    return out


def _decoding_mask(rule: MaskRule, size: int, anchor: int, device: torch.device) -> Tensor | None:
    """Return which of the ``anchor`` cached keys and own slots each slot sees; None is all."""
    if rule.window is None and not rule.causal:
        return None
    slot = torch.arange(size, device=device)[:, None]
    key = torch.arange(anchor + size, device=device)[None]
    context = key < anchor
    own = ~context
    if rule.window is not None:
        context = context & (anchor + slot - key < rule.window)
    if rule.causal:
        own = own & (key - anchor <= slot)
    return context | own


def measured_tap_scale(features: Sequence[Tensor], num_taps: int) -> Tensor:
    """Return 1 / RMS of each tap over the given tokens, for ``tap_scale``.

    Shapes: features are [length, n * D] each -> [n] fp32.
    """
    tokens = torch.cat([part.float() for part in features])
    tokens = tokens.view(len(tokens), num_taps, -1)
    return torch.rsqrt(tokens.square().mean((0, 2)))
