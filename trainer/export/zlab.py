"""The z-lab layout: what SGLang, vLLM, MLX, TensorRT-LLM and llama.cpp's converter read.

3 + 11 * L tensors without prefix; embedding and head stay with the target. Id l of
target_layer_ids is the output of the 0-based layer l; slot 0 of a block is the anchor.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.config import TargetConfig
from trainer.errors import CheckpointError
from trainer.export.files import (
    CONFIG,
    MAX_SHARD_BYTES,
    Problem,
    TensorFiles,
    read_json,
    refuse_other,
    write_directory,
)
from trainer.model.attention import Attention
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.masks import FULL, SLIDING
from trainer.model.variants import VARIANTS, variant_of

_MOST, _MOST_LAYERS = 2**31 - 1, 1000  # beyond them a file is damaged; listing tensors would hang


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor: 3 + 11 * L, and those of the variant."""
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
    return shapes | VARIANTS[config.variant].tensor_shapes(config)


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
    }
    variant = VARIANTS[config.variant]
    method |= variant.method_keys(config)
    sliding = SLIDING in config.layer_types
    causal = causality(config)
    if causal is not None:
        method["causal"] = causal
    if sliding:
        method |= {"use_swa": True, "swa_window_size": config.sliding_window}
    if sliding and config.sliding_window_non_causal:
        method["sliding_window_non_causal"] = True
    described = (
        {}
        if target is None
        else {"target_model": target_name(target.path), "target_revision": target.revision}
    )
    return {
        "architectures": [variant.architecture],
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
        **({} if causal is None else {"is_causal": causal}),
        "dtype": config.dtype,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": method,
        **described,
    }


def target_name(path: str) -> str:
    """Return a hub id as it is, and of a directory its last part: never a path of one machine."""
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return path if is_hub_id else path.rstrip("/").rsplit("/", 1)[-1]


def causality(config: DraftConfig) -> bool | None:
    """Return what every layer does inside a block; None when each follows its own kind.

    Engines read one flag for all layers (top-level is_causal: SGLang, MLX, vLLM; dflash_config's
    causal: vLLM) and without it run sliding layers causally and full ones not. So the flag is left
    out exactly where that is what was trained: ``causal: false`` beside causal sliding layers
    would be served as another network. Any other training makes all layers alike.
    """
    rules = config.rules
    if all(rule.causal == (kind == SLIDING) for kind, rule in rules.items()):
        return None
    return any(rule.causal for rule in rules.values())


