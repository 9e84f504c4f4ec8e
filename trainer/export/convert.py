"""Convert an export between the z-lab and the speculators layout, both ways without loss.

There and back gives the same config.json and the same bits in every tensor; what a layout cannot
say is refused by the name of its key. The model card goes along.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.export import speculators
from trainer.export.files import (
    CARD,
    CONFIG,
    MAX_SHARD_BYTES,
    TensorFiles,
    read_json,
    write_directory,
)
from trainer.export.target_files import TargetFiles
from trainer.export.zlab import draft_config, refuse, tensor_problems, tensor_shapes

LAYOUTS = ("zlab", "speculators")


@dataclass(frozen=True)
class Conversion:
    """What was written. layout: of the directory; shift: added to every target layer id."""

    directory: Path
    layout: str
    num_tensors: int
    shift: int


def convert(
    source: Path,
    directory: Path,
    layout: str,
    target: Path | None = None,
    *,
    verifier: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Write ``source`` in another layout to ``directory``.

    ``target`` is the target model's directory: its embedding and head become part of the
    speculators layout, whose readers load the target as ``verifier`` (a hub id; ``target`` when
    left out). Raises: CheckpointError or TargetError naming the file and the key.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"--max-shard-bytes {max_shard_bytes}: at least 1")
    if source.resolve() == directory.resolve():
        raise CheckpointError(f"{directory} is the source itself; choose another directory")
    raw = read_json(source / CONFIG)
    found = "speculators" if speculators.is_speculators(raw) else "zlab"
    if layout not in LAYOUTS or layout == found:
        raise CheckpointError(f"{source} is in the {found} layout already; nothing to convert")
    opened = None if target is None else TargetFiles.open(target)
    if layout == "speculators":
        made, config = _to_speculators(source, raw, opened, verifier)
    else:
        made, config = _to_zlab(source, raw, opened)
    card = source / CARD
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else None
        write_directory(directory, made, config, card=text, max_shard_bytes=max_shard_bytes)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{card}: is not UTF-8 ({error}); save it as UTF-8") from error
    except (OSError, SafetensorError) as error:  # a full disk, a place that may not be written
        raise CheckpointError(
            f"{directory}: cannot be written ({error}); mend this or choose another directory"
        ) from error
    return Conversion(directory, layout, len(made), 1 if layout == "speculators" else -1)


def _to_speculators(
    source: Path, raw: Mapping[str, Any], target: TargetFiles | None, verifier: str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config = draft_config(raw, source / CONFIG)
    config.check()
    if target is None:
        raise CheckpointError(
            f"{source}: the speculators layout holds the target's embedding and head;"
            " name the target's directory with --target"
        )
    named = verifier or str(target.directory)
    made = speculators.to_speculators(raw, target, named, source / CONFIG)
    tensors = TensorFiles(source).read_all()
    refuse(tensor_problems(tensors, tensor_shapes(config), config.dtype), str(source))
    rows = (config.vocab_size, config.hidden_size)
    for info in (target.embedding, target.head):
        if info.shape != rows:
            raise CheckpointError(
                f"{target.directory / info.file}: {list(info.shape)} is not the draft's"
                f" vocab_size x hidden_size {list(rows)}; is this the target it was trained for?"
            )
    dtype = getattr(torch, config.dtype)
    return speculators.speculators_tensors(tensors, target, dtype), made


def _to_zlab(
    source: Path, raw: Mapping[str, Any], target: TargetFiles | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    num_layers = None if target is None else target.num_layers
    made = speculators.to_zlab(raw, num_layers, source / CONFIG)
    config = draft_config(made, source / CONFIG)
    config.check()
    tensors = TensorFiles(source).read_all()
    mapping = tensors.get(speculators.TO_TARGET)
    if mapping is not None and bool(mapping.any()):
        raise CheckpointError(
            f"{source}: d2t moves tokens, and the z-lab layout drafts over the target's own ids"
        )
    body = {name: value for name, value in tensors.items() if name not in speculators.BESIDE}
    refuse(tensor_problems(body, tensor_shapes(config), config.dtype), str(source))
    return body, made
