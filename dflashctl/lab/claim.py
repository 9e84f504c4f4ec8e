"""Who may touch a state directory: one process at a time, or a running site.

The marker file is locked by ``up`` while it writes the directory, by the supervisor (which inherits
the lock) while the site lives, and by whoever clears the directory away. A lock ends with its last
holder, so one that is free means that nobody builds or runs anything there, whatever was killed.
"""

import errno
import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from dflashctl.errors import LabError
from dflashctl.lab.state import read_json, recorded_pids

MARKER = ".dflashctl-lab"
_CGROUPS = Path("/sys/fs/cgroup")
_TICK_S = 0.02


class Claim:
    """The lock on a state directory. Close it to let go; inheriting `fd` shares it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def refuse_foreign_directory(state: Path) -> None:
    """Raises: LabError when there is something at `state` that no lab made."""
    # One look: between two of them, another process makes the marker or clears the lab away.
    try:
        names = [path.name for path in state.iterdir()]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = ["a file"]
    if names and MARKER not in names:
        raise LabError(f"{state} exists and is not a lab's state directory")


def create(state: Path) -> Claim:
    """Make the directory and claim it.

    Raises: LabError when another process has just made or taken it.
    """
    try:
        state.mkdir(parents=True, mode=0o755)
    except FileExistsError:
        claim = None
    else:
        claim = take(state)  # or somebody took it for an empty directory that a killed one left
    if claim is None:
        raise in_use(state)
    return claim


def in_use(state: Path) -> LabError:
    """What to raise when somebody else holds the claim."""
    return LabError(
        f"another process is using {state}", hint=f"dflashctl lab status --state {state}"
    )


def take(state: Path) -> Claim | None:
    """Claim a directory that a lab has made; None while somebody else holds it."""
    try:
        fd = os.open(state / MARKER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # somebody has just cleared it away
        return None
    except BlockingIOError:
        os.close(fd)
        return None
    with suppress(OSError):
        if os.fstat(fd).st_ino == (state / MARKER).stat().st_ino:
            return Claim(fd)
    os.close(fd)  # it was cleared away, and perhaps made anew, between opening and locking
    return None


def clear_away(state: Path, deadline: float) -> None:
    """Remove what a site that has ended left in a claimed directory: cgroups, then files.

    Raises: LabError when a process of it still lives at `deadline` (of time.monotonic).
    """
    for name, pid in recorded_pids(state).items():
        while pid != os.getpid() and name in recorded_pids(state):
            if time.monotonic() > deadline:
                raise LabError(f"{name} (process {pid}) does not end", hint=f"kill -KILL {pid}")
            time.sleep(_TICK_S)
    cgroup = read_json(state / "lab.json").get("cgroup")
    if cgroup:
        _remove_cgroups(cgroup, deadline)
    # The marker goes last: killed in between, the rest is still known as a lab's.
    for path in sorted(state.iterdir(), key=lambda p: p.name == MARKER):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        state.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # somebody has claimed it meanwhile, and clears it away
            raise


def _remove_cgroups(name: str, deadline: float) -> None:
    """Remove a lab's cgroups. LXC made them below the root or below the cgroup of some process."""
    tops = []
    for directory, below, _ in os.walk(_CGROUPS):
        if name in below:
            below.remove(name)
            tops.append(Path(directory, name))
    for top in tops:
        for directory, _, _ in os.walk(top, topdown=False):  # children first
            _remove_cgroup(Path(directory), deadline)


def _remove_cgroup(directory: Path, deadline: float) -> None:
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the kernel needs a moment to empty the cgroup of killed processes
            if time.monotonic() > deadline:
                return
            time.sleep(_TICK_S)
        else:
            return
