"""The sha256 of files; a part of programs of this package."""

import hashlib
from pathlib import Path

CHUNK_BYTES = 1 << 20


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
