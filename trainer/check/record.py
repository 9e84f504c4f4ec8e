"""Remembers a fast check that passed, so that a second launch of the same run does not pay again.

The key covers all that the check depends on: release, configuration, target and its small files,
data and package versions. Standard library only: a known key is answered without torch.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.check.findings import Report
from trainer.contract.durable import write_by_rename
from trainer.contract.manifest import Manifest

RECORD = "check.json"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_SMALL_BYTES = 64 << 20


def key_of(manifest: Manifest) -> str:
    """Return the digest of everything that the fast check of a run depends on."""
    facts: dict[str, Any] = {
        "release": manifest.release,
        "config": manifest.config,
        "target_revision": manifest.target_revision,
        "dataset_sha256": manifest.dataset_sha256,
        "packages": manifest.packages,
        "target_files": _target_files(Path(manifest.config["target"]["path"])),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _target_files(directory: Path) -> dict[str, str]:
    """Return the digests of the target's tokenizer and configuration files; weights are not read.

    A target from the hub has none here: its revision is a commit and covers them.
    """
    if not directory.is_dir():
        return {}
    found = sorted({path for pattern in _SMALL_FILES for path in directory.glob(pattern)})
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if path.is_file() and path.stat().st_size <= _SMALL_BYTES
    }


def recall(run_dir: Path, key: str) -> Report | None:
    """Return the report of a fast check with this key that passed; None when there is none."""
    try:
        raw = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
        if raw["key"] != key:
            return None
        report = Report.from_dict(raw["report"], reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or of another version: the check is simply made
    return report if report.ok and report.fast else None


def remember(run_dir: Path, key: str, report: Report) -> None:
    """Keep a report beside the manifest, whatever it found; only a passed one is used again."""
    text = json.dumps({"key": key, "report": report.to_dict()}, indent=1) + "\n"
    write_by_rename(run_dir / RECORD, text.encode())
