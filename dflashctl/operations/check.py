"""check: prove in the container that what would be trained is what will be served."""

from collections.abc import Callable
from dataclasses import dataclass

from dflashctl.gpu_roles import Ways
from dflashctl.parity import CheckRequest, Findings, look


@dataclass(frozen=True)
class CheckResult:
    """What the trainer found in this container."""

    place: str
    release: str
    check: Findings
    round_trips: int


def check(ways: Ways, request: CheckRequest, on_output: Callable[[bytes], None]) -> CheckResult:
    """Run the trainer's check in a staged run directory; takes no tag and leaves no run.

    Raises: RefusedError as launch does (release missing, GPU busy for the full check);
    ConfigurationError in the trainer's words when there is nothing to check.
    """
    findings = look(ways, request, on_output)
    return CheckResult(ways.place.label, request.code.digest, findings, ways.round_trips)
