"""A way that enters the container once and runs every further command there in what it entered.

Each `pct exec` costs a node up to a second; ``remote/serve.py`` in the container runs one command
after another for it. A command on it is a process of its own, as ever, with its own streams and
status; only the way in is shared.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dflashctl.errors import StateUnknownError, UnreachableError
from dflashctl.program import Program
from dflashctl.transport import stream_script
from dflashctl.transport.base import (
    STDERR_KEPT_BYTES,
    EnoughRead,
    Finished,
    ScriptResult,
    Sink,
    Transport,
)
from dflashctl.transport.child import Limits

_TICK_S = 0.1
_GRACE_S = 5.0  # for the status after the sink had enough; a loaded host takes its time
_JOIN_S = 5.0
_BEGIN_S = 1.0  # a host that takes longer to connect to is waited for later
_FRAMES_KEPT = 64  # of at most 64 KiB; a slow reader slows the command, not the memory here
_HEAD = re.compile(rb"([OEX]) ([0-9]{1,6})\n")
_MAX_HEAD_BYTES = 10


class KeptWay(Transport):
    """Runs argv through ``inner``, which is entered at the first command and left by ``close``."""

    def __init__(self, inner: Transport, python: str = "python3") -> None:
        self._inner = inner
        self._python = python
        self._session: _Session | None = None
        self.place = inner.place

    @property
    def round_trips(self) -> int:  # type: ignore[override]
        """Remote commands so far; all that share one way in are one."""
        return self._inner.round_trips

    def open(self) -> None:
        """Connect."""
        self._inner.open()
        self.user = self._inner.user

    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` in what is entered already, or enter. Raises: as the inner way."""
        limits = Limits(self.place, deadline_s, silence_s)
        command = _Command(argv, stdin, on_stdout, on_stderr)
        try:
            return self._entered().run(command, limits)
        except _UnsentError:
            self.leave()  # what was entered had ended since the last command
            return self._entered().run(command, limits)
        except BaseException:
            self.leave()  # nobody reads what it still says
            raise

    def _entered(self) -> "_Session":
        if self._session is None or self._session.over:
            self.leave()
            self._session = _Session(self._inner, self._python)
        return self._session

    def enter(self) -> None:
        """Begin to connect and enter; the first command raises what fails.

        It returns when the container is being entered, which takes a node up to a second that is
        the caller's for its own work, or after ``_BEGIN_S``.
        """
        if self._session is None:
            self._session = _Session(self._inner, self._python)
            self._session.has_begun.wait(_BEGIN_S)

    def leave(self) -> None:
        """Let go of what was entered; the next command enters anew."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` on the user's terminal, by a way in of its own."""
        return self._inner.interactive(argv)

    def close(self) -> None:
        """Leave, and close the way."""
        self.leave()
        self._inner.close()


class _Command:
    """One command on the way: what it is sent, and where its output goes."""

    def __init__(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        on_stderr: Sink | None,
    ) -> None:
        self.stderr = bytearray()
        self.error: BaseException | None = None  # of its source of stdin
        self.is_sent = False
        self._argv = list(argv)
        self._stdin = stdin
        self._on_stdout, self._on_stderr = on_stdout, on_stderr
        self.has_enough = False

    def frames(self) -> Iterator[bytes]:
        """Yield what is sent for it; an empty block where its stdin has nothing yet."""
        self.is_sent = True
        yield _frame(b"R", json.dumps(self._argv).encode())
        try:
            for block in self._stdin:
                yield _frame(b"I", block) if block else b""
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error
            return
        yield _frame(b"I", b"")

    def take(self, kind: str, data: bytes) -> None:
        """Hand on a piece of its output."""
        if kind == "E":
            if self._on_stderr is not None:
                self._on_stderr(data)
            self.stderr += data
            del self.stderr[:-STDERR_KEPT_BYTES]
        elif kind == "O" and not self.has_enough:
            try:
                self._on_stdout(data)
            except EnoughRead:
                self.has_enough = True


class _UnsentError(Exception):
    """What was entered for an earlier command is gone, and nothing of this one was sent."""


