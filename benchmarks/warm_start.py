"""Commands of dflashctl without the start of an interpreter: forked from one that has all imported.

Each is a process of its own with the real command line, from its parsing to its exit status, and
may be killed at any moment; a third of a second of imports a command is what is saved.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_MESSAGE_BYTES = 1 << 16
_LEFT_OUT = ("dflashctl.demo", "dflashctl.lab", "dflashctl.remote", "dflashctl.__main__")


class WarmStart:
    """An interpreter that forks commands in ``directory``; it ends with its ``close``."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=directory,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: Sequence[str], stdout: BinaryIO, stderr: BinaryIO) -> "Command":
        """Start ``dflashctl ARGUMENTS``."""
        told, tells = os.pipe()
        fds = [stdout.fileno(), stderr.fileno(), tells]
        try:
            socket.send_fds(self._ours, [json.dumps(list(arguments)).encode()], fds)
        finally:
            os.close(tells)
        return Command(told, arguments)

    def close(self) -> None:
        """End the interpreter; commands at work go on."""
        self._ours.close()
        self._process.wait()


class Command:
    """A command at work; like Popen as far as it goes."""

    def __init__(self, told: int, arguments: Sequence[str]) -> None:
        self.arguments = arguments
        self._told = told
        self._words = b""
        self._status: int | None = None
        self.pid = int(self._word(None) or 0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or minus the signal. Raises: subprocess.TimeoutExpired."""
        if self._status is None:
            word = self._word(timeout)
            if word is None:
                raise subprocess.TimeoutExpired(list(self.arguments), timeout or 0.0)
            self._status = os.waitstatus_to_exitcode(int(word))
            os.close(self._told)
        return self._status

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _word(self, timeout: float | None) -> bytes | None:
        while b"\n" not in self._words:
            if not select.select([self._told], [], [], timeout)[0]:
                return None
            data = os.read(self._told, 64)
            if not data:
                raise RuntimeError("the interpreter that starts the commands has ended")
            self._words += data
        word, _, self._words = self._words.partition(b"\n")
        return word


def _import_all() -> None:
    """Import what a verb imports when it runs."""
    package = importlib.import_module("dflashctl")
    for module in pkgutil.walk_packages(package.__path__, "dflashctl."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
    importlib.import_module("fabric")


def _keep(arguments: list[str], stdout: int, stderr: int, tells: int) -> int | None:
    """Fork the command, and tell its pid and its wait status; None in the command itself."""
    pid = os.fork()
    if pid:
        os.write(tells, b"%d\n" % pid)
        os.write(tells, b"%d\n" % os.waitpid(pid, 0)[1])
        return 0
    os.close(tells)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (stdout, stderr):
        os.close(fd)
    sys.argv = ["dflashctl", *arguments]
    return None


def serve(connection: socket.socket) -> None:
    """Fork a command for each message, until the other side closes."""
    _import_all()
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if _keep(json.loads(message), *fds) is None:
                runpy.run_module("dflashctl", run_name="__main__", alter_sys=True)
            os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who keep the commands are not waited for
    serve(socket.socket(fileno=int(sys.argv[1])))
