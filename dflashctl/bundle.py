"""The trainer as bytes: a reproducible tar of the installed ``trainer`` package, named by digest.

The digest is over the sorted (path, mode, sha256) list, so the same files give the same digest on
every machine, whether they come from a checkout or from a wheel.
"""

import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from dflashctl.errors import DflashctlError

_PACKAGE = "trainer"
_SUFFIXES = (".py", ".txt")


@dataclass(frozen=True)
class BundleFile:
    """One file: path relative to the release, POSIX mode, sha256, size."""

    path: str
    mode: int
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Bundle:
    """The files of one release; ``git_commit`` is None when they are not in a git checkout."""

    digest: str
    files: tuple[BundleFile, ...]
    git_commit: str | None
    git_dirty: bool | None
    contents: dict[str, bytes] = field(repr=False)

    def tar_bytes(self) -> bytes:
        """Return the tar: sorted names, times and owners zero, so equal files give equal bytes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for entry in self.files:
                member = tarfile.TarInfo(entry.path)
                member.size, member.mode = entry.size_bytes, entry.mode
                archive.addfile(member, io.BytesIO(self.contents[entry.path]))
        return buffer.getvalue()

    @property
    def requirements(self) -> str:
        """The pinned requirements of the trainer, as ``deploy --env`` installs them."""
        return self.contents[f"{_PACKAGE}/requirements.txt"].decode()

    @property
    def requirements_digest(self) -> str:
        """sha256 of the requirements; an environment in the workspace is found by it."""
        return hashlib.sha256(self.requirements.encode()).hexdigest()


def build_bundle(package: Path | None = None) -> Bundle:
    """Read the files of the installed trainer package, or of the directory ``package``.

    Raises: DflashctlError when the package or its requirements are not there.
    """
    root = package or _installed()
    contents: dict[str, bytes] = {}
    files: list[BundleFile] = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.suffix not in _SUFFIXES or not path.is_file() or "__pycache__" in relative.parts:
            continue
        name = f"{_PACKAGE}/{relative.as_posix()}"
        contents[name] = data = path.read_bytes()
        mode = 0o755 if data.startswith(b"#!") else 0o644  # the checkout's umask must not matter
        files.append(BundleFile(name, mode, hashlib.sha256(data).hexdigest(), len(data)))
    if f"{_PACKAGE}/requirements.txt" not in contents:
        raise DflashctlError(
            f"the trainer package in {root} has no requirements.txt",
            hint="the installation is incomplete: install dflashctl again",
        )
    files.sort(key=lambda entry: entry.path)
    listing = "".join(f"{f.path}\0{f.mode:o}\0{f.sha256}\n" for f in files)
    commit, dirty = _git_state(root)
    return Bundle(
        hashlib.sha256(listing.encode()).hexdigest(), tuple(files), commit, dirty, contents
    )


def _installed() -> Path:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DflashctlError(
            "the trainer package is not installed beside dflashctl",
            hint="install dflashctl again; it carries the trainer",
        )
    return Path(spec.submodule_search_locations[0])


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return commit and dirty flag of the package's files, or (None, None) outside a checkout."""
    # ls-files first: a wheel inside some other repository's tree is not that repository's code.
    if _git(root, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return None, None
    return commit.strip(), bool(changes.strip())


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
