"""The few Linux calls the lab needs and Python 3.11 lacks: mount, pivot_root, setns."""

import ctypes
import os
from pathlib import Path

MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MNT_DETACH = 2
CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str | Path, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount `source` on `target`.

    Raises: OSError that names both.
    """
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode()
    )
    _check(result, f"mount {source} on {target} ({kind} {options})")


def bind(source: str | Path, target: Path, *, recursive: bool = False) -> None:
    """Show `source` at `target` too; with `recursive` also what is mounted below it."""
    mount(source, target, "none", MS_BIND | (MS_REC if recursive else 0))


def pivot_into(root: Path) -> None:
    """Make `root` the root of this mount namespace and let go of the old one."""
    os.chdir(root)
    # Both arguments ".": the old root is stacked on the new one and detached; see pivot_root(2).
    _check(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def enter_network(namespace_fd: int) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    _check(_libc.setns(namespace_fd, CLONE_NEWNET), "setns of a network namespace")
