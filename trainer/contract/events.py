"""metrics.jsonl: one event a line, ``v seq t_unix_s run_id kind`` and the kind's own keys.

Kinds: phase, started, step, eval, checkpoint, compile, warning, finished. Units stand in key names;
NaN and infinities never appear: a non-finite number is null and counted in ``num_non_finite``.
One writer; readers skip unknown kinds and keys, refuse a newer major version and keep an
unfinished last line for later.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.errors import EventError

VERSION = 1
KINDS = ("phase", "started", "step", "eval", "checkpoint", "compile", "warning", "finished")
STEP_KEYS = (
    "step",
    "num_steps",
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "slot_accuracy",
    "expected_accepted",
    "tokens_total",
    "anchors_total",
    "tokens_per_s",
    "anchors_per_s",
    "q_hs",
    "q_hs_bytes",
    "target_wait_s",
    "drafter_wait_s",
    "step_s",
    "peak_memory_bytes",
    "memory_bytes",
    "reserved_bytes",
    "peak_reserved_bytes",
    "eta_s",
)
_LAST_BYTES = 1 << 16  # more than an event
Event = dict[str, Any]


def finished_at(path: Path) -> int | None:
    """Return the step at which a run finished, where that is the last that metrics.jsonl tells."""
    last: Event = {}
    if path.exists():
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = stream.read().splitlines(keepends=True)
        for event in EventDecoder(lenient=True).feed(b"".join(lines[-1:])):
            last = event
    step = last.get("step") if last.get("state") == "finished" else None
    return step if isinstance(step, int) else None


def _finite(value: Any, bad: list[int]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(1)
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v, bad) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, bad) for v in value]
    return value


def encode(event: Event) -> bytes:
    """Return one line; non-finite numbers become null and ``num_non_finite`` counts them."""
    bad: list[int] = []
    clean = _finite(event, bad)
    if bad:
        clean["num_non_finite"] = len(bad)
    return json.dumps(clean, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class EventWriter:
    """The one writer of a run's events: each event is one ``write`` to a file opened O_APPEND.

    A resumed run goes on with the next ``seq``; a last line that a kill left unfinished is closed
    with a newline first, so that it cannot swallow the next event. Thread-safety is the caller's.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._run_id = run_id
        self._seq = 0
        if path.exists():
            data = path.read_bytes()
            for event in EventDecoder(lenient=True).feed(data):
                self._seq = max(self._seq, int(event["seq"]) + 1)
            tail = data[-1:]
        else:
            tail = b"\n"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = tail not in (b"\n", b"")

    def write(self, kind: str, **values: Any) -> Event:
        """Append one event and return it.

        Raises: EventError for an unknown kind; OSError when the disk is full, after which the next
        event closes the line that was cut.
        """
        if kind not in KINDS:
            raise EventError(f"unknown event kind {kind!r}; known: {', '.join(KINDS)}")
        head: Event = {
            "v": VERSION,
            "seq": self._seq,
            "t_unix_s": round(time.time(), 3),
            "run_id": self._run_id,
            "kind": kind,
        }
        event = head | values
        line = encode(event)
        line = b"\n" + line if self._torn else line
        self._torn = True
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, "an event was cut: no space left for metrics.jsonl")
        self._torn = False
        self._seq += 1
        return event

    def close(self) -> None:
        """Sync and close; further writes fail."""
        os.fsync(self._fd)
        os.close(self._fd)


class EventDecoder:
    """Turns bytes as they arrive into events; keeps an unfinished last line for the next call."""

    def __init__(self, *, lenient: bool = False) -> None:
        self._rest = b""
        self._lenient = lenient
        self.num_skipped = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events completed by ``data``.

        Lines that are not JSON objects (half lines of a killed writer) are counted in
        ``num_skipped``. Raises: EventError for a newer major version.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            event = self._parse(line)
            if event is not None:
                yield event

    def _parse(self, line: bytes) -> Event | None:
        try:
            event = json.loads(line)
            version, kind = event["v"], event["kind"]
            known = isinstance(version, int) and isinstance(event["seq"], int)
        except (ValueError, KeyError, TypeError):
            self.num_skipped += bool(line.strip())
            return None
        if not known or version > VERSION:
            if self._lenient:
                return None
            raise EventError(
                f"event version {version}, this reader knows {VERSION}: update dflashctl"
            )
        return event if kind in KINDS else None
