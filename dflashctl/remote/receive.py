"""Receives single files into a directory; each appears by rename, whole and verified.

argv[1]: {"directory", "action": "compare" | "receive"}. The first line on stdin is a JSON list of
[path, mode, sha256, size]; for ``receive`` a tar of exactly those files follows. Prints one JSON
object: ``wanted`` (paths that differ) or ``written``; ``error`` when something was wrong.
"""

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from dflashctl.remote.archive import BadArchiveError, members, write_synced
from dflashctl.remote.digests import digest_of


def compare(directory: Path, entries: list[Any]) -> list[str]:
    """Return the paths whose file is absent or different."""
    wanted = []
    for name, _mode, sha256, size in entries:
        path = directory / name
        same = path.is_file() and path.stat().st_size == size and digest_of(path) == sha256
        if not same:
            wanted.append(name)
    return wanted


def receive_one(path: Path, stream: Any, mode: int, sha256: str) -> None:
    """Write one file by temporary name; raises BadArchiveError when it is not what was sent."""
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a killed push whose pid was this one
    try:
        found = write_synced(temporary, stream, mode)
        if found != sha256:
            raise BadArchiveError(f"{path}: sha256 {found}, expected {sha256}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def remove_stale(directory: Path, entries: list[Any]) -> None:
    """Remove partial files of these names that a killed push left, unless its process lives."""
    for name, *_rest in entries:
        path = directory / name
        for partial in path.parent.glob(f".{path.name}.partial-*"):
            pid = partial.name.rpartition("-")[2]
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
                partial.unlink(missing_ok=True)


def receive(directory: Path, entries: list[Any]) -> int:
    """Write every listed file from the tar on stdin; returns their number.

    Raises: BadArchiveError.
    """
    remove_stale(directory, entries)
    listed = {entry[0]: entry for entry in entries}
    for name, stream in members(listed):
        _name, mode, sha256, _size = listed[name]
        receive_one(directory / name, stream, mode, sha256)
    return len(listed)


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compare or receive."""
    directory = Path(arguments["directory"])
    entries = json.loads(sys.stdin.buffer.readline())
    if arguments["action"] == "compare":
        return {"wanted": compare(directory, entries)}
    return {"written": receive(directory, entries)}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except (BadArchiveError, tarfile.TarError, EOFError) as problem:
        print(json.dumps({"error": {"kind": "mismatch", "message": f"bad archive: {problem}"}}))
        sys.exit(1)
    except OSError as problem:
        print(json.dumps({"error": {"kind": "failed", "message": f"cannot write: {problem}"}}))
        sys.exit(1)
