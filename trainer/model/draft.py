"""The draft network: a small Qwen3 stack whose layers attend to fused hidden states of the target.

Source: DFlash, arXiv 2602.06036. Tensors carry the published names: fc, hidden_norm, norm and
eleven a layer, 3 + 11 * L in all; embedding and head belong to the target and are not here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainer.contract.config import DraftModelConfig
from trainer.errors import TargetError
from trainer.model.attention import Attention, Mask, SdpaAttention, rules_for
from trainer.model.masks import FULL, SLIDING, MaskRule
from trainer.model.target import default_target_layer_ids

INIT_STD = 0.02  # as Qwen3
# With tied embeddings an untrained draft puts all its weight on the mask token itself (its own
# embedding is its head row; first loss about 60); a small final norm starts near uniform instead.
TIED_FINAL_NORM = 0.3


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes the network's shape and meaning; all of it goes into config.json."""

    hidden_size: int
    intermediate_size: int
    num_draft_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal: bool = False
    normalise_taps: bool = False
    tied_target: bool = False
    dtype: str = "bfloat16"

    @classmethod
    def from_target(
        cls, text_config: Any, config: DraftModelConfig, num_target_layers: int
    ) -> "DraftConfig":
        """Fill what ``config`` leaves open from the target's text configuration.

        Raises: TargetError for ids, a mask token or heads that do not fit the target.
        """
        hidden = int(_told(text_config, "hidden_size"))
        own_heads = int(_told(text_config, "num_attention_heads"))
        own_head_dim = getattr(text_config, "head_dim", None) or hidden // own_heads
        own_kv_heads = getattr(text_config, "num_key_value_heads", None) or own_heads
        ids = config.target_layer_ids
        draft = cls(
            hidden_size=hidden,
            intermediate_size=config.intermediate_size
            or int(_told(text_config, "intermediate_size")),
            num_draft_layers=config.num_draft_layers,
            num_attention_heads=config.num_attention_heads or own_heads,
            num_key_value_heads=config.num_key_value_heads or own_kv_heads,
            head_dim=config.head_dim or own_head_dim,
            rms_norm_eps=float(_told(text_config, "rms_norm_eps")),
            rope_theta=_rope_theta(text_config),
            max_position_embeddings=int(_told(text_config, "max_position_embeddings")),
            vocab_size=int(_told(text_config, "vocab_size")),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=ids or default_target_layer_ids(num_target_layers, config.num_taps),
            num_target_layers=num_target_layers,
            layer_types=config.layer_types or (FULL,) * config.num_draft_layers,
            sliding_window=config.sliding_window,
            causal=config.causal,
            normalise_taps=config.normalise_taps,
            tied_target=bool(getattr(text_config, "tie_word_embeddings", False)),
            dtype=config.dtype,
        )
        draft.check()
        return draft

    def check(self) -> None:
        """Raise TargetError, naming the setting, when the parts do not fit together."""
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        kinds, layers = self.layer_types, self.num_draft_layers
        ascending = bool(ids) and ids == tuple(sorted(set(ids)))
        rules = [
            (
                ascending and ids[0] >= 0 and ids[-1] <= last,
                f"target_layer_ids {list(ids)}: expected ascending layers of 0..{last}",
            ),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id}: embedding rows are 0..{self.vocab_size - 1}",
            ),
            (
                heads % kv_heads == 0,
                f"num_attention_heads {heads}: not a multiple of num_key_value_heads {kv_heads}",
            ),
            (
                self.head_dim % 2 == 0,
                f"head_dim {self.head_dim}: rotary positions need an even one",
            ),
            (
                len(kinds) == layers and set(kinds) <= {FULL, SLIDING},
                f"layer_types {list(kinds)}: expected {layers} times {FULL} or {SLIDING}",
            ),
            (
                SLIDING not in kinds or bool(self.sliding_window),
                "sliding_window: needed by a sliding_attention layer",
            ),
        ]
        for good, text in rules:
            if not good:
                raise TargetError(f"draft.{text}; change it in the training configuration")

    @property
    def num_taps(self) -> int:
        """How many target layers are fused."""
        return len(self.target_layer_ids)

    @property
    def rules(self) -> dict[str, MaskRule]:
        """Mask rule of each layer type that occurs."""
        return rules_for(self.layer_types, self.block_size, self.sliding_window, causal=self.causal)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _told(text_config: Any, name: str) -> Any:
    value = getattr(text_config, name, None)
    if value is None:
        raise TargetError(
            f"the target's text configuration has no {name}; set draft.{name} if there is such a"
            " setting, else this kind of target is not supported"
        )
    return value


