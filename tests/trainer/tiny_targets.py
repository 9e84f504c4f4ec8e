"""Random targets of every kind, small enough for milliseconds: what the trainer must take."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

NUM_LAYERS = 4
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # makes a random model's answers differ from token to token
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def llama(**own: Any) -> Any:
    """Dense, full attention."""
    config = _SIZES | _HEADS | {"intermediate_size": 48} | own
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**config))


def qwen3(**own: Any) -> Any:
    """Dense, full attention, normalised queries and keys."""
    config = _SIZES | _HEADS | {"intermediate_size": 48} | own
    return _made(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**config))


def moe(**own: Any) -> Any:
    """Experts in every layer."""
    config = _SIZES | _HEADS | _EXPERTS | {"intermediate_size": 48} | own
    return _made(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**config))


def hybrid_text(**own: Any) -> Any:
    """Three gated delta layers and one of full attention: the text class alone."""
    config = _SIZES | _DELTA | {"intermediate_size": 48} | own
    text = transformers.Qwen3_5TextConfig(**config)
    return _made(transformers.Qwen3_5ForCausalLM, text)


def hybrid(**own: Any) -> Any:
    """The same inside the multimodal class: Qwen3_5Config around the text configuration."""
    tied = own.get("tie_word_embeddings", False)
    text = _SIZES | _DELTA | {"intermediate_size": 48} | own
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=_VISION, tie_word_embeddings=tied
    )
    return _made(transformers.Qwen3_5ForConditionalGeneration, config)


def hybrid_moe(**own: Any) -> Any:
    """A multimodal hybrid with experts, as Qwen3.5-35B-A3B."""
    experts = _EXPERTS | {"shared_expert_intermediate_size": 24}
    config = transformers.Qwen3_5MoeConfig(
        text_config=_SIZES | _DELTA | experts | own, vision_config=_VISION
    )
    return _made(transformers.Qwen3_5MoeForConditionalGeneration, config)


def vision(**own: Any) -> Any:
    """Multimodal with no text class of its own: only the class that its configuration names."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = _SIZES | _HEADS | {"intermediate_size": 48, "rope_parameters": rope} | own
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=_VISION | {"deepstack_visual_indexes": [0]}
    )
    return _made(transformers.Qwen3VLForConditionalGeneration, config)


KINDS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "qwen3": qwen3,
    "moe": moe,
    "hybrid-text": hybrid_text,
    "hybrid": hybrid,
    "hybrid-moe": hybrid_moe,
    "vision": vision,
}


def _made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()
