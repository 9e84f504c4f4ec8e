"""Checks of what leaves the trainer: dtypes, the export's round trip, the facts a resume needs."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer import assembly
from trainer.check.findings import FaultFoundError
from trainer.check.isolation import run_blocks
from trainer.check.subject import Subject, loud
from trainer.checkpoint import CheckpointState
from trainer.contract.config import TrainConfig
from trainer.errors import CheckpointError
from trainer.export import export_draft, load_export
from trainer.learning_rate import Schedule
from trainer.model.attention import SdpaAttention
from trainer.model.draft import DraftModel
from trainer.workers.drafter import StepRange

_FOLDED = 1e-4  # folding the tap scales into fc rounds once


def dtypes(subject: Subject) -> str:
    """The draft has its configured dtype, its masters are fp32, the head comes along."""
    config = subject.small_config
    config = replace(config, draft=replace(config.draft, dtype=subject.config.draft.dtype))
    schedule, place = Schedule.from_config(config.optim, 10), (0, torch.device("cpu"))
    replica = assembly.build_replica(
        config, subject.miniature, place, SdpaAttention(), schedule, None
    )
    wanted = getattr(torch, subject.config.draft.dtype)
    for name, parameter in replica.draft.named_parameters():
        if parameter.dtype != wanted:
            raise FaultFoundError(f"{name} is {parameter.dtype}, draft.dtype is {wanted}")
    for name, master in replica.optimizer.masters().items():
        if master.dtype != torch.float32:
            raise FaultFoundError(f"the master of {name} is {master.dtype}, expected fp32")
    if replica.head.lm_head.dtype != wanted or replica.head.embedding.dtype != wanted:
        raise FaultFoundError(f"the head is {replica.head.lm_head.dtype}, the draft {wanted}")
    target = subject.target
    expected = torch.float32 if subject.fast else getattr(torch, subject.config.target.dtype)
    if target.dtype != expected:
        raise FaultFoundError(f"the target is {target.dtype}, expected {expected}")
    return (
        f"draft and head {subject.config.draft.dtype}, masters float32, target"
        f" {subject.config.target.dtype}"
    )


def export_round_trip(subject: Subject) -> str:
    """What an export holds is what was trained, and reads back to the same function."""
    shape = replace(subject.draft.config, dtype=subject.config.draft.dtype)
    draft = loud(DraftModel(shape, seed=3))
    with tempfile.TemporaryDirectory(prefix="check-") as directory:
        path = Path(directory) / "export"
        export_draft(draft, path, subject.config.target)
        raw = json.loads((path / "config.json").read_text())
        written: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            written |= load_file(file)
        again = load_export(path)
    _check_config(raw, shape)
    wrong = {n for n, t in written.items() if str(t.dtype).removeprefix("torch.") != raw["dtype"]}
    if wrong:
        raise FaultFoundError(f"config.json says {raw['dtype']}, {min(wrong)} is written otherwise")
    mine = dict(draft.named_parameters()) | {"fc.weight": draft.fc_weight()}
    read = dict(again.named_parameters())
    if mine.keys() != written.keys() or mine.keys() != read.keys():
        raise FaultFoundError(
            f"tensors trained and written differ: {sorted(mine.keys() ^ written.keys())[:3]}"
        )
    for name, tensor in mine.items():
        if not torch.equal(tensor, written[name]) or not torch.equal(tensor, read[name]):
            raise FaultFoundError(f"{name} is not read back as it was trained")
    error = _function_error(subject)
    return (
        f"{len(written)} tensors {raw['dtype']} read back bit for bit; outputs within {error:.1g}"
    )


def _check_config(raw: dict[str, Any], shape: Any) -> None:
    """Both places that engines read agree with what was trained."""
    method = raw["dflash_config"]
    held = [
        ("block_size", raw.get("block_size"), shape.block_size),
        ("dflash_config.block_size", method.get("block_size"), shape.block_size),
        ("rope_theta", raw.get("rope_theta"), shape.rope_theta),
        (
            "rope_parameters.rope_theta",
            (raw.get("rope_parameters") or {}).get("rope_theta"),
            shape.rope_theta,
        ),
        ("dflash_config.mask_token_id", method.get("mask_token_id"), shape.mask_token_id),
        (
            "dflash_config.target_layer_ids",
            method.get("target_layer_ids"),
            list(shape.target_layer_ids),
        ),
        ("num_target_layers", raw.get("num_target_layers"), shape.num_target_layers),
        ("layer_types", raw.get("layer_types"), list(shape.layer_types)),
        ("dtype", raw.get("dtype"), shape.dtype),
    ]
    for key, found, wanted in held:
        if found != wanted:
            raise FaultFoundError(f"the export's {key} is {found!r}, the draft's is {wanted!r}")


def _function_error(subject: Subject) -> float:
    """Return the largest difference in outputs between an fp32 draft and its export."""
    draft = subject.small_draft()
    with tempfile.TemporaryDirectory(prefix="check-") as directory:
        export_draft(draft, Path(directory) / "export", subject.config.target)
        again = load_export(Path(directory) / "export").eval()
    before, after = run_blocks(draft, subject.scene), run_blocks(again, subject.scene)
    error = float((before - after).abs().max())
    if not error <= _FOLDED:
        raise FaultFoundError(f"an export read back gives outputs that differ by {error:.2g}")
    return error


def resume_guard(subject: Subject) -> str:
    """A resumed run is refused when a fact of its checkpoint has changed."""
    config = subject.small_config
    other_block = config.draft.block_size + 1
    changes: dict[str, TrainConfig] = {
        "mask_token_id": _with_draft(config, mask_token_id=config.draft.mask_token_id + 1),
        "block_size": _with_draft(config, block_size=other_block),
        "seed": replace(config, seed=config.seed + 1),
    }
    steps = StepRange(0, 10, 1, 1)

    def identity(of: TrainConfig) -> Any:
        return assembly.identity(of, subject.miniature, subject.manifest, steps)

    state = CheckpointState(0, 0, identity(config), masters={}, optimizer={})
    state.check_identity(identity(config))
    for name, changed in changes.items():
        try:
            state.check_identity(identity(changed), assembly.may_change)
        except CheckpointError as error:
            if name not in str(error):
                raise FaultFoundError(f"a changed {name} is refused without its name") from error
        else:
            raise FaultFoundError(f"a run would resume with another {name}, silently wrong")
    return f"a resume with another {', '.join(changes)} is refused by name"


def _with_draft(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, draft=replace(config.draft, **changes))
