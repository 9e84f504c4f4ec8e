"""The upper layer of an overlay file system: files to add, directories to hide."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

# What a host and a container share with this machine; of the rest only what is exposed shows.
_SYSTEM = (
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys"),
    *("usr", "var"),
)
# Hidden, and there in every host and container whether this machine has them or not.
_EMPTY = (
    *("root", "home", "tmp", "srv", "opt", "workspace", "mnt", "media", "run"),
    *("var/tmp", "var/lib/lxc", "etc/ssh"),
)
_MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}


def hidden(root: Path = Path("/")) -> list[str]:
    """Directories, relative to `root`, of which a host or container must see nothing."""
    others = (p.name for p in root.iterdir() if p.is_dir() and not p.is_symlink())
    return [*_EMPTY, *(name for name in sorted(others) if name not in (*_SYSTEM, *_EMPTY))]


def is_hidden(path: str, mount_points: Iterable[str]) -> bool:
    """Whether an absolute path cannot be seen through an overlay over "/".

    It may lie in a directory that the lab hides, or on another file system, which overlayfs does
    not cross into. `mount_points` are those of this machine.
    """
    tops = [*(f"/{name}" for name in hidden()), *(m for m in mount_points if m != "/")]
    return any(path == top or path.startswith(top + "/") for top in tops)


def mount_points() -> list[str]:
    """Where file systems are mounted on this machine."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    fields = (line.split()[4] for line in lines.splitlines())
    # A blank in a path is written in octal; see proc(5).
    return [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), field) for field in fields]


def hide(layer: Path) -> None:
    """Make the hidden directories empty in what will be seen through `layer`."""
    for name in hidden():
        directory = layer / name
        directory.mkdir(parents=True, exist_ok=True)
        # An opaque directory: overlayfs does not look below it.
        os.setxattr(directory, "trusted.overlay.opaque", b"y")
        directory.chmod(_MODES.get(name, 0o755))


def add_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file, and the directories above it, into a layer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
