"""Write and read a draft in the z-lab layout that serving engines load.

A directory with config.json and model.safetensors: 3 + 11 * L tensors without prefix; embedding
and head stay with the target. The directory appears whole or not at all.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.contract.config import TargetConfig
from trainer.contract.durable import sync
from trainer.errors import CheckpointError
from trainer.model.attention import Attention
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.masks import SLIDING

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the layout, 3 + 11 * L of them."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_draft_layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (wide, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (narrow, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (narrow, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, wide),
            f"layers.{i}.self_attn.q_norm.weight": (dim,),
            f"layers.{i}.self_attn.k_norm.weight": (dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def export_tensors(draft: DraftModel) -> dict[str, Tensor]:
    """Return the tensors to write, on the CPU, with the tap scales folded into fc."""
    state = {name: value.detach() for name, value in draft.named_parameters()}
    state["fc.weight"] = draft.fc_weight().detach()
    return {name: value.cpu().contiguous() for name, value in state.items()}


def export_config(config: DraftConfig, target: TargetConfig | None = None) -> dict[str, Any]:
    """Return config.json.

    block_size and rope theta stand in both places that readers look at. No auto_map: the remote
    code it would name is not part of the export and engines do not need it.
    """
    method: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "causal": config.causal,
    }
    sliding = SLIDING in config.layer_types
    if sliding:
        method |= {"use_swa": True, "swa_window_size": config.sliding_window}
    described = (
        {}
        if target is None
        else {
            "target_model": target.path.rstrip("/").rsplit("/", 1)[-1],
            "target_revision": target.revision,
        }
    )
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_draft_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": config.num_draft_layers,
        "dtype": config.dtype,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": method,
        **described,
    }


def export_draft(draft: DraftModel, path: str | Path, target: TargetConfig | None = None) -> None:
    """Write the draft to directory ``path``, replacing an export that is there.

    Raises: CheckpointError when ``path`` exists and is no export, or a weight is not finite.
    """
    directory = Path(path)
    if directory.exists() and any(directory.iterdir()) and not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} exists and is not an export; choose another directory")
    tensors = export_tensors(draft)
    _check_tensors(tensors, draft.config, str(directory))
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(export_config(draft.config, target), indent=2) + "\n"
    (partial / CONFIG).write_text(text)
    for name in (WEIGHTS, CONFIG, "."):
        sync(partial / name)
    _swap(partial, directory)


def load_export(path: str | Path, *, attention: Attention | None = None) -> DraftModel:
    """Read an export, on the CPU, in the dtype it was written in.

    Raises: CheckpointError naming the file and the key, tensor or shape that does not fit.
    """
    directory = Path(path)
    config = _read_config(directory / CONFIG)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    _check_tensors(tensors, config, str(directory / WEIGHTS))
    draft = DraftModel(config, attention=attention)
    draft.load_state_dict(tensors, strict=False)  # tap_scale is 1: the scales are in fc
    return draft


def _read_config(path: Path) -> DraftConfig:
    try:
        raw = json.loads(path.read_text())
        method = raw["dflash_config"]
        theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
        config = DraftConfig(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_draft_layers=raw["num_hidden_layers"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=theta,
            max_position_embeddings=raw["max_position_embeddings"],
            vocab_size=raw["vocab_size"],
            block_size=method.get("block_size") or raw["block_size"],
            mask_token_id=method["mask_token_id"],
            target_layer_ids=tuple(method["target_layer_ids"]),
            num_target_layers=raw["num_target_layers"],
            layer_types=tuple(raw["layer_types"]),
            sliding_window=raw.get("sliding_window"),
            causal=bool(method.get("causal")),
            dtype=raw["dtype"],
        )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise CheckpointError(f"{path}: no key {error}; is it a DFlash export?") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a DFlash configuration ({error})") from error
    config.check()
    return config


def _check_tensors(tensors: dict[str, Tensor], config: DraftConfig, where: str) -> None:
    wanted, dtype = tensor_shapes(config), getattr(torch, config.dtype)
    missing, extra = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
    faults = [f"{len(missing)} tensors missing, first {missing[0]}"] if missing else []
    faults += [f"{len(extra)} unknown tensors, first {extra[0]}"] if extra else []
    for name in sorted(wanted.keys() & tensors):
        tensor = tensors[name]
        if tuple(tensor.shape) != wanted[name]:
            faults.append(f"{name} is {list(tensor.shape)}, expected {list(wanted[name])}")
        elif tensor.dtype != dtype:
            faults.append(f"{name} is {tensor.dtype}, the configuration says {config.dtype}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} holds NaN or infinity")
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults[:5])}")


def _swap(new: Path, place: Path) -> None:
    """Put ``new`` at ``place``; a kill leaves the old export, the new one, or neither in part."""
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)
