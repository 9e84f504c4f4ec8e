"""Into a container: wraps any transport to a Proxmox VE node and runs argv through pct exec."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from dflashctl.command import Become, pct_exec
from dflashctl.errors import DflashctlError
from dflashctl.transport.base import Finished, Sink, Transport


class PctTransport(Transport):
    """Runs argv inside container ``vmid`` of the node that ``node`` leads to.

    No ``pct status`` goes before: exec itself says that a container is stopped or unknown. The way
    to the node may be shared with others, also in another thread: each command has its own channel.
    """

    def __init__(
        self, node: Transport, vmid: int, become: Literal["auto", "none", "sudo"] = "auto"
    ) -> None:
        self._node = node
        self._vmid = vmid
        self._become = become
        self.place = f"{node.place}/{vmid}"

    @property
    def round_trips(self) -> int:  # type: ignore[override]
        """Remote commands run so far."""
        return self._node.round_trips

    def open(self) -> None:
        """Connect to the node."""
        with self._named():
            self._node.open()
        self.user = self._node.user

    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` in the container with a clean environment. Raises: as the node's way."""
        wrapped = self._wrap(argv)
        with self._named():
            return self._node.execute(wrapped, stdin, on_stdout, deadline_s, silence_s, on_stderr)

    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` in the container on the user's terminal."""
        with self._named():
            return self._node.interactive(self._wrap(argv, terminal=True))

    def close(self) -> None:
        """Close the way to the node."""
        self._node.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors of the link name the container that was asked for."""
        try:
            yield
        except DflashctlError as error:
            if error.place == self._node.place:
                error.place = self.place
            raise

    def _wrap(self, argv: Sequence[str], *, terminal: bool = False) -> list[str]:
        become: Become = "none"
        if self._become == "sudo" or (self._become == "auto" and self.user != "root"):
            become = "sudo"
        if terminal:  # env -i took the terminal's type; xterm-256color is known everywhere
            argv = ["env", "TERM=xterm-256color", *argv]
        return pct_exec(self._vmid, argv, become)
