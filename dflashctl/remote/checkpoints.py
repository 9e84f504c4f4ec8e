"""Whether a checkpoint is whole, by the rules of trainer/contract/completion.py."""

import json
from pathlib import Path

from dflashctl.remote.digests import digest_of

COMPLETE_VERSION = 1


def is_complete(directory: Path, *, digests: bool) -> bool:
    """Say whether a checkpoint is what its COMPLETE.json says."""
    try:
        told = json.loads((directory / "COMPLETE.json").read_bytes())
        if told["v"] != COMPLETE_VERSION:
            return False
        for name, facts in told["files"].items():
            path = directory / name
            if not path.is_file() or path.stat().st_size != facts["size_bytes"]:
                return False
            if digests and digest_of(path) != facts["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True
