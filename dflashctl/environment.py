"""The Python environment of the trainer in a container: made once for each set of requirements."""

from collections.abc import Callable
from typing import Any

from dflashctl.inventory import Place
from dflashctl.program import Program, read_answer
from dflashctl.transport import stream_script
from dflashctl.transport.base import ScriptResult, Transport

_BUILD_SILENCE_S = 1800.0  # pip is silent while it downloads and unpacks gigabytes


def set_up_environment(
    transport: Transport,
    place: Place,
    requirements: str,
    index: str,
    on_output: Callable[[bytes], None],
) -> dict[str, Any]:
    """Make the environment for ``requirements`` unless it is there; one round trip.

    index: digest of the bundle's own requirements, by which ``launch`` finds the environment.
    Returns key, python, built and version. Raises: DflashctlError when a step failed.
    """
    arguments = {
        "workspace": place.container.workspace,
        "python": place.container.python,
        "pip_args": list(place.container.pip_args),
        "index": index,
    }
    program = Program(
        "environment",
        arguments,
        [requirements.encode()],
        _BUILD_SILENCE_S,
        place.container.python,
    )
    lines = LineKeeper(on_output)
    result = stream_script(transport, program.script(), lines.feed)
    lines.close()
    kept = ScriptResult(result.rc, lines.last, result.stderr, result.elapsed_s)
    return read_answer(kept, "environment", transport.place)


class LineKeeper:
    """Passes a stream on line by line and keeps back the last line, which is the answer."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._rest = b""
        self.last = b""

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self.last:
                self._sink(self.last + b"\n")
            self.last = line

    def close(self) -> None:
        """Take an unfinished last line as a line."""
        if self._rest:
            self.feed(b"\n")
