"""The machine itself as a place: no SSH, a child process for each command."""

import os
import pwd
import subprocess
from collections.abc import Iterable, Sequence

from dflashctl.errors import UnreachableError, UsageError
from dflashctl.transport.base import Finished, Sink, Transport
from dflashctl.transport.child import Limits, Sinks, run_child


class LocalTransport(Transport):
    """Runs argv on this machine as the current user."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.round_trips = 0

    def open(self) -> None:
        """Learn the user's name; there is nothing to connect."""
        try:
            self.user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:  # a uid without an entry, as in containers started with --user
            self.user = str(os.geteuid())

    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` in a process group of its own. Raises: UnreachableError on a limit."""
        self.round_trips += 1
        try:
            limits = Limits(self.place, deadline_s, silence_s)
            return run_child(argv, stdin, Sinks(on_stdout, on_stderr), limits)
        except FileNotFoundError as error:
            if error.filename != argv[0]:
                raise  # from the payload, not from the command
            return Finished(127, f"{argv[0]}: command not found".encode())
        except PermissionError as error:
            raise UnreachableError(f"{argv[0]}: {error.strerror}", place=self.place) from error

    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` on the user's terminal."""
        try:
            return subprocess.call(list(argv))
        except FileNotFoundError as error:
            raise UsageError(
                f"{argv[0]} is not installed", place=self.place, hint=f"apt-get install {argv[0]}"
            ) from error

    def close(self) -> None:
        """Nothing is held open."""
