"""The files of an exported directory: config.json, weights in one file or in shards, README.md.

A directory appears whole or not at all. Headers are read without the weights; a shard that is
missing, half copied or not the one the index names is told by its name.
"""

import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.contract.durable import sync
from trainer.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "README.md"
MAX_SHARD_BYTES = 5_000_000_000  # as the hub's tools split
# Names of safetensors headers -> names of torch and of config.json.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file. where: ``file`` or ``file:key``."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. dtype: torch's name."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class TensorFiles:
    """The tensors of a directory, read one by one; ``problems`` says what the files lack."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.infos: dict[str, TensorInfo] = {}
        self.problems: list[Problem] = []
        if (directory / WEIGHTS).is_file() or not (directory / INDEX).is_file():
            self.infos = self._headers(WEIGHTS)
        else:
            self._read_index()

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU."""
        info = self.infos[name]
        with safe_open(self.directory / info.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        """Return every tensor. Raises: CheckpointError when a file is missing or damaged."""
        if self.problems:
            told = "; ".join(str(problem) for problem in self.problems[:3])
            raise CheckpointError(f"{self.directory}: {told}; copy the export again, whole")
        tensors: dict[str, Tensor] = {}
        for file_name in sorted({info.file for info in self.infos.values()}):
            with safe_open(self.directory / file_name, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors

    def _headers(self, file_name: str) -> dict[str, TensorInfo]:
        try:
            with safe_open(self.directory / file_name, framework="pt") as file:
                return {
                    name: _info(file_name, file.get_slice(name))
                    for name in file.keys()  # noqa: SIM118 - it is no mapping
                }
        except (OSError, SafetensorError) as error:
            self.problems.append(Problem(file_name, f"cannot be read ({error})"))
            return {}

    def _read_index(self) -> None:
        try:
            index = json.loads((self.directory / INDEX).read_text())
            placed = {str(name): str(file) for name, file in index["weight_map"].items()}
            total = index["metadata"]["total_size"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.problems.append(Problem(INDEX, f"is not an index of weights ({error!r})"))
            return
        for file_name in sorted(set(placed.values())):
            if Path(file_name).name != file_name:
                self.problems.append(Problem(INDEX, f"names {file_name!r}, which is no plain file"))
                continue
            self.infos |= self._headers(file_name)
        for name in sorted(placed.keys() | self.infos):
            found = self.infos.get(name)
            if found is None or placed.get(name) != found.file:
                here = "no file" if found is None else found.file
                wanted = placed.get(name, "nowhere")
                self.problems.append(Problem(f"{INDEX}:{name}", f"says {wanted}, is in {here}"))
        held = sum(info.num_bytes for info in self.infos.values())
        if held != total:
            where = f"{INDEX}:metadata.total_size"
            self.problems.append(Problem(where, f"says {total} bytes, the shards hold {held}"))


def _info(file_name: str, header: Any) -> TensorInfo:
    shape = tuple(header.get_shape())
    dtype = _DTYPES.get(header.get_dtype(), str(header.get_dtype()))
    width = {"64": 8, "32": 4, "16": 2}.get(dtype[-2:], 1)
    count = width
    for size in shape:
        count *= size
    return TensorInfo(file_name, shape, dtype, count)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: CheckpointError naming the file and what is wrong."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a DFlash configuration ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a DFlash configuration ({type(raw).__name__})")
    return raw


def write_directory(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory, replacing an export that is there in one step.

    Weights above ``max_shard_bytes`` are split into shards with an index. A kill leaves the old
    directory or the new one. Raises: CheckpointError when the place holds something else.
    """
    refuse_other(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    recover(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = list(_shards(tensors, max_shard_bytes))
    names = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        placed = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        save_file({t: tensors[t] for t in shard}, partial / name, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if card is not None:
        (partial / CARD).write_text(card, encoding="utf-8")
    for path in (*sorted(partial.iterdir()), partial):
        sync(path)
    _swap(partial, directory)


def refuse_other(directory: Path) -> None:
    """Raise CheckpointError when ``directory`` is there and is no export: it is not overwritten."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; choose another directory")
    if any(directory.iterdir()) and not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} exists and is not an export; choose another directory")


def recover(directory: Path) -> None:
    """Put the old export back where a kill between two renames left none at its place."""
    old = directory.with_name(f".{directory.name}.old")
    if old.is_dir() and not directory.exists():
        old.rename(directory)


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[list[str]]:
    """Yield names of tensors that fit a file together; a larger tensor has a file of its own."""
    shard: list[str] = []
    held = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        if shard and held + size > most:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    yield shard


def _swap(new: Path, place: Path) -> None:
    """Put ``new`` at ``place`` and remove what was there."""
    if not place.exists():
        new.rename(place)
    elif _exchange(new, place):
        shutil.rmtree(new, ignore_errors=True)
    else:  # a file system that cannot exchange: ``recover`` mends what a kill leaves here
        old = place.with_name(f".{place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
        new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    sync(place.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system cannot (os.rename does not offer it).

    Source: renameat2(2).
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    status: int = renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return status == 0
