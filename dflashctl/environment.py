"""The Python environment of the trainer in a container: made once for each set of requirements."""

from collections.abc import Callable
from typing import Any

from dflashctl.inventory import Place
from dflashctl.program import Program, stream_program
from dflashctl.transport.base import Transport

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
    return stream_program(transport, program, on_output)
