"""The draft against an independent re-implementation, written from the paper alone.

Nothing of trainer.model is called by the reference: it reads the tensors by their published names
and computes one block after the other, head by head.
"""

import math
from collections.abc import Callable
from typing import Any

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
    half = len(x) // 2
    angles = [position / theta ** (2 * i / len(x)) for i in range(half)]
    cos, sin = (
        torch.tensor([math.cos(a) for a in angles]),
        torch.tensor([math.sin(a) for a in angles]),
    )
    low, high = x[:half], x[half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin))


def sees(c: DraftConfig, kind: str, anchor: int, slot: int, key: int, length: int) -> bool:
    """Whether a slot sees a key; the first ``length`` keys are the context, then come the slots."""
    sliding = kind == "sliding_attention"
    if key < length:
        near = not sliding or anchor + slot - key < (c.sliding_window or 0)
        return key < anchor and near  # the anchor's own taps are unknown yet
    if c.causal or (sliding and not c.sliding_window_non_causal):
        return key - length <= slot
    return True


def convolved(layer: dict[str, Tensor], name: str, side: int, x: Tensor, read: Tensor) -> Tensor:
    """DFlash 2: slot by slot, out_t = k_0 x_t + k_1 x_(t - 1); other drafts have no kernels."""
    if f"{name}.base_kernel" not in layer:
        return x
    base, projection = layer[f"{name}.base_kernel"], layer[f"{name}.kernel_projection.weight"]
    num_groups, rows = len(projection) // 4, []
    for t in range(len(x)):
        corrections = (projection @ read[t]).view(2, 2, num_groups)[side]
        kernel = base[side] + corrections.repeat_interleave(x.shape[1] // num_groups, 1)
        rows.append(kernel[0] * x[t] + (kernel[1] * x[t - 1] if t > 0 else 0))
    return torch.stack(rows)


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
        read, normed = normed, convolved(layer, "attention_conv", 0, normed, normed)
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
            for slot in range(len(block)):
                for key in range(len(k)):
                    if not sees(c, c.layer_types[i], anchor, slot, key, len(context)):
                        scores[slot, key] = -math.inf
            heads.append(scores.softmax(-1) @ v)
        attended = torch.cat(heads, -1) @ layer["self_attn.o_proj.weight"].T
        x = x + convolved(layer, "attention_conv", 1, attended, read)
        read = norm(x, layer["post_attention_layernorm.weight"], eps)
        normed = convolved(layer, "mlp_conv", 0, read, read)
        gate = F.silu(normed @ layer["mlp.gate_proj.weight"].T)
        out = (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
        x = x + convolved(layer, "mlp_conv", 1, out, read)
    return norm(x, w["norm.weight"], eps)


MIXED = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention")}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "block of 8": {"block_size": 8},
    "block of 10": {"block_size": 10},
    "block of 16": {"block_size": 16},
    "causal": {"causal": True, "block_size": 8},
    "one layer, four taps": {"num_draft_layers": 1, "target_layer_ids": (0, 2, 3, 5)},
    "sliding and full": MIXED | {"num_draft_layers": 3, "sliding_window": 7, "block_size": 10},
    "window within the block": MIXED | {"num_draft_layers": 3, "sliding_window": 3},
    "dflash2": {"variant": "dflash2", "conv_group_size": 8, "block_size": 8},
    "dflash2, sliding and full": MIXED
    | {"variant": "dflash2", "num_draft_layers": 3, "sliding_window": 7, "block_size": 10},
    "sliding, not causal": MIXED
    | {"num_draft_layers": 3, "sliding_window": 7, "sliding_window_non_causal": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_decoding_and_the_reference_agree_on_every_kind_of_draft(
    draft_config: Callable[..., DraftConfig], kind: str
):
    torch.manual_seed(1)
    config = draft_config(**KINDS[kind])
    draft = DraftModel(config, seed=3)
    with torch.no_grad():  # fresh weights of 0.02 and norms of 1 would hide most mistakes
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    size, anchors = config.block_size, [0, 5, 11]  # close ones: their blocks overlap
    taps, blocks = torch.randn(14, config.num_taps * 32), torch.randn(3, size, 32)
    with torch.no_grad():
        trained = trained_blocks(draft, taps, blocks, anchors)
        for block, anchor, found in zip(blocks, anchors, trained, strict=True):
            wanted = reference_block(dict(draft.named_parameters()), config, taps, block, anchor)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
            if anchor == 0:
                continue  # decoding always has a prompt
            cache = draft.new_cache()
            for at in range(0, anchor, 2):  # as accepted tokens come, a few at a time
                draft.append(cache, taps[None, at : min(at + 2, anchor)])
            decoded = draft.draft_block(cache, block[None], anchor)[0]
            torch.testing.assert_close(decoded, wanted, atol=1e-5, rtol=0)


def trained_blocks(draft: DraftModel, taps: Tensor, blocks: Tensor, anchors: list[int]) -> Tensor:
    """Training forward of one document. Shapes: taps [S, n * D], blocks [N, B, D] -> the same."""
    at, positions = torch.tensor([anchors]), torch.arange(len(taps))[None]
    layout = BlockLayout.of(
        at, torch.ones_like(at, dtype=torch.bool), torch.zeros_like(positions).int()
    )
    places = (at[..., None] + torch.arange(blocks.shape[1])).flatten(1)
    masks = draft.attention.masks(layout, draft.config.rules)
    out: Tensor = draft(blocks.flatten(0, 1)[None], taps[None], positions, places, masks)
    return out.view(blocks.shape)
