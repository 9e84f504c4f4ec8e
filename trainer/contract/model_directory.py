"""What is wrong with a local model directory: missing, half copied, or of a kind not supported.

Only names, sizes and headers are read, so that 50 GB are looked through in milliseconds. Standard
library alone: ``launch`` runs this file in the container before GPUs are taken, and the trainer
imports it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
COPY = "copy the model again, whole"

_LFS_MARK = b"version https://git-lfs.github.com/spec/"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


class Fault(NamedTuple):
    """What is wrong, naming the file, and the next step."""

    text: str
    hint: str


def faults(directory: Path) -> list[Fault]:
    """Return everything that keeps a directory from being loaded as a target, [] when it is whole.

    Weights are safetensors: one file, or the shards of an index. What cannot be read is a fault.
    """
    return [*_config_faults(directory), *_tokenizer_faults(directory), *_weight_faults(directory)]


def _config_faults(directory: Path) -> Iterator[Fault]:
    if (directory / ADAPTER).exists():
        text = f"{ADAPTER} is there: an adapter (LoRA) is no target by itself"
        yield Fault(text, "merge the adapter into its base model and name the merged directory")
    config, fault = _json_object(directory / CONFIG)
    if fault is not None:
        yield fault
        return
    if not isinstance(config.get("model_type"), str):
        yield Fault(f"{CONFIG} names no model_type", COPY)
    for part in (config, config.get("text_config")):
        quantised = part.get("quantization_config") if isinstance(part, Mapping) else None
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
            yield Fault(
                f"{CONFIG} says that the weights are quantised ({method or 'method not named'})",
                "name a directory with float32, bfloat16 or float16 weights",
            )
            return


def _tokenizer_faults(directory: Path) -> Iterator[Fault]:
    found = [directory / name for name in TOKENIZERS if (directory / name).exists()]
    if not found:
        yield Fault(f"{TOKENIZERS[0]} is missing", COPY)
    for path in found:
        held, fault = _json_object(path) if path.suffix == ".json" else ({}, _plain_fault(path))
        if fault is None and path.name == TOKENIZERS[0] and "model" not in held:
            fault = Fault(f"{path.name} is no tokenizer: it holds no model", COPY)
        if fault is not None:
            yield fault


def _weight_faults(directory: Path) -> Iterator[Fault]:
    """Look at one file, else at the shards of the index: the order in which transformers looks."""
    if (directory / WEIGHTS).exists():
        yield from _shard_faults(directory / WEIGHTS, ())
        return
    if not (directory / INDEX).exists():
        yield _without_weights(directory)
        return
    index, fault = _json_object(directory / INDEX)
    if fault is not None:
        yield fault
        return
    wanted = index.get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        yield Fault(f"{INDEX} is no index of weights: it has no weight_map", COPY)
        return
    for shard in sorted({str(name) for name in wanted.values()}):
        yield from _shard_faults(directory / shard, [k for k, v in wanted.items() if v == shard])


def _without_weights(directory: Path) -> Fault:
    shards = sorted(directory.glob("model-*.safetensors"))
    if shards:
        return Fault(f"{INDEX} is missing, the list of {shards[0].name} and the like", COPY)
    if any(directory.glob("pytorch_model*.bin")):
        text = "pytorch_model.bin is there, but no safetensors"
        return Fault(text, "load it with transformers and save_pretrained it once")
    return Fault(f"{WEIGHTS} is missing", COPY)


def _shard_faults(path: Path, wanted: Any) -> Iterator[Fault]:
    """Compare a safetensors file's size and tensors with its own header and with the index."""
    fault = _plain_fault(path)
    if fault is not None:
        yield fault
        return
    size_bytes = path.stat().st_size
    try:
        header, needed_bytes = _header(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{path.name} is damaged or half copied ({size_bytes} bytes; {error})"
        yield Fault(text, COPY)
        return
    if size_bytes != needed_bytes:
        text = f"{path.name} is damaged or half copied ({size_bytes} of {needed_bytes} bytes)"
        yield Fault(text, COPY)
    missing = sorted(set(wanted) - set(header))
    if missing:
        text = f"{path.name} lacks {len(missing)} tensors of {INDEX}, first {missing[0]}"
        yield Fault(text, COPY)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return (tensors of the file, bytes that it must have). Raises: ValueError and the like."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError("no header of safetensors")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError("its header is cut off")
    tensors = dict(json.loads(text))
    tensors.pop("__metadata__", None)
    end = max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
    return tensors, _LENGTH_BYTES + length + end


def _json_object(path: Path) -> tuple[dict[str, Any], Fault | None]:
    fault = _plain_fault(path)
    if fault is not None:
        return {}, fault
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return {}, Fault(f"{path.name} is damaged or half copied: {error}", COPY)
    if not isinstance(found, dict):
        return {}, Fault(f"{path.name} is no JSON object", COPY)
    return found, None


def _plain_fault(path: Path) -> Fault | None:
    """Return what is wrong with any file: absent, empty, a pointer of Git LFS, not readable."""
    try:
        if not path.is_file():
            return Fault(f"{path.name} is missing", COPY)
        if path.stat().st_size == 0:
            return Fault(f"{path.name} is empty (0 bytes)", COPY)
        with path.open("rb") as stream:
            if stream.read(len(_LFS_MARK)) == _LFS_MARK:
                text = f"{path.name} is a pointer of Git LFS, not the file itself"
                return Fault(text, f"git lfs pull in the clone, or {COPY}")
    except OSError as error:
        return Fault(f"{path.name} cannot be read: {error.strerror}", COPY)
    return None
