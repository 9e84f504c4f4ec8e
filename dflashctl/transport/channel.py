"""One command on a paramiko channel: bytes both ways, no wait without a limit.

Fabric's run() decodes text, joins quadratically and reads the user's stdin; this loop does not.
Three threads, as a channel lets one read while another writes: the caller's reads stdout, one
drains stderr, one feeds stdin. None can block another, so no full window stops the whole.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dflashctl.errors import UnreachableError
from dflashctl.transport import interrupts
from dflashctl.transport.base import (
    NO_SESSION,
    STDERR_KEPT_BYTES,
    EnoughRead,
    Finished,
    Sink,
)
from dflashctl.transport.child import CHUNK_BYTES, PAUSE_S, Limits, Sinks

if TYPE_CHECKING:
    import paramiko

_PACKET_BYTES = 32 * 1024  # what a channel sends at once
_TICK_S = 0.1
_GRACE_S = 2.0  # for the last bytes of stderr after the sink had enough
_LATE_S = 10.0  # for output after the exit status, which sshd may send first
_OPEN_S = 30.0  # to open a channel, when the command itself has no deadline
_FREE_S = 3.0  # for sshd to count a session that has ended no more (MaxSessions)
_RETRY_S = 0.05
_NO_REASON = "Unable to open channel."
_CONNECT_FAILED = 2  # SSH_OPEN_CONNECT_FAILED of RFC 4254
_JOIN_S = 5.0
_SETTLE_S = 0.5  # for paramiko's reader to notice that the link behind a closed channel is gone
_CUT_SETTLE_S = 10.0  # the same where the other side had not even ended its output


class ChannelRun:
    """Runs one shell line on an open paramiko transport."""

    def __init__(self, link: "paramiko.Transport", place: str, limits: Limits) -> None:
        self._link = link
        self._place = place
        self._limits = limits
        self._stderr = bytearray()
        self._thread_error: BaseException | None = None  # of the two threads beside the reader
        self._stderr_at_work = False  # its sink may block for as long as it likes
        self._stderr_moved_s = time.monotonic()

    def run(self, line: str, stdin: Iterable[bytes], sinks: Sinks) -> Finished:
        """Run ``line``; the status is None when the remote shell died of a signal.

        Raises: UnreachableError (``link-lost`` or ``timeout``), and what ``stdin`` or ``sinks``
        raise.
        """
        channel = self._start(line)
        with interrupts.held_back():
            return self._exchange(channel, stdin, sinks)

    def _exchange(
        self, channel: "paramiko.Channel", stdin: Iterable[bytes], sinks: Sinks
    ) -> Finished:
        threads = [
            threading.Thread(target=self._feed, args=(channel, stdin), daemon=True),
            threading.Thread(target=self._drain_stderr, args=(channel, sinks), daemon=True),
        ]
        try:
            for thread in threads:
                thread.start()
            self._read(channel, sinks, threads[1])
        finally:
            with self._closing_a_broken_link():
                channel.close()
            for thread in threads:
                thread.join(_JOIN_S)
        if self._thread_error is not None:
            raise self._thread_error
        status = channel.exit_status if channel.exit_status_ready() else -1
        if status < 0:
            # A link that dies closes its channels a moment before it says that it is down.
            self._link.join(_SETTLE_S if channel.eof_received else _CUT_SETTLE_S)
            if not self._link.is_active():
                raise self._lost()
        return Finished(status if status >= 0 else None, bytes(self._stderr))

    def _start(self, line: str) -> "paramiko.Channel":
        import paramiko

        limit_s = self._limits.left_s(_OPEN_S)
        try:
            channel = self._open_session(limit_s)
            # exec_command waits for the host's reply without a limit of its own
            timer = threading.Timer(limit_s, channel.close)
            timer.daemon = True
            timer.start()
            try:
                channel.exec_command(line)
            finally:
                timer.cancel()
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._limits.check()
            refused = isinstance(error, paramiko.ChannelException)  # by a host that answers
            raise UnreachableError(
                f"the host did not start the command: {error or type(error).__name__}",
                place=self._place,
                code=NO_SESSION if refused else "link-lost",
                hint="the connection is gone, or the host allows no more sessions (MaxSessions)",
            ) from error
        channel.settimeout(_TICK_S)
        return channel

    def _open_session(self, limit_s: float) -> "paramiko.Channel":
        """Open a channel; a host that allows few has that of an ended command free in a moment.

        Raises: paramiko.ChannelException when it is refused all the same; as paramiko else.
        """
        import paramiko

        end_s = time.monotonic() + min(_FREE_S, limit_s)
        while True:
            try:
                return self._link.open_session(timeout=limit_s)
            except paramiko.SSHException as error:
                # of two refusals at once paramiko gives one thread none of its own
                if not isinstance(error, paramiko.ChannelException) and str(error) != _NO_REASON:
                    raise
                if time.monotonic() > end_s:
                    raise paramiko.ChannelException(_CONNECT_FAILED, str(error)) from error
                self._limits.check()
                time.sleep(_RETRY_S)

    def _read(self, channel: "paramiko.Channel", sinks: Sinks, stderr: threading.Thread) -> None:
        at_end = enough = ended = False
        quiet_since_s = time.monotonic()
        while self._thread_error is None:
            moved = False
            if not at_end:
                chunk = self._receive(channel)
                at_end = chunk == b""
                moved = bool(chunk)
                if chunk and not enough:
                    try:
                        sinks.take_stdout(chunk)
                    except EnoughRead:
                        enough = True
            elif ended:
                stderr.join(_TICK_S / 10)
            else:
                channel.status_event.wait(_TICK_S / 10)
            if moved:
                self._limits.touch()
            if moved or self._stderr_at_work or not (ended or enough):
                quiet_since_s = time.monotonic()
            ended = channel.exit_status_ready() or channel.closed
            if at_end and ended and not stderr.is_alive():
                return
            # A background process may hold the streams for ever: wait for quiet, not for their end
            grace_s = _GRACE_S if enough else _LATE_S
            quiet_since_s = max(quiet_since_s, self._stderr_moved_s)
            if (ended or enough) and time.monotonic() - quiet_since_s > grace_s:
                return
            self._limits.check()

    @contextlib.contextmanager
    def _closing_a_broken_link(self) -> Iterator[None]:
        """Pass over the errors of a closed channel, and close a link that can send no more.

        Every call on a channel may send (recv opens the window) and then raises EOFError or
        SSHException; the link itself goes on reading until the kernel says the same. A closed
        channel alone is an OSError. TimeoutError, the tick of a call, is raised on.
        """
        import paramiko

        try:
            yield
        except TimeoutError:
            raise
        except OSError:
            pass
        except (EOFError, paramiko.SSHException):
            self._link.close()

    def _receive(self, channel: "paramiko.Channel") -> bytes | None:
        """Return bytes, b"" at the end, or None when nothing came within a tick."""
        try:
            with self._closing_a_broken_link():
                return channel.recv(CHUNK_BYTES)
        except TimeoutError:
            return None
        return b""

    def _drain_stderr(self, channel: "paramiko.Channel", sinks: Sinks) -> None:
        while True:
            chunk = b""
            try:
                with self._closing_a_broken_link():
                    chunk = channel.recv_stderr(CHUNK_BYTES)
            except TimeoutError:
                if channel.closed:
                    return
                continue
            if not chunk:
                return
            self._limits.touch()
            self._stderr += chunk
            del self._stderr[:-STDERR_KEPT_BYTES]
            if sinks.stderr is not None and not self._pass_on(sinks.stderr, chunk):
                return

    def _pass_on(self, sink: Sink, chunk: bytes) -> bool:
        self._stderr_at_work = True
        try:
            sink(chunk)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._thread_error = error
            return False
        finally:
            self._stderr_moved_s = time.monotonic()
            self._stderr_at_work = False
        return True

    def _feed(self, channel: "paramiko.Channel", stdin: Iterable[bytes]) -> None:
        try:
            for block in stdin:
                if not self._send(channel, memoryview(block)):
                    return  # the command takes no more; how it ends says why
                if not block:
                    time.sleep(PAUSE_S)
                    if channel.closed:
                        return
            with self._closing_a_broken_link():
                channel.shutdown_write()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._thread_error = error

    def _send(self, channel: "paramiko.Channel", block: memoryview) -> bool:
        while block:
            num_sent = 0
            try:
                with self._closing_a_broken_link():
                    num_sent = channel.send(bytes(block[:_PACKET_BYTES]))
            except TimeoutError:
                continue
            if num_sent == 0:
                return False
            self._limits.touch()
            block = block[num_sent:]
        return True

    def _lost(self) -> UnreachableError:
        why = self._link.get_exception()
        return UnreachableError(
            f"the connection was lost{f' ({why})' if why else ''}",
            place=self._place,
            code="link-lost",
            hint="run the same command again when the host answers",
        )


class Heartbeat:
    """Asks the host for an answer every ``interval_s`` and closes a link that gives none.

    paramiko's own keepalive sends and never looks for the answer, so a stalled host would hang
    every wait for ever.
    """

    ALLOWED_MISSES = 3

    def __init__(self, link: "paramiko.Transport", interval_s: float) -> None:
        self._link = link
        self._interval_s = interval_s
        self._answered_s = time.monotonic()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, daemon=True, name="ssh-heartbeat"),
            threading.Thread(target=self._watch, daemon=True, name="ssh-heartbeat-watch"),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; call it after the link was closed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _ask(self) -> None:
        while not self._stop.wait(self._interval_s) and self._link.is_active():
            with contextlib.suppress(Exception):  # a link that ends meanwhile ends the loop
                # A refusal of the unknown request is an answer too.
                self._link.global_request("keepalive@openssh.com", wait=True)
                self._answered_s = time.monotonic()

    def _watch(self) -> None:
        limit_s = self._interval_s * self.ALLOWED_MISSES
        while not self._stop.wait(min(1.0, self._interval_s)) and self._link.is_active():
            if time.monotonic() - self._answered_s > limit_s:
                self._link.close()