def _rope_theta(text_config: Any) -> float:
    """Return theta; transformers 5 keeps it in rope_parameters, some models one a layer type."""
    held: Any = getattr(text_config, "rope_parameters", None) or {}
    if FULL in held:
        held = held[FULL]
    theta = held.get("rope_theta", getattr(text_config, "rope_theta", None))
    if theta is None:
        raise TargetError("the target's text configuration has no rope_theta")
    return float(theta)


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and cast before the weight, as Qwen3 does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [..., size] -> [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of positions. Shapes: [R, 1, T, head_dim] each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: DraftConfig, dtype: torch.dtype) -> "Rotary":
        """Angles in fp32 whatever the model's dtype: bf16 frequencies are off by radians at 3,000.

        There is no buffer, so that no cast of the module can reach the frequencies.
        """
        even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
        angle = positions[:, None, :, None].float() * config.rope_theta ** -(even / config.head_dim)
        angle = torch.cat((angle, angle), -1)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def last(self, count: int) -> "Rotary":
        """Return the part of the last ``count`` positions."""
        return Rotary(self.cos[:, :, -count:], self.sin[:, :, -count:])

    def turn(self, x: Tensor) -> Tensor:
        """Rotate [R, heads, T, head_dim]."""
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin


class DraftAttention(nn.Module):
    """Queries from the block alone; keys and values from the fused context and the block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RmsNorm(dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(dim, config.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Shapes: [R, Q, D] -> [R, heads, Q, head_dim]."""
        return rotary.turn(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2))

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Shapes: [R, T, D] -> [R, kv heads, T, head_dim] twice."""
        keys = rotary.turn(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2))
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """Shapes: [R, heads, Q, head_dim] -> [R, Q, D]."""
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [..., D] -> [..., D]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """A Qwen3 decoder layer; the context passes through no norm, query or MLP of the layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMlp(config)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention and MLP to the residual stream."""
        x = x + self.self_attn.output(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


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
        self.attention: Attention = attention or SdpaAttention()
        hidden = config.hidden_size
        with torch.device(device):  # built where it lives: moving 1.7 B weights takes a minute
            self.fc = nn.Linear(config.num_taps * hidden, hidden, bias=False)
            self.hidden_norm = RmsNorm(hidden, config.rms_norm_eps)
            self.norm = RmsNorm(hidden, config.rms_norm_eps)
            self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_draft_layers))
            self.tap_scale: Tensor
            self.register_buffer("tap_scale", torch.ones(config.num_taps))
        self._initialise(seed)
        self.to(getattr(torch, config.dtype))

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator(device=self.fc.weight.device).manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, INIT_STD, generator=generator)
            if self.config.tied_target:
                self.norm.weight.fill_(TIED_FINAL_NORM)

    def fc_weight(self) -> Tensor:
        """Return fc with the tap scales folded in; export writes this. Shapes: [D, n * D]."""
        if not self.config.normalise_taps:
            return self.fc.weight
        columns = self.tap_scale.to(self.fc.weight.dtype).repeat_interleave(self.config.hidden_size)
        return self.fc.weight * columns

    def fuse(self, target_hidden: Tensor) -> Tensor:
        """Fuse the taps into the context every layer sees. Shapes: [R, S, n * D] -> [R, S, D]."""
        weight = self.fc_weight()
        fused: Tensor = self.hidden_norm(F.linear(target_hidden.to(weight.dtype), weight))
        return fused

    def forward(
        self,
        block_embeddings: Tensor,
        target_hidden: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: dict[str, Mask],
    ) -> Tensor:
        """Return the normed hidden states of every slot, for the target's head.

        Shapes: block_embeddings [R, N * B, D], target_hidden [R, S, n * D], context_positions
        [R, S], block_positions [R, N * B], masks one a layer type -> [R, N * B, D].
        """
        x = block_embeddings.to(self.fc.weight.dtype)
        context = self.fuse(target_hidden)
        everywhere = torch.cat((context_positions, block_positions), 1)
        rotary = Rotary.at(everywhere, self.config, x.dtype)
        at_block = rotary.last(x.shape[1])
        for layer, kind in zip(self._layers(), self.config.layer_types, strict=True):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.queries(normed, at_block)
            key, value = layer.self_attn.keys_values(torch.cat((context, normed), 1), rotary)
            x = layer.finish(x, self.attention.attend(query, key, value, masks[kind]))
        out: Tensor = self.norm(x)
        return out

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
                cache.keys[i] = torch.cat((cache.keys[i], key), 2)
                cache.values[i] = torch.cat((cache.values[i], value), 2)
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
            normed = layer.input_layernorm(x)
            query = layer.self_attn.queries(normed, rotary)
            key, value = layer.self_attn.keys_values(normed, rotary)
            key = torch.cat((cache.keys[i], key), 2)
            value = torch.cat((cache.values[i], value), 2)
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=masks[self.config.layer_types[i]], enable_gqa=True
            )
            x = layer.finish(x, attended)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> Sequence[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]


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
