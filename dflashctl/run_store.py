"""The laptop's records of runs: ``runs/TAG/manifest.json``, and ``launching.json`` before it.

``launching.json`` is the intent: written before the start script is sent, renamed to
``manifest.json`` once the run is proven. A kill between leaves the intent, and the next
``launch --tag TAG`` finds out whether that launch took place.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflashctl.errors import RefusedError
from trainer.contract.durable import write_by_rename
from trainer.contract.errors import ContractError, ManifestError
from trainer.contract.layout import check_tag
from trainer.contract.manifest import Manifest

_INTENT = "launching.json"
_RECORD = "manifest.json"
_LOCKS = ".gpu-locks"  # the token of the GPU locks that a launch takes


class RunStore:
    """Run records below one directory; it is made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, tag: str) -> Path:
        """Return where the record and pulled files of ``tag`` lie; raises TagError."""
        return self.root / check_tag(tag)

    @contextmanager
    def guarded(self, tag: str) -> Iterator[None]:
        """Let one launch of ``tag`` at a time go on here; leaves no empty directory.

        The lock is on the directory itself and ends with the process, however that ends.
        Raises: RefusedError while another command launches the tag.
        """
        directory = self.directory(tag)
        made_root = not self.root.exists()
        handle = locked_directory(directory)
        if handle is None:
            raise RefusedError(
                f"the tag {tag} exists: another command is launching it from here",
                hint=f"wait for its end, then: dflashctl status {tag}",
                place=str(directory),
                code="tag-exists",
            )
        try:
            yield
        finally:
            with suppress(OSError):  # not empty: there is a record
                directory.rmdir()
            if made_root:
                with suppress(OSError):
                    self.root.rmdir()
            os.close(handle)

    def note_token(self, tag: str, token: str) -> None:
        """Note the token of the GPU locks that are about to be taken, for a rerun.

        Only under ``guarded``: a token that is found then is that of a command which has ended.
        """
        write_by_rename(self.directory(tag) / _LOCKS, token.encode())

    def token(self, tag: str) -> str | None:
        """Return the token of a launch that was not recorded, or None."""
        with suppress(OSError, ValueError):
            return (self.directory(tag) / _LOCKS).read_text()
        return None

    def forget_token(self, tag: str) -> None:
        """Drop the token: its locks are tied to a run, or let go."""
        (self.directory(tag) / _LOCKS).unlink(missing_ok=True)

    def intend(self, manifest: Manifest) -> None:
        """Note a launch that is about to be sent."""
        self._write(manifest, _INTENT)

    def intent(self, tag: str) -> Manifest | None:
        """Return the launch that was sent and never confirmed, or None."""
        return self._read(self.directory(tag) / _INTENT)

    def forget_intent(self, tag: str) -> None:
        """Drop the note of a launch that certainly did not take place."""
        directory = self.directory(tag)
        (directory / _INTENT).unlink(missing_ok=True)
        self.forget_token(tag)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()

    def record(self, manifest: Manifest) -> Path:
        """Write the record of a run that was launched; the intent ends with it."""
        path = self._write(manifest, _RECORD)
        path.with_name(_INTENT).unlink(missing_ok=True)
        self.forget_token(manifest.tag)
        return path

    def manifest(self, tag: str) -> Manifest | None:
        """Return the record of ``tag``, or None; raises ManifestError when it is not readable."""
        return self._read(self.directory(tag) / _RECORD)

    def require_new(self, tag: str, place: str) -> None:
        """Raise RefusedError when there is a record of ``tag``."""
        if self.manifest(tag) is not None:
            raise tag_exists(tag, f"recorded in {self.directory(tag)}", place)

    def place_of(self, tag: str) -> str | None:
        """Return "host/vmid" (or "host/self") of ``tag`` as hosts.yaml names it, or None."""
        manifest = self.manifest(tag) or self.intent(tag)
        return None if manifest is None else manifest.place

    def tags(self) -> list[str]:
        """Return the tags with a record, oldest first."""
        found: list[tuple[float, str]] = []
        for path in self.root.glob(f"*/{_RECORD}"):
            try:
                manifest = self._read(path)
            except ContractError:
                continue  # `runs list` shows it; a broken record must not stop a launch
            if manifest is not None:
                found.append((manifest.created_unix_s, manifest.tag))
        return [tag for _, tag in sorted(found)]

    def _write(self, manifest: Manifest, name: str) -> Path:
        path = self.directory(manifest.tag) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_by_rename(path, manifest.to_json().encode())
        return path

    @staticmethod
    def _read(path: Path) -> Manifest | None:
        try:
            return Manifest.from_json(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:  # ManifestError, or bytes that are no UTF-8
            raise ManifestError(
                f"the record {path} is damaged ({error}); move it away and say --limit HOST/VMID"
            ) from error


def tag_exists(tag: str, where: str, place: str) -> RefusedError:
    """Return the error for a launch of a tag that is taken."""
    return RefusedError(
        f"the tag {tag} exists: {where}",
        hint=f"another --tag, or: dflashctl launch --resume {tag}",
        place=place,
        code="tag-exists",
    )


def locked_directory(directory: Path) -> int | None:
    """Return the descriptor that holds a directory for this process alone, made where needed.

    None while another process holds it. Who holds it may remove the directory.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue  # the command that held it has just removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), directory.stat()):
                return handle
        os.close(handle)  # it was removed between open and flock
