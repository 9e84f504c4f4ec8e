"""exec: one command in a place, its argv exact, both streams as bytes, its own exit status.

The argv travels on stdin in front of what the command itself reads: pct passes ASCII alone, and
Linux no argument of 128 KiB that a shell line must share with others.
"""

import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflashctl.errors import UsageError
from dflashctl.transport import relay_script
from dflashctl.transport.base import Script, Sink, Transport

MAX_ARGUMENT_BYTES = 128 * 1024 - 1  # MAX_ARG_STRLEN of Linux, which counts the final NUL


@dataclass(frozen=True)
class ExecuteRequest:
    """What to run; stdin: the bytes it reads, deadline_s: seconds until dflashctl gives up."""

    argv: Sequence[str]
    stdin: Iterable[bytes] = ()
    deadline_s: float | None = None


def execute(transport: Transport, request: ExecuteRequest, on_stdout: Sink, on_stderr: Sink) -> int:
    """Run the command and return its exit status; 128 + n when signal n ended it.

    Raises: UsageError for an argument of 128 KiB; UnreachableError when it did not begin or did not
    end in time; StateUnknownError when the link was lost under it.
    """
    if any(len(part.encode("utf-8", "surrogateescape")) > MAX_ARGUMENT_BYTES
           for part in request.argv):  # fmt: skip
        raise UsageError(
            f"an argument is longer than the {MAX_ARGUMENT_BYTES} bytes that Linux allows",
            hint="send long text on standard input",
        )
    mark = f"@@{secrets.token_hex(16)}"
    script = Script(_text(request.argv, mark), request.stdin, request.deadline_s, "exec")
    said = _AfterMark(f"{mark}\n".encode(), on_stderr)
    return relay_script(transport, script, on_stdout, said.feed).rc


def execute_on_terminal(transport: Transport, argv: Sequence[str]) -> int:
    """Run the command on the user's own terminal and return its exit status.

    Raises: UnreachableError and TrustError when the link failed; UsageError for what pct or a shell
    line cannot carry.
    """
    return transport.interactive(argv)


def _text(argv: Sequence[str], mark: str) -> str:
    """Return bash that becomes ``argv``; only its own words follow ``mark`` on stderr.

    The shell that waits has no stderr: it would report the signal that ended the command.
    """
    return (
        f"exec 3>&2 2>/dev/null\nprintf '%s\\n' {mark} >&3\n"
        f"(exec 2>&3 3>&-; exec -- {shlex.join(argv)})\nexit"
    )


class _AfterMark:
    """Drops what comes before a mark (banners, locale warnings) and passes on the rest."""

    def __init__(self, mark: bytes, sink: Sink) -> None:
        self._mark = mark
        self._sink = sink
        self._rest: bytes | None = b""  # None once the mark was seen

    def feed(self, chunk: bytes) -> None:
        if self._rest is None:
            self._sink(chunk)
            return
        _, found, after = (self._rest + chunk).partition(self._mark)
        if not found:
            self._rest = (self._rest + chunk)[-len(self._mark) :]
            return
        self._rest = None
        if after:
            self._sink(after)