class _Left(Exception):  # noqa: N818 - ends the way in from within, no error
    """The way in is left before its command has ended."""


class _Session:
    """One way in: a thread that holds it, and the frames both ways."""

    def __init__(self, inner: Transport, python: str) -> None:
        self.over = False
        self.has_begun = threading.Event()  # entering, or failed to
        self._at_work = False
        self._has_connected = False
        self._has_served = False
        self._program = Program("serve", {}, self._outgoing(), None, python)
        self._inner = inner
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._came: queue.Queue[tuple[str, Any]] = queue.Queue(_FRAMES_KEPT)
        self._rest = b""
        self._ends = threading.Event()  # no more commands
        self._is_left = threading.Event()  # and what runs is not waited for
        self._thread = threading.Thread(target=self._hold, daemon=True, name="kept-way")
        self._thread.start()

    def run(self, command: _Command, limits: Limits) -> Finished:
        """Run a command to its end. Raises: as ``Transport.execute``."""
        self._at_work = True
        self._commands.put(command)
        enough_since_s: float | None = None
        while True:
            try:
                kind, data = self._came.get(timeout=_TICK_S)
            except queue.Empty:
                if command.error is not None:
                    raise command.error from None
                limits.check()
                if enough_since_s and time.monotonic() - enough_since_s > _GRACE_S:
                    self.over = True
                    return Finished(None, bytes(command.stderr))
                continue
            if kind == "X":
                self._at_work, self._has_served = False, True
                status = int(data) if data.isdigit() else None
                return Finished(status, bytes(command.stderr))
            if kind == "end":
                self.over = True
                if self._has_served and not command.is_sent:
                    raise _UnsentError
                return self._ended(data, command)
            command.take(kind, data)
            limits.touch()  # after the sink: a reader that takes its time is no silence
            if command.has_enough and enough_since_s is None:
                enough_since_s = time.monotonic()

    def close(self) -> None:
        """Let go: at once where a command is at work, else when the other side has ended."""
        self.over = True
        if self._has_connected and not self._at_work:
            self._ends.set()
            self._thread.join(_JOIN_S)
        self._is_left.set()
        if self._has_connected:
            self._thread.join(_JOIN_S)

    def _ended(self, how: "BaseException | ScriptResult", command: _Command) -> Finished:
        """Say what the end of the way in means for the command that was on it."""
        if isinstance(how, ScriptResult):
            return Finished(None, bytes(command.stderr) + how.stderr)
        if isinstance(how, StateUnknownError):
            # Whether the command itself had begun is told by its own marks.
            raise UnreachableError(how.message, place=how.place, code="link-lost", hint=how.hint)
        raise how

    def _hold(self) -> None:
        try:
            try:
                self._inner.open()
                self._has_connected = True
                how: Any = stream_script(self._inner, self._program.script(), self._take)
            except _Left:
                return
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                how = error
            self.has_begun.set()
            self._put("end", how)
        except _Left:
            return

    def _outgoing(self) -> Iterator[bytes]:
        self.has_begun.set()
        while True:
            self._raise_if_left()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                if self._ends.is_set():
                    return
                yield b""
                continue
            for block in command.frames():
                self._raise_if_left()
                yield block

    def _take(self, data: bytes) -> None:
        self._rest += data
        while head := _HEAD.match(self._rest):
            end = head.end() + int(head[2])
            if len(self._rest) < end:
                return
            self._put(head[1].decode(), self._rest[head.end() : end])
            self._rest = self._rest[end:]
        if len(self._rest) >= _MAX_HEAD_BYTES:
            raise StateUnknownError(
                "what runs the commands there spoke out of turn",
                place=self._inner.place,
                hint="run the same command again",
            )

    def _put(self, kind: str, data: Any) -> None:
        while True:
            self._raise_if_left()
            try:
                self._came.put((kind, data), timeout=_TICK_S)
            except queue.Full:
                continue
            return

    def _raise_if_left(self) -> None:
        if self._is_left.is_set():
            raise _Left


def _frame(kind: bytes, data: bytes) -> bytes:
    return b"%s %d\n%s" % (kind, len(data), data)