def block_causality(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for each layer type that occurs, whether a config.json makes it causal in a block."""
    kinds = raw.get("layer_types") or [FULL]
    told = raw.get("is_causal")
    if told is None:
        told = raw["dflash_config"].get("causal")
    return {kind: kind == SLIDING if told is None else bool(told) for kind in kinds}


def export_draft(
    draft: DraftModel,
    path: str | Path,
    target: TargetConfig | None = None,
    *,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the draft to directory ``path``, replacing an export that is there.

    ``card`` becomes README.md. Raises: CheckpointError when ``path`` exists and is no export, or a
    weight is not finite.
    """
    directory = Path(path)
    refuse_other(directory)
    tensors = export_tensors(draft)
    wanted, dtype = tensor_shapes(draft.config), draft.config.dtype
    refuse(tensor_problems(tensors, wanted, dtype), str(directory))
    config = export_config(draft.config, target)
    write_directory(directory, tensors, config, card=card, max_shard_bytes=max_shard_bytes)


def load_export(path: str | Path, *, attention: Attention | None = None) -> DraftModel:
    """Read an export, on the CPU, in the dtype it was written in.

    Raises: CheckpointError naming the file and the key, tensor or shape that does not fit.
    """
    directory = Path(path)
    where = directory / CONFIG
    config = draft_config(read_json(where), where)
    config.check()
    tensors = TensorFiles(directory).read_all()
    refuse(tensor_problems(tensors, tensor_shapes(config), config.dtype), str(directory))
    draft = DraftModel(config, attention=attention)
    draft.load_state_dict(tensors, strict=False)  # tap_scale is 1: the scales are in fc
    return draft


def draft_config(raw: Mapping[str, Any], where: Path) -> DraftConfig:
    """Return the draft that a config.json describes; ``check`` it before use.

    Raises: CheckpointError naming ``where`` and the key that is missing or of another kind.
    """
    try:
        method, causal = raw["dflash_config"], block_causality(raw)
        theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
        variant = variant_of(raw)
        config = DraftConfig(
            **qwen3_sizes(raw),
            rope_theta=float(theta),
            block_size=method.get("block_size") or raw["block_size"],
            mask_token_id=method["mask_token_id"],
            target_layer_ids=tuple(method["target_layer_ids"]),
            num_target_layers=raw["num_target_layers"],
            causal=causal.get(FULL, False),
            sliding_window_non_causal=not causal.get(SLIDING, True),
            variant=variant.name,
            **variant.settings(method),
            dtype=raw.get("dtype") or raw["torch_dtype"],
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: no key {error}; is it a DFlash export?") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{where}: not a DFlash configuration ({error})") from error
    check_kinds(config, where)
    return config


def qwen3_sizes(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DraftConfig that the keys of a Qwen3 configuration tell.

    Raises: KeyError or TypeError.
    """
    same = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    )
    return {name: layers[name] for name in same} | {
        "num_draft_layers": layers["num_hidden_layers"],
        "layer_types": tuple(layers["layer_types"]),
        "sliding_window": layers.get("sliding_window"),
    }


def check_kinds(config: DraftConfig, where: Path) -> None:
    """Raise CheckpointError for a number that is no whole one, too small or beyond any draft's."""
    held = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.type in (int, "int")
    }
    held |= {f"target_layer_ids[{i}]": n for i, n in enumerate(config.target_layer_ids)}
    keys = {"num_draft_layers": "num_hidden_layers"}
    for name, value in held.items():
        least = 0 if name.startswith(("mask_token_id", "target_layer_ids")) else 1
        if type(value) is not int or value < least:
            raise CheckpointError(
                f"{where}: {keys.get(name, name)} is {value!r}, expected a whole number of at"
                f" least {least}"
            )
        most = _MOST_LAYERS if name == "num_draft_layers" else _MOST
        if value > most:
            raise CheckpointError(
                f"{where}: {keys.get(name, name)} is {value}, expected at most {most}"
            )


def tensor_problems(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], dtype: str
) -> list[Problem]:
    """Return what keeps tensors from being ``wanted``: names, shapes, dtype, NaN and infinity."""
    problems = name_problems(tensors, wanted)
    for name in sorted(wanted.keys() & tensors):
        found = tensor_problem(tensors[name], wanted[name], dtype)
        problems += [Problem(name, found)] if found else []
    return problems


def name_problems(names: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Problem]:
    """Return missing and unknown tensors, one line each kind."""
    missing, extra = sorted(wanted.keys() - names), sorted(names.keys() - wanted)
    told = [(missing, "missing"), (extra, "unknown")]
    return [
        Problem(found[0], f"{len(found)} {kind} tensors, this is the first")
        for found, kind in told
        if found
    ]


def tensor_problem(tensor: Tensor, shape: tuple[int, ...], dtype: str) -> str | None:
    """Return what is wrong with one tensor, None when it is as wanted."""
    if tuple(tensor.shape) != shape:
        return f"is {list(tensor.shape)}, expected {list(shape)}"
    if str(tensor.dtype) != f"torch.{dtype}":
        return f"is {tensor.dtype}, the configuration says {dtype}"
    return None if bool(torch.isfinite(tensor).all()) else "holds NaN or infinity"


def refuse(problems: list[Problem], where: str) -> None:
    """Raise CheckpointError with the first problems, if there is one."""
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(str(one) for one in problems[:5])}")
