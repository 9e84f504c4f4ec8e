"""The compile caches of a run: one writer at a time, and a file of them for hosts of the same kind.

An artefact file is what torch's caches hold after a warm-up (contract.compile_artifacts).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer import torch_compiler
from trainer.contract.compile_artifacts import (
    content_of,
    framed,
    may_be_written,
    require_kind,
    unframed,
)
from trainer.contract.durable import write_by_rename
from trainer.contract.errors import ConfigError
from trainer.contract.manifest import Manifest

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
        raise nothing_to_save(path)
    try:
        write_by_rename(path, framed(data, manifest))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return len(data)


def nothing_to_save(path: Path) -> ConfigError:
    """Return the error of a warm-up that compiles nothing."""
    return ConfigError(
        f"{path}: nothing is compiled, so there is nothing to save; leave it out, or"
        " set run.device to cuda and compile.mode to auto"
    )


def require_place(path: Path) -> None:
    """Refuse a file that could not be written at the end of a warm-up. Raises: ConfigError."""
    if not may_be_written(path):
        raise ConfigError(f"{path}: no file can be written there; name one in a directory of yours")


def load(path: Path, manifest: Manifest) -> int:
    """Put an artefact file into the caches of this run; returns the size in bytes.

    Raises: ArtifactsError when it is damaged, or made for another torch, driver or GPU; ConfigError
    when it cannot be read.
    """
    try:
        content = content_of(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    told, data = unframed(content, path)
    require_kind(told, path, manifest)
    if not torch_compiler.load_artifacts(data):
        raise ConfigError(f"{path}: torch cannot read these artefacts; warm up here")
    return len(data)
