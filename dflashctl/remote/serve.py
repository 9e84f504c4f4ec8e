"""Runs commands one after another for one client, so that entering the container is paid once.

stdin: frames KIND SIZE LF BYTES. R: run the argv that BYTES hold as JSON; I: its next bytes of
stdin, none for the end. stdout: frames O and E with what the command writes, X with its exit
status. A client that is gone leaves the command at work to its end, as one of its own would be.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

CHUNK_BYTES = 1 << 16
TICK_S = 0.1
QUIET_S = 0.05  # after a command's end: what is still open then is held by a process it left behind


class Client:
    """Who asked; frames from two threads do not mix."""

    def __init__(self) -> None:
        self.gone = False

    def send(self, kind: str, data: bytes) -> None:
        """Send one frame; nothing more to a client that is gone."""
        block = f"{kind} {len(data)}\n".encode() + data
        while block and not self.gone:
            try:
                block = block[os.write(1, block) :]
            except OSError:
                self.gone = True


class Command:
    """A command at work; a thread hands its output on and tells its end."""

    def __init__(self, argv: list[str], client: Client) -> None:
        self.client = client
        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.thread = threading.Thread(target=self.relay)
        self.thread.start()

    def relay(self) -> None:
        """Hand on both streams until the command has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stream(self.child.stdout), selectors.EVENT_READ, "O")
            selector.register(self.stream(self.child.stderr), selectors.EVENT_READ, "E")
            while selector.get_map():
                ended = self.child.poll() is not None
                ready = selector.select(QUIET_S if ended else TICK_S)
                if ended and not ready:
                    break
                for key, _ in ready:
                    data = os.read(key.fd, CHUNK_BYTES)
                    if data:
                        self.client.send(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
        status = self.child.wait()
        self.client.send("X", str(status if status >= 0 else 128 - status).encode())

    @staticmethod
    def stream(pipe: IO[bytes] | None) -> IO[bytes]:
        """Return a pipe that Popen was asked for."""
        if pipe is None:
            raise ValueError("the command has no pipe")
        return pipe

    def feed(self, data: bytes) -> None:
        """Write to its stdin; none is the end. What it does not take is dropped at its end."""
        stdin = self.stream(self.child.stdin)
        if stdin.closed:
            return
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            rest = memoryview(data)
            while rest and self.child.poll() is None:
                if selector.select(TICK_S):
                    try:
                        rest = rest[os.write(stdin.fileno(), rest[:CHUNK_BYTES]) :]
                    except BlockingIOError:
                        continue
                    except OSError:
                        break
        if not data:
            stdin.close()

    def end(self) -> None:
        """Close its stdin and wait for its end."""
        self.feed(b"")
        self.thread.join()
        for pipe in (self.child.stdout, self.child.stderr):
            self.stream(pipe).close()


def main(source: IO[bytes]) -> None:
    """Serve until the client has no more commands, or is gone."""
    client = Client()
    command: Command | None = None
    while head := source.readline():
        kind, size = head.split()
        data = source.read(int(size))
        if len(data) < int(size):
            break
        if kind == b"I" and command is not None:
            command.feed(data)
        elif kind == b"R":
            if command is not None:
                command.end()
            command = None
            try:
                command = Command(json.loads(data), client)
            except OSError as problem:
                client.send("E", f"{problem.filename}: {problem.strerror}\n".encode())
                client.send("X", b"127")
    if command is not None:
        command.end()


if __name__ == "__main__":
    with suppress(ValueError):  # a head that was cut short
        main(sys.stdin.buffer)
