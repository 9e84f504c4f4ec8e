"""The laptop's records of runs: ``runs/TAG/manifest.json``, and ``launching.json`` before it.

``launching.json`` is the intent: written before the start script is sent, renamed to
``manifest.json`` once the run is proven. A kill between leaves the intent, and the next
``launch --tag TAG`` finds out whether that launch took place.
"""

from pathlib import Path

from trainer.contract.durable import write_by_rename
from trainer.contract.errors import ContractError, ManifestError
from trainer.contract.layout import check_tag
from trainer.contract.manifest import Manifest

_INTENT = "launching.json"
_RECORD = "manifest.json"


class RunStore:
    """Run records below one directory; it is made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, tag: str) -> Path:
        """Return where the record and pulled files of ``tag`` lie; raises TagError."""
        return self.root / check_tag(tag)

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
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()

    def record(self, manifest: Manifest) -> Path:
        """Write the record of a run that was launched; the intent ends with it."""
        path = self._write(manifest, _RECORD)
        path.with_name(_INTENT).unlink(missing_ok=True)
        return path

    def manifest(self, tag: str) -> Manifest | None:
        """Return the record of ``tag``, or None; raises ManifestError when it is not readable."""
        return self._read(self.directory(tag) / _RECORD)

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
