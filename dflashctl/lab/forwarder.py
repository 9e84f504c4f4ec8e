"""127.0.0.1:PORT of this machine to port 22 of a host, with a line that can stall or be cut."""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflashctl.lab.kernel import enter_network
from dflashctl.lab.state import read_json

TICK_S = 0.1  # how old a line's state may be
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


class Line:
    """The state of a host's line: "ok", "stall" (no byte moves) or "cut" (reset and refused)."""

    def __init__(self, faults: Path) -> None:
        self._faults = faults
        self._reading = threading.Lock()  # else one that read long ago may have the last word
        self._read_at = float("-inf")
        self._mode = "ok"

    def mode(self) -> str:
        """What faults.json says, at most a tenth of a second old."""
        with self._reading:
            now = time.monotonic()
            if now - self._read_at > TICK_S:
                self._read_at = now
                self._mode = read_json(self._faults).get("net", "ok")
            return self._mode


class Forwarder:
    """Accepts on a listening socket and connects from inside the host's network namespace."""

    def __init__(self, listener: socket.socket, host_pid: int, line: Line) -> None:
        self._listener = listener
        self._network = os.open(f"/proc/{host_pid}/ns/net", os.O_RDONLY)
        self._line = line

    def start(self) -> None:
        """Serve in daemon threads until the process ends."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client = self._listener.accept()[0]
            if self._line.mode() == "cut":
                client.close()
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            enter_network(self._network)  # this thread only
            server = socket.create_connection(("127.0.0.1", 22))
        except OSError:  # sshd is down: the client sees its connection closed
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pump, args=(server, client, self._line.mode), daemon=True)
        back.start()
        _pump(client, server, self._line.mode)
        back.join()
        client.close()
        server.close()


def _pump(source: socket.socket, sink: socket.socket, mode: Callable[[], str]) -> None:
    """Move bytes one way until end of file; both sockets stay blocking."""
    try:
        while mode() != "cut":
            if mode() == "stall":
                time.sleep(TICK_S)
            elif select.select([source], [], [], TICK_S)[0] and mode() == "ok":
                data = source.recv(65536)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                # Else sshd, by Nagle's rule, waits 40 ms for the kernel here, not for its client's.
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                sink.sendall(data)
    except OSError:
        pass  # one end failed: both are reset below, as after a cut
    for end in (source, sink):
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.shutdown(socket.SHUT_RDWR)
