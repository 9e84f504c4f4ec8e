"""The compile caches of a run: one writer at a time, and a file of them for hosts of the same kind.

An artefact file is what torch's caches hold after a warm-up. It is read back by torch as Python
objects: load only files that you have made.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer import torch_compiler
from trainer.contract.durable import write_by_rename
from trainer.contract.errors import ConfigError
from trainer.contract.manifest import Manifest

_MAGIC = b"DFLASH-CACHE 1\n"
LOCK = "warmup.lock"


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold the lock of a cache directory; one that this process was started with counts.

    Raises: ConfigError when another process holds it, or when nothing can be written there.
    """
    path = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = path.open("ab")
    except OSError as error:
        raise ConfigError(f"cache directory {directory}: {error.strerror}") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _was_handed_down(path, lock.fileno()):
                raise ConfigError(
                    f"another warm-up fills {directory} (it holds {LOCK}); wait for its end"
                ) from None
        yield


def _was_handed_down(path: Path, own: int) -> bool:
    """Say whether this process has the file open twice: whoever started it has locked it."""
    wanted = path.stat()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = entry.stat()
        except OSError:  # a socket, or the descriptor of the listing itself
            continue
        if entry.name != str(own) and os.path.samestat(found, wanted):
            return True
    return False


def save(path: Path, manifest: Manifest) -> int:
    """Write what this process compiled or loaded; returns the size in bytes.

    Raises: ConfigError when there is nothing, or when the file cannot be written.
    """
    data = torch_compiler.save_artifacts()
    if data is None:
        raise ConfigError(f"{path}: nothing was compiled, so there is nothing to save")
    try:
        write_by_rename(path, framed(data, manifest))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return len(data)


def require_place(path: Path) -> None:
    """Refuse a file that could not be written at the end of a warm-up. Raises: ConfigError."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: no file can be written there; name one in a directory of yours")


def load(path: Path, manifest: Manifest) -> int:
    """Put an artefact file into the caches of this run; returns the size in bytes.

    Raises: ConfigError when it is damaged, or made for another torch or GPU.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    data = unframed(content, path, manifest)
    if not torch_compiler.load_artifacts(data):
        raise ConfigError(f"{path}: torch cannot read these artefacts; warm up here")
    return len(data)


def framed(data: bytes, manifest: Manifest) -> bytes:
    """Return the content of an artefact file: what it is good for, its digest, and ``data``."""
    head = _kind(manifest) | {"sha256": hashlib.sha256(data).hexdigest()}
    return _MAGIC + json.dumps(head).encode() + b"\n" + data


def unframed(content: bytes, path: Path, manifest: Manifest) -> bytes:
    """Return ``data`` of ``framed`` where it is whole and of the run's kind.

    Raises: ConfigError.
    """
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is no file that warmup --save-artifacts has written")
    head, _, data = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        told = dict(json.loads(head))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged: its head is no JSON; copy it again") from None
    if told.get("sha256") != hashlib.sha256(data).hexdigest():
        raise ConfigError(f"{path} is damaged: its sha256 is not the noted one; copy it again")
    for name, value in _kind(manifest).items():
        if told.get(name) != value:
            raise ConfigError(
                f"{path} was made for {name} {told.get(name)}, this run has {value}; warm up here"
            )
    return data


def _kind(manifest: Manifest) -> dict[str, object]:
    """Return what two hosts must share to share what was compiled."""
    names = sorted({gpu.name for gpu in manifest.gpus if gpu.name})
    return {"torch": manifest.packages.get("torch"), "gpus": names}
