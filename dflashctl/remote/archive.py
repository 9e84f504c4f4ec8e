"""The tar that comes on stdin, held to its list; a part of ``unpack.py`` and ``receive.py``."""

import hashlib
import os
import sys
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

CHUNK_BYTES = 1 << 20


class BadArchiveError(Exception):
    """The tar is cut short, or its content is not what the list says."""


def members(listed: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and stream of each member: regular files, those of the list, each once.

    Raises: BadArchiveError, at the end where some are missing; tarfile.TarError, EOFError.
    """
    done = set()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            if not member.isreg() or member.name not in listed or member.name in done:
                raise BadArchiveError(f"unexpected member {member.name!r}")
            yield member.name, archive.extractfile(member)
            done.add(member.name)
    if missing := sorted(set(listed) - done):
        raise BadArchiveError(f"missing: {', '.join(missing[:5])}")


def write_synced(path: Path, stream: IO[bytes], mode: int) -> str:
    """Copy ``stream`` to a new file, fsync, and return the sha256 of what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as out:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fchmod(out.fileno(), mode)
        os.fsync(out.fileno())
    return digest.hexdigest()
