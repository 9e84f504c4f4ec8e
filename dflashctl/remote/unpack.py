"""Unpacks a release from a tar on stdin, checks every byte of it and puts it in place by rename.

argv[1]: {"workspace", "digest", "files": {path: [mode, sha256]}}. The tar goes to
``releases/.partial-PID-TICKS``; a release appears under its digest whole or not at all. Partial
directories whose process is gone are removed first. Prints one JSON object, with ``error`` when
something was wrong.
"""

import errno
import json
import os
import shutil
import sys
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflashctl.remote.archive import BadArchiveError, members, write_synced
from dflashctl.remote.processes import start_ticks


def remove_stale(releases: Path) -> int:
    """Remove what killed deploys left behind; returns how many."""
    count = 0
    for path in releases.glob(".partial-*"):
        words = path.name.split("-")
        if len(words) == 3 and words[1].isdigit() and start_ticks(int(words[1])) == int(words[2]):
            continue  # another deploy is at work
        shutil.rmtree(path, ignore_errors=True)
        count += 1
    return count


def sync_directories(root: Path) -> None:
    """Make the names below ``root`` as durable as the bytes."""
    for directory in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        handle = os.open(directory, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def unpack(partial: Path, files: dict[str, Any]) -> int:
    """Write the members of the tar on stdin below ``partial``; returns their number.

    Raises: BadArchiveError.
    """
    for name, stream in members(files):
        mode, wanted = files[name]
        found = write_synced(partial / name, stream, mode)
        if found != wanted:
            raise BadArchiveError(f"{name}: sha256 {found}, expected {wanted}")
    sync_directories(partial)
    return len(files)


def identity(path: Path) -> int | None:
    """Return what tells a directory from another of its name; None where there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return None


def put_in_place(partial: Path, release: Path, damaged: int | None) -> None:
    """Rename ``partial`` to ``release``; the damaged one of this identity is set aside first.

    One that another deploy has put there meanwhile is whole, and a run may use it: it stays.
    """
    aside = partial.with_name(f"{partial.name}-replaced")
    if damaged is not None and identity(release) == damaged:
        with suppress(FileNotFoundError):  # another deploy was faster
            release.rename(aside)
    try:
        partial.rename(release)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    shutil.rmtree(aside, ignore_errors=True)
    handle = os.open(release.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Unpack, verify, rename."""
    releases = Path(arguments["workspace"]) / "releases"
    releases.mkdir(parents=True, exist_ok=True)
    removed = remove_stale(releases)
    release = releases / arguments["digest"]
    before = identity(release)
    partial = releases / f".partial-{os.getpid()}-{start_ticks(os.getpid())}"
    partial.mkdir()
    try:
        written = unpack(partial, arguments["files"])
        put_in_place(partial, release, before)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"written": written, "removed_partials": removed}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except (BadArchiveError, tarfile.TarError, EOFError) as problem:
        print(json.dumps({"error": {"kind": "mismatch", "message": f"bad archive: {problem}"}}))
        sys.exit(1)
    except OSError as problem:
        print(json.dumps({"error": {"kind": "failed", "message": f"cannot unpack: {problem}"}}))
        sys.exit(1)
