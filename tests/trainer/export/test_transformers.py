"""An export loaded into transformers' own Qwen3 computes what the draft computes."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from tests.trainer.export.conftest import MIXED, Export
from trainer.export.zlab import load_export

CONTEXT, BLOCK, WINDOW = 21, 4, 16


def load_qwen3(directory: Path) -> tuple[Qwen3Model, Tensor, Qwen3RMSNorm]:
    """Load the layers with from_pretrained, fc and hidden_norm beside them."""
    model, told = Qwen3Model.from_pretrained(directory, output_loading_info=True)
    assert set(told["missing_keys"]) == {"embed_tokens.weight"}  # the target's
    assert set(told["unexpected_keys"]) == {"fc.weight", "hidden_norm.weight"}
    assert not told["mismatched_keys"]
    tensors = load_file(directory / "model.safetensors")
    norm = Qwen3RMSNorm(model.config.hidden_size, model.config.rms_norm_eps)
    norm.load_state_dict({"weight": tensors["hidden_norm.weight"]})
    return model.eval(), tensors["fc.weight"], norm


def visible(kind: str) -> Tensor:
    """Return which of context and block each slot sees, written out from the method."""
    seen = torch.zeros(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
    for slot in range(BLOCK):
        for key in range(CONTEXT + BLOCK):
            if kind == "full_attention":
                seen[slot, key] = True
            else:  # the window counts the slot itself; later slots of the block are not seen
                seen[slot, key] = 0 <= CONTEXT + slot - key < WINDOW
    return seen


@torch.no_grad()
def reference_block(directory: Path, features: Tensor, block: Tensor) -> Tensor:
    """Draft one block with transformers' decoder layers; the context is put into their cache."""
    model, fc, norm = load_qwen3(directory)
    fused, cache = norm(features @ fc.T), DynamicCache()
    context = model.rotary_emb(fused, torch.arange(CONTEXT)[None])
    for index, layer in enumerate(model.layers):
        attention, shape = layer.self_attn, (1, CONTEXT, -1, model.config.head_dim)
        key = attention.k_norm(attention.k_proj(fused).view(shape)).transpose(1, 2)
        value = attention.v_proj(fused).view(shape).transpose(1, 2)
        key = apply_rotary_pos_emb(key, key, *context)[1]
        cache.update(key, value, index)
    angles = model.rotary_emb(block, torch.arange(CONTEXT, CONTEXT + BLOCK)[None])
    # transformers renamed the keyword within version 5.
    known = inspect.signature(model.layers[0].forward).parameters
    held = {"cache" if "cache" in known else "past_key_values": cache}
    hidden = block
    for kind, layer in zip(model.config.layer_types, model.layers, strict=True):
        mask = torch.zeros(1, 1, BLOCK, CONTEXT + BLOCK).masked_fill(~visible(kind), float("-inf"))
        hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, **held)
    out: Tensor = model.norm(hidden)
    return out


@pytest.mark.parametrize("shape", [{}, MIXED], ids=["full", "mixed"])
def test_qwen3_layers_of_transformers_give_the_same_block(shape: dict[str, Any], export: Export):
    directory = export(dtype="float32", **shape)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, CONTEXT, 64, generator=generator)
    block = torch.randn(1, BLOCK, 32, generator=generator)
    draft = load_export(directory)
    cache = draft.new_cache()
    draft.append(cache, features)
    mine, theirs = (
        draft.draft_block(cache, block, CONTEXT),
        reference_block(directory, features, block),
    )
    assert float((mine - theirs).abs().max()) <= 1e-5
    assert float(theirs.abs().max()) > 0.1
