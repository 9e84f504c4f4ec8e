"""JSON documents of --json: one object with ``schema`` and ``ok``, dataclasses made plain."""

import json
import sys
from dataclasses import asdict, is_dataclass
from typing import Any

from dflashctl.render.failure import SCHEMA


def document(result: Any, *, ok: bool = True) -> str:
    """Return the document of ``result``, a dataclass or a mapping, as one line."""
    body = asdict(result) if is_dataclass(result) and not isinstance(result, type) else dict(result)
    return json.dumps({"schema": SCHEMA, "ok": ok} | body, default=str) + "\n"


def print_document(result: Any, *, ok: bool = True) -> None:
    """Write the document to stdout."""
    sys.stdout.write(document(result, ok=ok))
    sys.stdout.flush()
