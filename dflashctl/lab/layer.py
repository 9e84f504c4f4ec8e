"""The upper layer of an overlay file system: files to add, directories to hide."""

import os
from pathlib import Path

# What a host or container must not see of this machine. Below these, only what is exposed shows.
HIDDEN = (
    *("root", "home", "tmp", "work", "srv", "opt", "workspace", "mnt", "media", "run"),
    *("var/tmp", "var/lib/lxc", "etc/ssh"),
)
_MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}


def is_hidden(path: str) -> bool:
    """Whether an absolute path lies in or is a directory that the lab hides."""
    return any(path == f"/{d}" or path.startswith(f"/{d}/") for d in HIDDEN)


def hide(layer: Path) -> None:
    """Make the hidden directories empty in what will be seen through `layer`."""
    for name in HIDDEN:
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
