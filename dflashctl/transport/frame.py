"""The framed script: one user action as bash on stdin, its output between two marks.

On the wire: a small constant argv, then N bytes of script and the payload on stdin. Only what
stands between ``@@NONCE begin`` and ``@@NONCE rc=R`` is read, so banners, .bashrc output and
exit statuses of ssh, sudo and pct never pass for the script's own.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from dflashctl.errors import DflashctlError, StateUnknownError, UnreachableError, UsageError
from dflashctl.transport.base import (
    EnoughRead,
    Finished,
    Script,
    ScriptResult,
    Sink,
    Transport,
    readable,
)
from dflashctl.transport.refusal import refusal

MAX_NOISE_BYTES = 1024 * 1024  # stdout before the begin mark
MAX_STDOUT_BYTES = 256 * 1024 * 1024  # kept in memory by run_script

# $1: bytes of script, $2: nonce. LC_ALL=C makes ${#s} count bytes: a script cut short by a killed
# client must not run. eval has no argument limit; the subshell keeps `exit` and `exec` inside.
BOOT = r"""export LC_ALL=C
s=$(head -c "$1"; printf x); s=${s%x}
[ "${#s}" = "$1" ] || { echo "dflashctl: script cut short" >&2; exit 96; }
export LANG=C.UTF-8 LC_ALL=C.UTF-8
unset TMUX CDPATH ENV BASH_ENV
m=$2
printf '@@%s begin\n' "$m"
(set --; unset m; eval "$s")
printf '@@%s rc=%d\n' "$m" "$?"
"""


class FrameParser:
    """Cuts the script's own stdout out of the stream, byte for byte, as it arrives.

    Holds back only bytes that may be the start of a mark, so a live line is never late.
    """

    def __init__(self, nonce: str, sink: Sink) -> None:
        self._begin = f"@@{nonce} begin\n".encode()
        self._end = f"@@{nonce} rc=".encode()
        self._sink = sink
        self._buffer = b""
        self.noise = b""  # the end of what came before the begin mark
        self.num_noise_bytes = 0
        self.begun = False
        self.ended = False
        self.rc: int | None = None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of stdout.

        Raises: EnoughRead when the end mark is complete; StateUnknownError for endless noise.
        """
        self._buffer += chunk
        if not self.begun:
            self._skip_noise()
        if self.begun and not self.ended:
            self._pass_on()
        if self.ended and self.rc is None and b"\n" in self._buffer:
            self.rc = int(self._buffer.split(b"\n", 1)[0])
            self._buffer = b""
        if self.rc is not None:
            raise EnoughRead

    def _skip_noise(self) -> None:
        before, mark, after = self._buffer.partition(self._begin)
        if mark:
            self.begun, self._buffer = True, after
        else:
            keep = _held_back(before, self._begin)
            self._buffer = before[len(before) - keep :]
            before = before[: len(before) - keep]
        self.num_noise_bytes += len(before)
        self.noise = (self.noise + before)[-1024:]
        if not self.begun and self.num_noise_bytes > MAX_NOISE_BYTES:
            raise StateUnknownError(
                f"the host printed {self.num_noise_bytes} bytes before the script began",
                hint="a login file such as ~/.bashrc prints without end; it must be silent when "
                f"the shell is not interactive. Last lines: {readable(self.noise)[-200:]!r}",
            )

    def _pass_on(self) -> None:
        data, mark, after = self._buffer.partition(self._end)
        if mark:
            self.ended, self._buffer = True, after
        else:
            keep = _held_back(data, self._end)
            self._buffer = data[len(data) - keep :]
            data = data[: len(data) - keep]
        if data:
            self._sink(data)


