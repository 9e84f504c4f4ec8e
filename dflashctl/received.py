"""Unpack the tar of ``remote/collect.py`` from a stream that is not trusted, and check it.

Only regular files under names that a run has are written, below a staging directory and never
through a link; sizes are bounded; what does not match the manifest's sha256 is not kept.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from dflashctl.errors import DflashctlError, MismatchError, RefusedError

MANIFEST = "pull-manifest.json"
MAX_FILES = 20_000
_MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_SUSPECT = "nothing of it was kept; look at the container before you go on"
_AGAIN = "run the same pull again; it brings only what is missing"
_MAX_HEADER_BYTES = 1 << 16  # a long name; a real one is a few hundred bytes
_ROOM = "make room or choose another --runs-dir, then run the same pull again"
_NEWER = "install a newer dflashctl"
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_NAME = re.compile(
    r"(?:(?:manifest|process|evaluation|exit|exit_\d+)\.json"
    r"|train_stdout_[A-Za-z][A-Za-z0-9_-]*\.log|runner_stderr\.log|metrics\.jsonl"
    r"|export/.+|checkpoints/step_\d+/.+)\Z"
)
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}\Z")


@dataclass(frozen=True)
class Fact:
    """A file as it was received, or as the manifest tells it."""

    size_bytes: int
    sha256: str


@dataclass
class Received:
    """What the stream brought: files in the staging directory, and the manifest at its end."""

    files: dict[str, Fact] = field(default_factory=dict)
    manifest: dict[str, dict[str, Any]] | None = None


def check_name(name: str) -> str:
    """Return ``name`` when a run may have such a file. Raises: MismatchError."""
    parts = name.split("/")
    good = all(_PART.match(part) and part not in (".", "..") for part in parts)
    if not good or not _NAME.match(name):
        raise MismatchError(
            f"the container sent a file under the name {name!r}, which no run has",
            code="hostile-archive",
            hint=_SUSPECT,
        )
    return name


def unpack(
    stream: IO[bytes], staging: Path, max_bytes: int, on_bytes: Callable[[int], None]
) -> Received:
    """Write the members of the tar below ``staging``; ``on_bytes`` gets the size of each block.

    Raises: MismatchError for a member that may not be there or a damaged tar, RefusedError beyond
    ``max_bytes``, DflashctlError when a file cannot be written.
    """
    received = Received()
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                if received.manifest is not None:
                    raise MismatchError(
                        f"{member.name!r} follows the manifest",
                        code="hostile-archive",
                        hint=_SUSPECT,
                    )
                source = _open(archive, member)
                if member.name == MANIFEST:
                    received.manifest = _read_manifest(source, member.size)
                    continue
                name = _admit(member, received, max_bytes)
                received.files[name] = _write(source, staging, name, on_bytes)
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        # tarfile lets the last two through: numbers that are none, headers upon headers.
        raise MismatchError(
            f"the archive is damaged: {error}", code="bad-archive", hint=_AGAIN
        ) from error
    return received


class _Member(tarfile.TarInfo):
    """A member; headers, which tarfile reads into memory whatever their size, are bounded."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the header in ``buf``. Raises: MismatchError for one that no pull needs."""
        member = super().frombuf(buf, encoding, errors)
        most_bytes = _MAX_HEADER_BYTES if member.type in _HEADERS else member.size
        if not 0 <= member.size <= most_bytes:
            raise MismatchError(
                f"{member.name!r} claims {member.size} bytes",
                code="hostile-archive",
                hint=_SUSPECT,
            )
        if member.type in (tarfile.GNUTYPE_SPARSE, tarfile.XGLTYPE):  # the latter add up
            raise _not_regular(member)
        return member

    def _proc_gnusparse_10(self, *_: Any) -> None:
        """Refuse a map of holes before it is read: tarfile's own reader has no bound."""
        raise _not_regular(self)


def _not_regular(member: tarfile.TarInfo) -> MismatchError:
    return MismatchError(
        f"{member.name!r} is not a regular file", code="hostile-archive", hint=_SUSPECT
    )


def _open(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Return the content of a regular file; anything else is refused."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise _not_regular(member)
    source = archive.extractfile(member)
    if source is None:
        raise MismatchError(f"{member.name!r} has no content", code="bad-archive", hint=_AGAIN)
    return source


def _admit(member: tarfile.TarInfo, received: Received, max_bytes: int) -> str:
    """Return the name of a member that may be written."""
    name = check_name(member.name)
    if name in received.files or len(received.files) >= MAX_FILES:
        raise MismatchError(
            f"{name} came twice, or too many files", code="hostile-archive", hint=_SUSPECT
        )
    total_bytes = member.size + sum(fact.size_bytes for fact in received.files.values())
    if total_bytes > max_bytes:
        raise RefusedError(
            f"{name} would make it {total_bytes} bytes, the limit is {max_bytes}",
            code="too-large",
            hint="choose less with --what, or raise --max-gib",
        )
    return name


def _write(source: IO[bytes], staging: Path, name: str, on_bytes: Callable[[int], None]) -> Fact:
    path = staging / name
    digest, num_bytes = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(fd, "wb") as target:
            while data := source.read(_CHUNK_BYTES):
                target.write(data)
                digest.update(data)
                num_bytes += len(data)
                on_bytes(len(data))
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:  # the disk is full, or the directory not ours
        raise DflashctlError(
            f"cannot write {path}: {error.strerror}", code="no-room", hint=_ROOM
        ) from error
    return Fact(num_bytes, digest.hexdigest())


def _read_manifest(source: IO[bytes], size: int) -> dict[str, dict[str, Any]]:
    if size > _MAX_MANIFEST_BYTES:
        raise MismatchError("the manifest is too large", code="hostile-archive", hint=_SUSPECT)
    try:
        raw = json.loads(source.read())
        facts = {
            check_name(str(name)): {
                "size_bytes": int(fact["size_bytes"]),
                "sha256": str(fact["sha256"]),
                "sent": bool(fact["sent"]),
                "problem": str(fact.get("problem", "")),
            }
            for name, fact in raw["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"the manifest is not readable: {error}", code="bad-archive", hint=_AGAIN
        ) from error
    if raw.get("v") != 1:
        raise MismatchError(
            f"the manifest has version {raw.get('v')}, this reader knows 1", hint=_NEWER
        )
    return facts


def problems(received: Received, had: dict[str, Fact]) -> dict[str, str]:
    """Compare with the manifest and return what is wrong, by file; empty when all is well.

    Raises: MismatchError when there is no manifest: the stream ended early.
    """
    manifest = received.manifest
    if manifest is None:
        raise MismatchError(
            "the archive ended before its manifest", code="bad-archive", hint=_AGAIN
        )
    found: dict[str, str] = {}
    for name, told in manifest.items():
        have = received.files.get(name) if told["sent"] else had.get(name)
        if told["problem"]:
            found[name] = told["problem"]
        elif have is None:
            found[name] = "it is in the manifest and did not come"
        elif (have.size_bytes, have.sha256) != (told["size_bytes"], told["sha256"]):
            found[name] = f"sha256 {have.sha256[:12]} here, {told['sha256'][:12]} there"
    for name in received.files.keys() - manifest.keys():
        found[name] = "it came and is not in the manifest"
    return found
