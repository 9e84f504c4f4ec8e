"""Errors for people and for programs: one line what, then where to look and what to type next."""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dflashctl.errors import DflashctlError
from dflashctl.log_lines import clean

SCHEMA = 1


def failure_text(error: DflashctlError) -> str:
    """Return the lines for stderr; the hint is indented, each of its lines on its own.

    What a host said (a banner, the end of stderr) is in them, so they are made safe to show.
    """
    lines = safe_text(str(error)).split("\n")
    for index, line in enumerate(safe_text(error.hint).splitlines()):
        lines.append(f"  hint: {line}" if index == 0 else f"        {line}")
    return "\n".join(lines) + "\n"


def safe_text(text: str) -> str:
    """Return ``text`` without what could drive a terminal, line by line."""
    return "\n".join(clean(line.encode("utf-8", "replace")) for line in text.split("\n"))


def failure_fields(error: DflashctlError) -> dict[str, Any]:
    """Return the error as a document's ``error`` holds it."""
    return {
        "code": error.code,
        "exit_code": int(error.exit_code),
        "message": error.message,
        "hint": error.hint,
        "place": error.place,
    }


def failure_document(error: DflashctlError) -> str:
    """Return the one JSON document that --json prints for an error."""
    return json.dumps({"schema": SCHEMA, "ok": False, "error": failure_fields(error)}) + "\n"


def show_failure(error: DflashctlError, *, as_json: bool) -> None:
    """Print the error: text on stderr, or with --json a document on stdout."""
    if as_json:
        sys.stdout.write(failure_document(error))
        sys.stdout.flush()
    else:
        sys.stderr.write(failure_text(error))


def save_trace(error: BaseException) -> Path:
    """Write the traceback to the state directory and return its path."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    directory = Path(home) / "dflashctl"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path.write_text("".join(traceback.format_exception(error)))
    path.chmod(0o600)
    return path
