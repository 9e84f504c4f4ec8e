"""The draft against an independent re-implementation, written from the paper alone.

Nothing of trainer.model is called by the reference: it reads the tensors by their published names
and computes one block after the other, head by head.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.masks import BlockLayout


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head vector: pairs are (i, i + d / 2)."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        low, high = x[i], x[i + half]
        out[i] = low * math.cos(angle) - high * math.sin(angle)
        out[i + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def reference_block(
    w: dict[str, Tensor], c: DraftConfig, taps: Tensor, block: Tensor, anchor: int
) -> Tensor:
    """One block in eager PyTorch. Shapes: taps [S, n * D], block [B, D] -> [B, D]."""
    eps, group = c.rms_norm_eps, c.num_attention_heads // c.num_key_value_heads
    context = norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = block
    for i in range(c.num_draft_layers):
        layer = {k.removeprefix(f"layers.{i}."): v for k, v in w.items()}
        normed = norm(x, layer["input_layernorm.weight"], eps)
        inputs = torch.cat((context, normed))
        places = [*range(len(context)), *(anchor + k for k in range(len(block)))]
        heads = []
        for head in range(c.num_attention_heads):
            q_rows = slice(head * c.head_dim, (head + 1) * c.head_dim)
            kv = head // group
            kv_rows = slice(kv * c.head_dim, (kv + 1) * c.head_dim)
            q = norm(
                normed @ layer["self_attn.q_proj.weight"][q_rows].T,
                layer["self_attn.q_norm.weight"],
                eps,
            )
            k = norm(
                inputs @ layer["self_attn.k_proj.weight"][kv_rows].T,
                layer["self_attn.k_norm.weight"],
                eps,
            )
            v = inputs @ layer["self_attn.v_proj.weight"][kv_rows].T
            q = torch.stack([turned(q[j], anchor + j, c.rope_theta) for j in range(len(q))])
            k = torch.stack([turned(k[j], places[j], c.rope_theta) for j in range(len(k))])
            scores = q @ k.T / math.sqrt(c.head_dim)
            scores[:, anchor : len(context)] = -math.inf  # the anchor's own taps are unknown yet
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ layer["self_attn.o_proj.weight"].T
        normed = norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = F.silu(normed @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], eps)


@pytest.mark.parametrize("anchor", [0, 5, 11])
def test_draft_on_one_block_equals_the_reference(
    draft_config: Callable[..., DraftConfig], anchor: int
):
    torch.manual_seed(1)
    config = draft_config()
    draft = DraftModel(config, seed=3)
    with torch.no_grad():  # fresh weights of 0.02 and norms of 1 would hide most mistakes
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    taps, block = torch.randn(12, 64), torch.randn(4, 32)
    anchors, positions = torch.tensor([[anchor]]), torch.arange(12)[None]
    layout = BlockLayout.of(
        anchors, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 12).int(), positions
    )
    masks = draft.attention.masks(layout, config.rules)
    with torch.no_grad():
        found = draft(block[None], taps[None], positions, anchors + torch.arange(4), masks)[0]
        wanted = reference_block(dict(draft.named_parameters()), config, taps, block, anchor)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
