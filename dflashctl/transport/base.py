"""The seam between what dflashctl wants done and the wire: one framed script a user action.

A transport runs an argv on one place (a host, or a container of it) with bytes on stdin, and
hands back bytes. Everything above it is a Script; ``frame`` makes a Script of argv and marks.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflashctl.errors import DflashctlError

Sink = Callable[[bytes], None]  # may raise EnoughRead

STDERR_KEPT_BYTES = 64 * 1024
NO_SESSION = "no-session"  # code of the error of a host whose MaxSessions are in use

_NOISE = re.compile(
    r"perl: warning: |\t(LANGUAGE|LC_\w+|LANG) = |    are supported and installed on your system"
    r"|.*setlocale: LC_\w+: cannot change locale|Warning: Permanently added "
)


class EnoughRead(Exception):  # noqa: N818 - a signal from a Sink, not an error
    """Raised by a Sink that has all it waits for; execute ends soon, with or without a status."""


def readable(stderr: bytes) -> str:
    """Decode ``stderr`` for a message, without locale warnings and the like."""
    lines = stderr.decode("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if not _NOISE.match(line)).strip()


@dataclass(frozen=True)
class Script:
    """One user action on a place.

    text: bash; it runs in a subshell with stdin at the first byte of ``payload``. payload: bytes
    that follow the script on stdin. deadline_s: seconds until the client gives up; None waits for
    ever (follow). what: words for error messages ("deploy").
    """

    text: str
    payload: Iterable[bytes] = ()
    deadline_s: float | None = 60.0
    what: str = "script"


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended: its own exit status and output; stderr is the last 64 KiB."""

    rc: int
    stdout: bytes
    stderr: bytes
    elapsed_s: float

    def check(self, error: type[DflashctlError], message: str, *, place: str) -> "ScriptResult":
        """Return self when rc is 0, else raise ``error`` with the end of stderr as its hint."""
        if self.rc != 0:
            tail = readable(self.stderr)[-2000:]
            raise error(f"{message} (exit status {self.rc})", hint=tail, place=place)
        return self


@dataclass(frozen=True)
class Finished:
    """How a process on the other side ended; status is None when nobody can know."""

    status: int | None
    stderr: bytes


class Transport(ABC):
    """A way to one place.

    Threads may share an open one, a command each; opening is theirs as well, closing one's alone.
    """

    place: str  # "kpro6" or "kpro6/200", for messages
    user: str = ""  # login name on the host, known after open()
    round_trips: int = 0  # remote commands run so far

    @abstractmethod
    def open(self) -> None:
        """Connect and authenticate; harmless when already open.

        Raises: UnreachableError, TrustError.
        """

    @abstractmethod
    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` exactly, feed ``stdin`` and close it, drain both streams at once.

        An empty block of ``stdin`` says that nothing is there yet: it is asked again soon.
        ``on_stderr`` gets all of stderr, perhaps in another thread; the end is kept all the same.
        ``deadline_s`` bounds the whole, ``silence_s`` the time without a byte either way.
        Raises: UnreachableError, with code ``link-lost`` when the connection died, ``timeout`` when
        a limit passed, and NO_SESSION when nothing ran because too much does already.
        """

    @abstractmethod
    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` on the user's own terminal and return its exit status."""

    @abstractmethod
    def close(self) -> None:
        """Close; harmless when already closed."""
