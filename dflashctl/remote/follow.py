"""Follow one run inside its container: log, events, process and end, as records on stdout.

Standard library only; dflashctl sends this text to ``python3 -I -S -c TEXT JSON``. By hand:

    python3 dflashctl/remote/follow.py '{"root": "/workspace/runs/x", "log": "train_stdout_x.log",
        "start": {"log": {"tail_lines": 10}, "events": {}}, "once": true}'

A record is one line of JSON, ``{"k": KIND, "n": LENGTH, ...}``, and LENGTH raw bytes:

    hello   now                     once, first
    at      f (log or events), o (offset), id, head    where reading of a file begins
    log     o (offset), id, [head]  bytes of the log
    events  o (offset), id, [head]  bytes of metrics.jsonl
    note    f (log or events), why  "truncated" or "replaced": the file starts again at offset 0
    beat    now, process, gpus      every beat_s seconds; process is alive, starting or gone; gpus
                                    is what nvidia-smi said when it found none, else ""
    end     why, now                last; why is exit (payload: exit.json), lost, never-started,
                                    absent (no such run) or once

The beat has a second use: when the reader is gone, writing it ends this program (SIGPIPE).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.json_files import read_json
from dflashctl.remote.liveness import is_alive, is_locked

CHUNK_BYTES = 64 * 1024
CHUNKS_A_TURN = 16
HEAD_BYTES = 64  # tells a rewritten file from a grown one
LOST_AFTER_S = 3.0  # a resume takes its lock a moment before it sets exit.json aside
START_WITHIN_S = 20.0
# A reader that takes nothing for this long is dead behind a stalled link: end, it will come back.
BLOCKED_S = 60
GPU_LOOK_S = 60.0  # between two looks whether the container still has its GPUs


class Tail:
    """One growing file, sent from a position on; notices truncation and replacement."""

    def __init__(self, kind: str, path: Path, start: dict[str, Any]) -> None:
        self.kind = kind
        self.path = path
        self.start = start
        self.fd = -1
        self.id = ""
        self.offset = 0
        self.head = b""
        self.told_head = b""

    def pump(self) -> bool:
        """Send what is there, at most CHUNKS_A_TURN records; return whether anything was sent."""
        if self.start.get("skip") or (self.fd < 0 and not self._open()):
            return False
        if self._is_rewritten():
            self._rewind("truncated")
        sent = self._send_rest()
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return sent  # moved away; the next file will come under this name
        if str(now.st_ino) == self.id:
            return sent
        if not self._send_rest():  # everything of the old file first
            self._restart("replaced")
        return True

    def _is_rewritten(self) -> bool:
        head = os.pread(self.fd, len(self.head), 0)
        return os.fstat(self.fd).st_size < self.offset or head != self.head

    def _open(self) -> bool:
        try:
            self.fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        found = os.fstat(self.fd)
        self.id = str(found.st_ino)
        start, self.start = self.start, {}
        if "offset" in start:
            self._resume(start, found.st_size)
        elif "tail_lines" in start:
            self.offset = offset_of_last_lines(self.fd, found.st_size, start["tail_lines"])
        elif "tail_bytes" in start:
            self.offset = offset_of_tail(self.fd, found.st_size, start["tail_bytes"])
        self.head = self.told_head = os.pread(self.fd, min(HEAD_BYTES, self.offset), 0)
        send("at", f=self.kind, o=self.offset, id=self.id, head=self.head.hex())
        return True

    def _resume(self, start: dict[str, Any], size: int) -> None:
        head = bytes.fromhex(start["head"])
        if start["id"] and start["id"] != self.id:
            send("note", f=self.kind, why="replaced")
        elif size < start["offset"] or os.pread(self.fd, len(head), 0) != head:
            send("note", f=self.kind, why="truncated")
        else:
            self.offset = start["offset"]

    def _restart(self, why: str) -> None:
        os.close(self.fd)
        self.fd = -1
        self._rewind(why)

    def _rewind(self, why: str) -> None:
        self.offset = 0
        self.head = self.told_head = b""
        send("note", f=self.kind, why=why)

    def _send_rest(self) -> bool:
        for turn in range(CHUNKS_A_TURN):
            data = os.pread(self.fd, CHUNK_BYTES, self.offset)
            # The head after the bytes: what was rewritten between the two is not sent as grown.
            if not data or self._is_rewritten():
                return turn > 0
            self.head += data[: HEAD_BYTES - len(self.head)]
            fields: dict[str, Any] = {"o": self.offset, "id": self.id}
            if self.head != self.told_head:
                fields["head"] = self.head.hex()
                self.told_head = self.head
            send(self.kind, data, **fields)
            self.offset += len(data)
        return True


def send(kind: str, payload: bytes = b"", **fields: Any) -> None:
    """Write one record and flush it; SIGALRM ends the program when nobody takes it."""
    header = json.dumps({"k": kind, "n": len(payload), **fields}, separators=(",", ":"))
    signal.alarm(BLOCKED_S)
    sys.stdout.buffer.write(header.encode() + b"\n" + payload)
    sys.stdout.buffer.flush()
    signal.alarm(0)


def offset_of_last_lines(fd: int, size: int, num_lines: int) -> int:
    """Return where the last ``num_lines`` lines begin; an unfinished last line counts as one."""
    if num_lines <= 0:
        return size
    position, needed = size, num_lines
    if size and os.pread(fd, 1, size - 1) == b"\n":
        needed += 1
    while position > 0:
        start = max(0, position - CHUNK_BYTES)
        block = os.pread(fd, position - start, start)
        found = len(block)
        while needed and (found := block.rfind(b"\n", 0, found)) >= 0:
            needed -= 1
        if not needed:
            return start + found + 1
        position = start
    return 0


def offset_of_tail(fd: int, size: int, num_bytes: int) -> int:
    """Return the start of the first whole line within the last ``num_bytes``."""
    start = max(0, size - num_bytes)
    position = start
    if start == 0 or os.pread(fd, 1, start - 1) == b"\n":
        return start
    while block := os.pread(fd, CHUNK_BYTES, position):
        if (found := block.find(b"\n")) >= 0:
            return position + found + 1
        position += len(block)
    return start  # one line longer than num_bytes


class Run:
    """The process of a run and how it ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = "starting"
        self.since = time.monotonic()

    def end(self) -> tuple[str, bytes] | None:
        """Return why the run is over and exit.json if there is one; None while it goes on."""
        try:
            return "exit", (self.root / "exit.json").read_bytes()
        except FileNotFoundError:
            pass
        if not self.root.is_dir():
            return "absent", b""
        process = read_json(self.root / "process.json")
        state = "starting"
        if process is not None:
            state = "alive" if is_alive(process, "runner", "trainer") else "gone"
        if state != self.state:
            self.state, self.since = state, time.monotonic()
        limit_s = {"gone": LOST_AFTER_S, "starting": START_WITHIN_S}.get(state)
        if limit_s is None or time.monotonic() - self.since <= limit_s:
            return None
        if is_locked(self.root / "run.lock"):  # a resume replaces exit.json, then process.json
            return None
        return ("lost" if state == "gone" else "never-started"), b""


