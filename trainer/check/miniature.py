"""A small random model of the target's own class, for checks that need no weights.

Widths and counts are cut, the kinds of layers, the rotary settings and the vocabulary stay, so the
code that runs is the code that the target will run, in a second on one core.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trainer.check.findings import NotApplicableError
from trainer.model.target import model_class

_HEADS = 4
_HIDDEN = 64
_MAX_LAYERS = 16
# Name of the setting -> its value in the miniature, never above the target's own.
_CUTS = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "max_window_layers": 0,
}
_WIDE_INIT = 0.1  # at 0.02 a small random model hardly attends, and faults stay below rounding


def layer_count(text: Any, num_taps: int) -> int:
    """Return how many of the target's first layers hold every kind of layer and all taps.

    Raises: NotApplicableError when a kind of layer comes too late.
    """
    total = int(text.num_hidden_layers)
    count = min(total, max(num_taps + 1, 4))
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    while set(kinds[:count]) != set(kinds) and count < total:
        count += 1
    if count > _MAX_LAYERS:
        raise NotApplicableError(f"its first {_MAX_LAYERS} layers do not hold every kind of layer")
    return count


def tap_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return taps that hold the first and the last layer: the last is where norms go wrong."""
    if num_taps == 1:
        return (num_layers - 1,)
    return (0, *range(num_layers - num_taps + 1, num_layers))


def cut_settings(text: Any, num_layers: int) -> dict[str, Any]:
    """Return the settings of the target's text configuration with widths and counts cut."""
    raw: dict[str, Any] = text.to_dict()
    heads, kv_heads = _heads(raw)
    if raw.get("head_dim"):
        hidden = min(_HIDDEN, int(raw["hidden_size"]))
    else:  # the width is that of all heads together
        hidden = heads * (int(raw["hidden_size"]) // int(raw["num_attention_heads"]))
    changes = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "initializer_range": _WIDE_INIT,
    }
    if raw.get("num_key_value_heads"):
        changes["num_key_value_heads"] = kv_heads
    for name, most in _CUTS.items():
        if isinstance(raw.get(name), int):
            changes[name] = min(most, raw[name])
    if raw.get("linear_num_value_heads"):
        ratio = raw["linear_num_value_heads"] // raw["linear_num_key_heads"]
        changes["linear_num_value_heads"] = changes["linear_num_key_heads"] * ratio
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            raw[name] = value[:num_layers]  # layer_types and the like, one entry a layer
    if isinstance(raw.get("mlp_only_layers"), list):
        raw["mlp_only_layers"] = [n for n in raw["mlp_only_layers"] if n < num_layers]
    return raw | changes


def _heads(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return (heads, key-value heads): grouped where the target groups them."""
    own = int(raw["num_attention_heads"])
    own_kv = int(raw.get("num_key_value_heads") or own)
    heads = min(_HEADS, own)
    if own == own_kv:
        return heads, heads
    return (heads, 2) if own_kv > 1 and heads == _HEADS else (heads, 1)


def build_miniature(known: Any, num_layers: int, seed: int) -> Any:
    """Return a random fp32 model of the class that the target's configuration stands for.

    Raises: NotApplicableError when this architecture cannot be cut small.
    """
    loader, text = model_class(known), known.get_text_config()
    try:
        config = type(text).from_dict(cut_settings(text, num_layers))
        if loader is not AutoModelForCausalLM:
            config = _wrapped(known, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = loader.from_config if loader is AutoModelForCausalLM else loader._from_config
            model = make(config, dtype=torch.float32)
    except Exception as error:  # a configuration may refuse in any way; the full check remains
        raise NotApplicableError(
            f"a {type(known).__name__} cannot be cut small ({type(error).__name__}: {error});"
            " the check without --fast takes the target itself"
        ) from error
    return model.eval()


def _wrapped(known: Any, text: Any) -> Any:
    """Return the whole configuration around a cut text part; its other parts are cut as well."""
    raw: dict[str, Any] = known.to_dict()
    for name in known.sub_configs:
        part = getattr(known, name, None)
        if part is known.get_text_config():
            raw[name] = text.to_dict()
        elif part is not None:
            raw[name] = _cut_part(part.to_dict())
    return type(known).from_dict(raw)


def _cut_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Make a part that no text passes through as small as it goes."""
    cuts = {"depth": 1, "num_hidden_layers": 1, "deepstack_visual_indexes": [0]}
    return raw | {name: value for name, value in cuts.items() if name in raw}
