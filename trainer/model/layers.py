"""The parts of a draft layer, by their published names: norms, rotary positions, attention, MLP."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainer.model.draft_config import DraftConfig


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
    """Cosines and sines of positions. Shapes: [R, T, 1, head_dim] each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: DraftConfig, dtype: torch.dtype) -> "Rotary":
        """Angles in fp32 whatever the model's dtype: bf16 frequencies are off by radians at 3,000.

        There is no buffer, so that no cast of the module can reach the frequencies.
        Shapes: positions [R, T].
        """
        even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
        angle = positions[..., None, None].float() * config.rope_theta ** -(even / config.head_dim)
        angle = torch.cat((angle, angle), -1)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate [R, T, heads, head_dim]."""
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
        """Shapes: [R, Q, D] -> [R, Q, heads, head_dim]."""
        return self.placed_query(self.q_proj(x), rotary)

    def placed_query(self, query: Tensor, rotary: Rotary) -> Tensor:
        """Norm and rotate what was projected. Shapes: [R, Q, heads * d] -> [R, Q, heads, d]."""
        return rotary.turn(self.q_norm(self._heads(query)))

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Shapes: [R, T, D] -> [R, T, kv heads, head_dim] twice."""
        return self.placed(self.k_proj(x), self.v_proj(x), rotary)

    def placed(self, key: Tensor, value: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Norm and rotate what was projected. Shapes: [R, T, kv heads * d] -> as keys_values."""
        return rotary.turn(self.k_norm(self._heads(key))), self._heads(value)

    def output(self, attended: Tensor) -> Tensor:
        """Shapes: [R, Q, heads, head_dim] -> [R, Q, D]."""
        projected: Tensor = self.o_proj(attended.flatten(2))
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
    """A Qwen3 decoder layer; the context passes through no norm, query or MLP of the layer.

    mixes_slots: whether ``enter`` or ``finish`` lets the slots of a block see each other.
    """

    mixes_slots: ClassVar[bool] = False

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMlp(config)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what attention reads of the block, and what ``finish`` wants back.

        Shapes: [R, N * B, D] -> [R, N * B, D].
        """
        return self.input_layernorm(x), None

    def finish(self, x: Tensor, attended: Tensor, kept: Tensor | None) -> Tensor:  # noqa: ARG002
        """Add attention and MLP to the residual stream. Shapes: attended [R, N * B, heads, d]."""
        x = x + self.self_attn.output(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
