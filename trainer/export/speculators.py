"""The layout of the speculators library, which vLLM reads without further settings.

The draft's tensors are those of the z-lab layout; embedding and head of the target stand beside
them. aux_hidden_state_layer_ids count the embedding's output as 0, so each is the z-lab id + 1.
A converted directory keeps the z-lab config.json whole under ``zlab_config``, which the library
does not read; what stands in the library's own keys wins over it on the way back.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen3Config

from trainer.errors import CheckpointError
from trainer.export.target_files import TargetFiles
from trainer.export.zlab import block_causality, draft_config, export_config, qwen3_sizes
from trainer.model.draft import DraftConfig
from trainer.model.masks import FULL, SLIDING

# The release whose reader these keys were written for (DFlashSpeculatorConfig).
VERSION = "0.9.0"
KEPT = "zlab_config"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TO_DRAFT, TO_TARGET = "t2d", "d2t"
# Beside the draft's own tensors; the verifier's may stand in directories of the library itself.
BESIDE = frozenset(
    (EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, "verifier_lm_head.weight", "verifier_norm.weight")
)
# Keys of a z-lab config.json that say nothing about the transformer layers.
_METHOD_KEYS = {
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "is_causal",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "target_layer_ids",
    "target_model",
    "target_revision",
}
# What dflash_config may hold and still mean plain DFlash with the target's own embedding and head.
_PLAIN_METHOD = {
    "block_size",
    "causal",
    "mask_token_id",
    "num_target_layers",
    "sliding_window_non_causal",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
}


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Say whether a config.json is one of the speculators library."""
    return "speculators_model_type" in raw


def refusals(raw: Mapping[str, Any]) -> list[str]:
    """Return what of a z-lab config.json the speculators layout cannot say, named by its key."""
    method = raw["dflash_config"]
    last = raw["num_target_layers"] - 1
    causal = block_causality(raw)
    names = raw.get("architectures") or []
    told = [
        (
            list(names) != ["DFlashDraftModel"],
            f"architectures {names}: the layout is of plain DFlash (DFlashDraftModel)",
        ),
        (
            last in method["target_layer_ids"],
            f"dflash_config.target_layer_ids: {last}, the target's last, is no auxiliary layer",
        ),
        (
            causal.get(FULL, False),
            "is_causal: speculators runs full_attention layers bidirectionally in the block",
        ),
    ]
    told += [
        (bool(method[key]), f"dflash_config.{key}: has no counterpart")
        for key in sorted(method.keys() - _PLAIN_METHOD)
    ]
    return [text for bad, text in told if bad]


def to_speculators(
    raw: Mapping[str, Any], target: TargetFiles, verifier: str, where: Path
) -> dict[str, Any]:
    """Return the speculators config.json of the z-lab one at ``where``.

    ``verifier`` is the target's hub id or path, which readers of the directory load.

    Raises: CheckpointError naming every key that cannot be represented.
    """
    config = draft_config(raw, where)
    refused = refusals(raw)
    if refused:
        told = "; ".join(refused)
        raise CheckpointError(
            f"{where}: not representable as speculators: {told}; serve the z-lab layout itself"
        )
    size = config.block_size
    layers = {key: value for key, value in raw.items() if key not in _METHOD_KEYS}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": size - 1}],
            "verifier": {
                "name_or_path": verifier,
                "architectures": target.architectures,
            },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sliding_window_non_causal": not block_causality(raw).get(SLIDING, True),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        KEPT: copy.deepcopy(dict(raw)),
    }


def to_zlab(raw: Mapping[str, Any], num_target_layers: int | None, where: Path) -> dict[str, Any]:
    """Return the z-lab config.json of a speculators one.

    ``num_target_layers`` is needed for a directory that this project did not write. Raises:
    CheckpointError naming every key that cannot be represented.
    """
    try:
        refused = _zlab_refusals(raw)
        if refused:
            raise CheckpointError(f"{where}: not representable as z-lab: {'; '.join(refused)}")
        kept = raw.get(KEPT)
        if kept is None:
            if num_target_layers is None:
                raise CheckpointError(
                    f"{where}: speculators does not say how many layers the target has;"
                    " give --target"
                )
            return export_config(draft_of(raw, num_target_layers))
        return _merged(copy.deepcopy(dict(kept)), raw)
    except KeyError as error:
        raise CheckpointError(f"{where}: no key {error}; is it a DFlash speculator?") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{where}: not a speculators configuration ({error})") from error


