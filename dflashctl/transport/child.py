"""One child process with bytes both ways: feeds stdin, drains stdout and stderr at once.

Waits are bounded by a deadline, by silence, or not at all; the child has a process group of its
own, which dies with SIGKILL when a limit passes or the caller is interrupted.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from dflashctl.errors import UnreachableError
from dflashctl.transport import interrupts
from dflashctl.transport.base import STDERR_KEPT_BYTES, EnoughRead, Finished, Sink

CHUNK_BYTES = 256 * 1024
_TICK_S = 0.1  # how often an exit with pipes still held open by a grandchild is noticed
PAUSE_S = 0.005  # until a source of stdin that had nothing yet is asked again
GIVEN_UP = threading.Event()  # by Ctrl-C, in whatever thread a command is waited for
_GRACE_S = 2.0  # for the last bytes of stderr after the child ended or the sink had enough


class Limits:
    """When to give up: a moment for the whole, and a longest silence."""

    def __init__(self, place: str, deadline_s: float | None, silence_s: float | None) -> None:
        self._place = place
        self._deadline_s, self._silence_s = deadline_s, silence_s
        self._started_s = self._last_s = time.monotonic()

    def touch(self) -> None:
        """Note that bytes moved."""
        self._last_s = time.monotonic()

    def left_s(self, at_most_s: float) -> float:
        """Return how long one wait may take, ``at_most_s`` at the longest."""
        if self._deadline_s is None:
            return at_most_s
        left_s = self._deadline_s - (time.monotonic() - self._started_s)
        return max(0.01, min(at_most_s, left_s))

    def check(self) -> None:
        """Raise UnreachableError: ``timeout`` when a limit has passed, or ``interrupted``.

        In the main thread also the KeyboardInterrupt that was held back.
        """
        interrupts.check()
        if GIVEN_UP.is_set():
            raise UnreachableError("interrupted", place=self._place, code="interrupted")
        now_s = time.monotonic()
        if self._deadline_s is not None and now_s - self._started_s > self._deadline_s:
            raise self._timeout(f"no end within {self._deadline_s:g} s")
        if self._silence_s is not None and now_s - self._last_s > self._silence_s:
            raise self._timeout(f"no sign of life for {self._silence_s:g} s")

    def _timeout(self, what: str) -> UnreachableError:
        return UnreachableError(
            what,
            place=self._place,
            code="timeout",
            hint="the host may be stalled or slow, and the command may still be running there; "
            "look with `dflashctl status`, then run the same command again",
        )


@dataclass(frozen=True)
class Sinks:
    """Where the streams of a command go; without ``stderr`` only the end of it is kept.

    Both may block, on a reader of our own output: Ctrl-C ends that at once.
    """

    stdout: Sink
    stderr: Sink | None = None

    def take_stdout(self, chunk: bytes) -> None:
        """Hand on bytes. Raises: what the sink raises."""
        with interrupts.let_through():
            self.stdout(chunk)

    def take_stderr(self, chunk: bytes) -> None:
        """Hand on bytes, if they are wanted. Raises: what the sink raises."""
        if self.stderr is not None:
            with interrupts.let_through():
                self.stderr(chunk)


def run_child(
    argv: Sequence[str],
    stdin: Iterable[bytes],
    sinks: Sinks,
    limits: Limits,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run ``argv`` and return how it ended; a negative wait status becomes 128 + signal.

    Raises: UnreachableError (code ``timeout``); what ``stdin`` or ``sinks`` raise, EnoughRead of
    stdout apart; KeyboardInterrupt when the child has ended.
    """
    with interrupts.held_back():
        return _run_child(argv, stdin, sinks, limits, environment)


def _run_child(
    argv: Sequence[str],
    stdin: Iterable[bytes],
    sinks: Sinks,
    limits: Limits,
    environment: Mapping[str, str] | None,
) -> Finished:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment,
        bufsize=0,
    )
    pump = _Pump(process, stdin, sinks, limits)
    try:
        pump.run()
    finally:
        pump.close()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Finished(pump.status, bytes(pump.stderr))


class _Pump:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: Iterable[bytes],
        sinks: Sinks,
        limits: Limits,
    ) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the child needs three pipes")
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._source: Iterator[bytes] = iter(stdin)
        self._unsent = memoryview(b"")
        self._sinks, self._limits = sinks, limits
        self._enough = False
        self._paused = False
        self._selector = selectors.DefaultSelector()
        self.stderr = bytearray()
        self.status: int | None = None

    def run(self) -> None:
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)
        ends_at_s: float | None = None
        while True:
            moved = self._step()
            status = self._process.poll()
            if status is not None:
                self.status = status if status >= 0 else 128 - status
            reading = {key.fileobj for key in self._selector.get_map().values()} - {self._stdin}
            if status is not None and not reading:
                return
            if status is not None or self._enough:
                # A grandchild may hold the pipes for ever: wait for quiet, not for their end.
                if moved or ends_at_s is None:
                    ends_at_s = time.monotonic() + _GRACE_S
                elif time.monotonic() > ends_at_s:
                    return
            self._limits.check()

    def _step(self) -> bool:
        """Move what can be moved now; return whether bytes came in."""
        if not self._selector.get_map():
            time.sleep(_TICK_S / 10)  # all streams closed, the child not yet reaped
            self._resume_stdin()
            return False
        moved = False
        ready = self._selector.select(PAUSE_S if self._paused else _TICK_S)
        self._resume_stdin()
        for key, _ in ready:
            if key.fileobj is self._stdin:
                self._write()
            elif key.fileobj is self._stdout:
                moved |= self._read(self._stdout, is_stdout=True)
            else:
                moved |= self._read(self._stderr, is_stdout=False)
        return moved

    def _resume_stdin(self) -> None:
        if self._paused:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
            self._paused = False

    def _write(self) -> None:
        while not self._unsent:
            block = next(self._source, None)  # outside the try: its errors are the caller's
            if block is None:
                self._end(self._stdin)
                return
            if not block:
                self._selector.unregister(self._stdin)
                self._paused = True
                return
            self._unsent = memoryview(block)
        try:
            num_sent = os.write(self._stdin.fileno(), self._unsent[:CHUNK_BYTES])
        except BlockingIOError:
            return
        except OSError:  # the child takes no more; how it ends says why
            self._end(self._stdin)
        else:
            self._unsent = self._unsent[num_sent:]
            self._limits.touch()

    def _read(self, stream: IO[bytes], *, is_stdout: bool) -> bool:
        try:
            chunk = os.read(stream.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._end(stream)
            return True
        if not is_stdout:
            self._sinks.take_stderr(chunk)
            self.stderr += chunk
            del self.stderr[:-STDERR_KEPT_BYTES]
        elif not self._enough:
            try:
                self._sinks.take_stdout(chunk)
            except EnoughRead:
                self._enough = True
        self._limits.touch()  # after the sink: a reader that takes its time is no silence
        return True

    def _end(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        stream.close()

    def close(self) -> None:
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()