def _held_back(data: bytes, mark: bytes) -> int:
    """Return how many of the last bytes of ``data`` may be the start of ``mark``."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


def run_script(transport: Transport, script: Script) -> ScriptResult:
    """Run ``script`` and keep its stdout; ``script.deadline_s`` bounds the whole.

    Raises: ContainerDownError, UnreachableError, StateUnknownError (no end mark), and UsageError,
    TrustError or RefusedError where the host, sudo or pct refuse.
    """
    kept: list[bytes] = []
    num_bytes = 0

    def keep(chunk: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(chunk)
        if num_bytes > MAX_STDOUT_BYTES:
            raise DflashctlError(
                f"{script.what} printed more than {MAX_STDOUT_BYTES} bytes", place=transport.place
            )
        kept.append(chunk)

    limits = (script.deadline_s, None)
    return _run(transport, script, keep, limits, lambda: b"".join(kept))


def stream_script(transport: Transport, script: Script, on_bytes: Sink) -> ScriptResult:
    """Run ``script`` and hand its stdout to ``on_bytes``; the result's stdout is empty.

    ``script.deadline_s`` is the longest silence in either direction; None waits for ever.
    Raises: as run_script, and what ``on_bytes`` raises (it ends the stream).
    """
    return _run(transport, script, on_bytes, (None, script.deadline_s), lambda: b"")


def relay_script(
    transport: Transport, script: Script, on_stdout: Sink, on_stderr: Sink
) -> ScriptResult:
    """Run ``script`` and hand both its streams on; ``script.deadline_s`` bounds the whole.

    ``on_stderr`` gets all that ssh, sudo and pct say too. Raises: as run_script, and what the sinks
    raise.
    """
    return _run(transport, script, on_stdout, (script.deadline_s, None), lambda: b"", on_stderr)


def _run(
    transport: Transport,
    script: Script,
    sink: Sink,
    limits: tuple[float | None, float | None],
    stdout: Callable[[], bytes],
    on_stderr: Sink | None = None,
) -> ScriptResult:
    if "\0" in script.text:
        raise UsageError(f"the text of {script.what} holds a NUL byte", place=transport.place)
    text = script.text.encode("utf-8", "surrogateescape")
    nonce = secrets.token_hex(16)
    parser = FrameParser(nonce, sink)
    argv = ["bash", "--noprofile", "--norc", "-c", BOOT, "dflashctl", str(len(text)), nonce]
    started_s = time.monotonic()
    try:
        stdin = _stdin(text, script.payload)
        finished = transport.execute(argv, stdin, parser.feed, *limits, on_stderr)
    except UnreachableError as error:
        if parser.rc is None and parser.begun and error.code == "link-lost":
            raise _unknown(script, transport, error.message) from error
        if parser.rc is None:
            raise
        finished = Finished(None, b"")  # the end mark came; how the link went down matters not
    elapsed_s = time.monotonic() - started_s
    if parser.rc is None:
        raise _no_end(parser, finished, script, transport)
    return ScriptResult(parser.rc, stdout(), finished.stderr, elapsed_s)


def _stdin(text: bytes, payload: Iterable[bytes]) -> Iterator[bytes]:
    yield text
    yield from payload


def _no_end(
    parser: FrameParser, finished: Finished, script: Script, transport: Transport
) -> DflashctlError:
    """Say why there is no end mark: a refusal before the script began, or nobody knows."""
    if not parser.begun:
        refused = refusal(finished, transport.place)
        if refused is not None:
            return refused
    how = "no status" if finished.status is None else f"exit status {finished.status}"
    where = "stopped before its end" if parser.begun else "gave no sign of having begun"
    tail = readable(finished.stderr)[-1000:] or readable(parser.noise)[-300:]
    return _unknown(script, transport, f"{where} ({how}){': ' + tail if tail else ''}")


def _unknown(script: Script, transport: Transport, why: str) -> StateUnknownError:
    return StateUnknownError(
        f"{script.what}: {why}",
        place=transport.place,
        hint="whether it took effect is not known; look with `dflashctl status`, then run the "
        "same command again",
    )