class GpuLook:
    """Asks now and then whether this container still has its GPUs; never waits for the answer."""

    def __init__(self, root: Path) -> None:
        manifest = read_json(root / "manifest.json") or {}
        gpus = manifest.get("gpus")
        named = isinstance(gpus, list) and any(isinstance(g, dict) and g.get("uuid") for g in gpus)
        self.is_on = named and shutil.which("nvidia-smi") is not None
        self.child: subprocess.Popen[bytes] | None = None
        self.due = 0.0
        self.said = ""

    def lost(self) -> str:
        """Return what nvidia-smi said instead of GPUs when it was asked last; "" when it did not.

        One that hangs is not followed by another.
        """
        if self.child is not None and self.child.poll() is not None:
            data = self.child.stdout.read() if self.child.stdout else b""
            text = " ".join(data.decode("utf-8", "replace").split())
            lost = self.child.returncode != 0 and re.search("NVML|No devices", text)
            self.said, self.child = text[:300] if lost else "", None
        elif self.child is None and self.is_on and time.monotonic() >= self.due:
            self.due = time.monotonic() + GPU_LOOK_S
            self.child = subprocess.Popen(
                ["timeout", "-k", "2", "10", "nvidia-smi", "-L"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        return self.said


def log_path(root: Path, name: str) -> Path:
    """Return the log of the run: where its manifest says, else under ``name`` in ``root``."""
    manifest = read_json(root / "manifest.json") or {}
    return Path(str(manifest.get("log_path") or root / name))


def main() -> None:
    """Follow the run that argv[1] names until it ends or the reader is gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    asked = json.loads(sys.argv[1])
    root = Path(asked["root"])
    tails = [
        Tail("events", root / "metrics.jsonl", asked["start"]["events"]),
        Tail("log", log_path(root, asked["log"]), asked["start"]["log"]),
    ]
    run, look = Run(root), GpuLook(root)
    send("hello", now=time.time())
    next_beat = 0.0
    while True:
        over = run.end()
        if asked.get("once") and not (over and over[0] == "absent"):
            over = "once", b""
        moved = [tail.pump() for tail in tails]
        if over and not any(moved):
            send("end", over[1], why=over[0], now=time.time())
            return
        if time.monotonic() >= next_beat:
            gpus = "" if asked.get("once") else look.lost()
            send("beat", now=time.time(), process=run.state, gpus=gpus)
            next_beat = time.monotonic() + asked.get("beat_s", 2.0)
        if not any(moved):
            time.sleep(asked.get("poll_s", 0.2))


if __name__ == "__main__":
    main()
