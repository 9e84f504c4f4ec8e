"""Says what a workspace holds of a release, without changing anything.

argv[1]: {"workspace", "digest", "files": {path: sha256}}. Prints one JSON object: ``state`` is
present, absent or damaged (``differing`` names the files), ``newest`` the files of the newest
other release, ``free_bytes`` the room in the workspace.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def digests(release: Path) -> dict[str, str] | None:
    """Return sha256 by relative path; bytecode caches are no part of a release.

    None when there is none, or a gc has removed it under this look.
    """
    found = {}
    try:
        for path in sorted(release.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                data = path.read_bytes()
                found[path.relative_to(release).as_posix()] = hashlib.sha256(data).hexdigest()
    except FileNotFoundError:
        return None
    return found if release.is_dir() else None


def newest(releases: Path) -> dict[str, Any] | None:
    """Return digest and files of the release that was unpacked last."""
    ages = []
    for path in releases.glob("[0-9a-f]*"):
        with suppress(FileNotFoundError):
            if path.is_dir():
                ages.append((path.stat().st_mtime, path))
    if not ages:
        return None
    latest = max(ages)[1]
    files = digests(latest)
    return None if files is None else {"digest": latest.name, "files": files}


def free_bytes(directory: Path) -> int:
    """Return the free room of the nearest directory that exists."""
    while not directory.exists():
        directory = directory.parent
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compare the release with the files that it should hold."""
    releases = Path(arguments["workspace"]) / "releases"
    release = releases / arguments["digest"]
    state, differing = "absent", []
    there, wanted = digests(release), arguments["files"]
    if there is not None:
        differing = sorted(p for p in there.keys() | wanted if there.get(p) != wanted.get(p))
        state = "damaged" if differing else "present"
    other = newest(releases) if state != "present" else None
    return {
        "state": state,
        "differing": differing,
        "newest": other,
        "free_bytes": free_bytes(releases),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