def speculators_tensors(
    tensors: Mapping[str, Tensor], target: TargetFiles, dtype: Any
) -> dict[str, Tensor]:
    """Return the draft's tensors with the target's embedding and head, in the draft's dtype."""
    embedding = target.read(target.embedding_name).to(dtype)
    head = embedding.clone()  # a file does not hold one tensor under two names
    if target.head_name != target.embedding_name:
        head = target.read(target.head_name).to(dtype)
    return {**tensors, EMBEDDING: embedding, HEAD: head}


def reduces_vocabulary(raw: Mapping[str, Any]) -> bool:
    """Say whether a speculators config drafts over fewer tokens than the target has."""
    return bool(raw["draft_vocab_size"] != raw["transformer_layer_config"]["vocab_size"])


def layer_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformer_layer_config with the defaults that the library leaves out on saving."""
    layers = dict(raw["transformer_layer_config"])
    kind = layers.get("model_type", "qwen3")
    if kind != "qwen3":
        raise ValueError(f"transformer_layer_config.model_type {kind!r}: only qwen3 is a DFlash")
    try:
        full: dict[str, Any] = Qwen3Config(**layers).to_dict()
    except Exception as error:  # its validation has error classes of its own, and IndexError
        raise ValueError(f"transformer_layer_config: {error}") from error
    return {**full, **layers}


def _zlab_refusals(raw: Mapping[str, Any]) -> list[str]:
    kind, layers = raw.get("speculators_model_type"), raw.get("transformer_layer_config") or {}
    told = [
        (kind != "dflash", f"speculators_model_type {kind!r}: only dflash has this layout"),
        (
            bool(raw.get("sample_from_anchor")),
            "sample_from_anchor: in the z-lab layout slot 0 is the anchor and drafts nothing",
        ),
        (
            raw.get("draft_vocab_size", layers.get("vocab_size")) != layers.get("vocab_size"),
            f"draft_vocab_size {raw.get('draft_vocab_size')}: the z-lab layout has no t2d and d2t",
        ),
        (
            raw.get("target_hidden_size") not in (None, layers.get("hidden_size")),
            f"target_hidden_size {raw.get('target_hidden_size')}: differs from the draft's",
        ),
        (
            raw.get("projector_type", "dflash") != "dflash",
            f"projector_type {raw.get('projector_type')!r}: only dflash has this layout",
        ),
    ]
    return [text for bad, text in told if bad]


def _merged(kept: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Put the library's values into the z-lab configuration that was kept, in its own order."""
    layers = raw["transformer_layer_config"]
    kept |= {key: value for key, value in layers.items() if key in kept.keys() - _METHOD_KEYS}
    method = kept["dflash_config"]
    values = {
        "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
        "mask_token_id": raw["mask_token_id"],
        "block_size": raw["block_size"],
    }
    for holder in (kept, method):
        holder |= {key: value for key, value in values.items() if key in holder}
    non_causal = bool(raw.get("sliding_window_non_causal"))
    if block_causality(kept).get(SLIDING, not non_causal) == non_causal:
        for holder, key in ((kept, "is_causal"), (method, "causal")):
            holder.pop(key, None)  # sliding layers are then causal by themselves
            if non_causal:
                holder[key] = False
        method.pop("sliding_window_non_causal", None)
        if non_causal:
            method["sliding_window_non_causal"] = True
    return kept


def draft_of(raw: Mapping[str, Any], num_target_layers: int) -> DraftConfig:
    """Return the draft that a speculators config.json describes; ``check`` it before use.

    Raises: KeyError, ValueError or TypeError for a configuration of another kind.
    """
    layers = layer_config(raw)
    rope = layers.get("rope_parameters") or {}
    return DraftConfig(
        **qwen3_sizes(layers),
        rope_theta=float(rope.get("rope_theta") or layers["rope_theta"]),
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        target_layer_ids=tuple(i - 1 for i in raw["aux_hidden_state_layer_ids"]),
        num_target_layers=num_target_layers,
        sliding_window_non_causal=bool(raw.get("sliding_window_non_causal")),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or layers["dtype"]),
    )
