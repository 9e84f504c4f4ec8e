"""A file of compile caches: what it is good for, the digest of its bytes, and these.

The trainer writes and loads it; dflashctl looks into it before it sends one. Torch reads the bytes
back as Python objects, so nobody should load a file that he has not made.
"""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.contract.errors import ArtifactsError
from trainer.contract.manifest import Manifest

_MAGIC = b"DFLASH-CACHE 1\n"


def may_be_written(path: Path) -> bool:
    """Say whether a file can appear at ``path`` by rename, and takes the place of none but a file.

    A device or a pipe would be replaced by it.
    """
    try:
        is_free = path.is_file() or not path.exists()
    except OSError:  # too long a name
        return False
    return is_free and os.access(path.parent, os.W_OK)


def content_of(path: Path) -> bytes:
    """Return what a file holds. Raises: OSError; for a pipe or a device, too, which have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "Not a file", str(path))
    return path.read_bytes()


def framed(data: bytes, manifest: Manifest) -> bytes:
    """Return the content of a file: its head, which says for what hosts, and ``data``."""
    head = _kind(manifest) | {"sha256": hashlib.sha256(data).hexdigest()}
    return _MAGIC + json.dumps(head).encode() + b"\n" + data


def unframed(content: bytes, path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the head and the data of ``framed``. Raises: ArtifactsError when it is not whole."""
    if not content.startswith(_MAGIC):
        raise ArtifactsError(f"{path} is no file that warmup --save-artifacts has written")
    head, _, data = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        told = dict(json.loads(head))
    except (ValueError, TypeError, RecursionError):
        raise ArtifactsError(f"{path} is damaged: its head is no JSON; copy it again") from None
    if told.get("sha256") != hashlib.sha256(data).hexdigest():
        raise ArtifactsError(f"{path} is damaged: its sha256 is not the noted one; copy it again")
    return told, data


def require_kind(told: dict[str, Any], path: Path, manifest: Manifest) -> None:
    """Raise ArtifactsError unless a file with this head was made on hosts like the run's."""
    for name, value in _kind(manifest).items():
        if told.get(name) != value:
            raise ArtifactsError(
                f"{path} was made for {name} {told.get(name)}, this run has {value}; warm up here"
            )


def _kind(manifest: Manifest) -> dict[str, Any]:
    """Return what two hosts must share to share what was compiled."""
    names = sorted({gpu.name for gpu in manifest.gpus if gpu.name})
    return {
        "torch": manifest.packages.get("torch"),
        "driver": manifest.driver,
        "gpus": names,
    }
