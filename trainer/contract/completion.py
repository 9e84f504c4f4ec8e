"""Complete or half made: how a checkpoint directory says that every file of it arrived.

A checkpoint is written as ``step_00000100.partial``, COMPLETE.json goes in last, and a rename makes
it ``step_00000100``. A directory without a matching COMPLETE.json is what a kill left behind.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.errors import CompletionError

VERSION = 1
COMPLETE = "COMPLETE.json"
PARTIAL_SUFFIX = ".partial"
_STEP = re.compile(r"step_(\d{8,})\Z")
_CHUNK_BYTES = 1 << 20


def step_directory(step: int) -> str:
    """Return the name of the checkpoint directory of ``step``."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint directory's name; None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def digest_file(path: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def describe(directory: Path, names: Iterable[str]) -> str:
    """Return the text of COMPLETE.json for these files of ``directory``."""
    files = {
        name: {
            "size_bytes": (directory / name).stat().st_size,
            "sha256": digest_file(directory / name),
        }
        for name in sorted(names)
    }
    return json.dumps({"v": VERSION, "files": files}, indent=1, sort_keys=True) + "\n"


def verify(directory: Path, *, digests: bool) -> None:
    """Check the directory against its COMPLETE.json: sizes always, sha256 with ``digests``.

    Raises: CompletionError naming the file and what is wrong with it.
    """
    files = _read(directory)
    for name, facts in files.items():
        path = directory / name
        if not path.is_file():
            raise CompletionError(f"{name} is missing")
        size = path.stat().st_size
        if size != facts["size_bytes"]:
            raise CompletionError(f"{name} has {size} bytes, not {facts['size_bytes']}")
        if digests and digest_file(path) != facts["sha256"]:
            raise CompletionError(f"{name} has another sha256 than {COMPLETE} says")


def _read(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
        version, files = raw["v"], raw["files"]
        facts = {
            str(name): {"size_bytes": int(fact["size_bytes"]), "sha256": str(fact["sha256"])}
            for name, fact in files.items()
        }
    except FileNotFoundError as error:
        raise CompletionError(f"no {COMPLETE}: the writer was stopped") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompletionError(f"{COMPLETE} is not readable: {error}") from error
    if version != VERSION:
        raise CompletionError(f"{COMPLETE} has version {version}, this reader knows {VERSION}")
    return facts


@dataclass(frozen=True)
class Skipped:
    """A checkpoint directory that cannot be used, and why."""

    path: Path
    reason: str


def latest_complete(root: Path, *, digests: bool = False) -> tuple[Path | None, list[Skipped]]:
    """Find the newest complete checkpoint below ``root``.

    Returns it (None when there is none) and the newer directories that were skipped, newest
    first, with reasons; half-written ``.partial`` directories are named too.
    """
    skipped: list[Skipped] = []
    entries = list(root.iterdir()) if root.is_dir() else []
    for path in sorted(entries, key=lambda p: step_of(_stem(p)) or -1, reverse=True):
        if step_of(_stem(path)) is None or not path.is_dir():
            continue
        if path.name.endswith(PARTIAL_SUFFIX):
            skipped.append(Skipped(path, "half written: the writer was stopped"))
            continue
        try:
            verify(path, digests=digests)
        except CompletionError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        return path, skipped
    return None, skipped


def ends_at(root: Path, step: int | None) -> bool:
    """Say whether the newest complete checkpoint below ``root`` is that of a step."""
    newest, _ = latest_complete(root)
    return newest is not None and step_of(newest.name) == step


def _stem(path: Path) -> str:
    return path.name.removesuffix(PARTIAL_SUFFIX)
