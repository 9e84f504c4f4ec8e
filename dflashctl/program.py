"""Runs a program of ``dflashctl/remote`` on a place and reads the one JSON object it prints.

A program that fails on purpose prints {"error": {"kind", "message", "hint"}}; that becomes the
error class of its kind. Anything else that ends non-zero is a failure with its stderr.
"""

import errno
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl import remote
from dflashctl.errors import DflashctlError, MismatchError, RefusedError, UsageError
from dflashctl.transport import run_script, stream_script
from dflashctl.transport.base import Script, ScriptResult, Transport

_KINDS: dict[str, type[DflashctlError]] = {
    "failed": DflashctlError,
    "refused": RefusedError,
    "mismatch": MismatchError,
    "usage": UsageError,
}


@dataclass(frozen=True)
class Program:
    """A program by its name in ``dflashctl/remote``, its arguments, and how to run it.

    python: interpreter to fall back to where the place has no python3 on its PATH.
    """

    name: str
    arguments: Mapping[str, Any]
    payload: Iterable[bytes] = ()
    deadline_s: float | None = 60.0
    python: str = "python3"

    def script(self) -> Script:
        """Return the script that runs it."""
        rest = shlex.join(["-I", "-S", "-c", remote.program(self.name), json.dumps(self.arguments)])
        pick = f"p=$(command -v python3) || p={shlex.quote(self.python)}"
        return Script(f'{pick}\nexec "$p" {rest}', self.payload, self.deadline_s, self.name)


def run_program(transport: Transport, program: Program) -> dict[str, Any]:
    """Run it and return its answer.

    Raises: the error that the program names; DflashctlError when it broke; and what
    ``run_script`` raises.
    """
    return _read_answer(run_script(transport, program.script()), program.name, transport.place)


def stream_program(
    transport: Transport, program: Program, on_line: Callable[[bytes], None]
) -> dict[str, Any]:
    """Run it, hand each line but the last to ``on_line`` as it comes, and return its answer.

    ``program.deadline_s`` is the longest silence. Raises: as ``run_program``.
    """
    lines = _Lines(on_line)
    result = stream_script(transport, program.script(), lines.feed)
    lines.close()
    kept = ScriptResult(result.rc, lines.last, result.stderr, result.elapsed_s)
    return _read_answer(kept, program.name, transport.place)


class _Lines:
    """Passes a stream on line by line and keeps back the last line, which is the answer."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._rest = b""
        self.last = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self.last:
                self._sink(self.last + b"\n")
            self.last = line

    def close(self) -> None:
        """Take an unfinished last line as a line."""
        if self._rest:
            self.feed(b"\n")


def _read_answer(result: ScriptResult, name: str, place: str) -> dict[str, Any]:
    """Return the JSON object on the last line of stdout; raises as ``run_program`` says."""
    lines = result.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        stderr = result.stderr.decode("utf-8", "replace").strip()
        raise DflashctlError(
            f"the {name} program gave no answer (exit status {result.rc})",
            hint=stderr[-2000:],
            place=place,
        )
    problem = answer.get("error")
    if isinstance(problem, dict):
        kind = _KINDS.get(problem.get("kind", ""), DflashctlError)
        raise kind(
            problem["message"],
            hint=problem.get("hint") or _hint(problem["message"], place),
            place=place,
            code=problem.get("code"),
        )
    result.check(DflashctlError, f"the {name} program failed", place=place)
    return answer


def _hint(message: str, place: str) -> str:
    """Return the next step after a failure of the system there, "" when it names none."""
    full = os.strerror(errno.ENOSPC) in message
    return f"make room: dflashctl runs gc --keep 1 -l {place}" if full else ""
