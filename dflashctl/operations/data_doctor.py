"""data doctor: what the trainer finds in a run's data and sizes, before the run is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import DflashctlError
from dflashctl.gpu_roles import Ways
from dflashctl.rehearsal import Rehearsal, Report, rehearse
from dflashctl.remote_run import Code
from trainer.contract.config import TrainConfig
from trainer.contract.exit_record import TrainerExit

_COMMAND = "doctor"


@dataclass(frozen=True)
class DoctorRequest:
    """samples: chats that the target is asked about; with 0 it is not loaded and takes no GPU."""

    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    samples: int


@dataclass(frozen=True)
class DoctorResult:
    """The trainer's report as it wrote it; ok: nothing forbids a launch."""

    place: str
    release: str
    report: dict[str, Any]
    round_trips: int

    @property
    def ok(self) -> bool:
        """Whether nothing forbids a launch."""
        return bool(self.report["ok"])


def look_at_data(
    ways: Ways, request: DoctorRequest, on_output: Callable[[bytes], None]
) -> DoctorResult:
    """Run the trainer's doctor in a staged run directory; takes no tag and leaves no run.

    Raises: RefusedError as launch does (release missing, GPU busy); ConfigurationError in the
    trainer's words; DflashctlError when it gave no report.
    """
    reports: list[Report] = []
    rehearsal = Rehearsal(
        _COMMAND,
        request.code,
        request.config,
        request.argv,
        options=("--json", "--samples", str(request.samples)),
        claim=request.samples > 0,
        accepted=(int(TrainerExit.FINISHED), int(TrainerExit.FAULTS)),
    )
    rehearse(ways, rehearsal, on_output, reports.append)
    found = [report for report in reports if report["kind"] == _COMMAND]
    if not found or not {"ok", "text"} <= found[-1].keys():
        raise DflashctlError(
            "the trainer's doctor gave no report that can be read",
            hint="dflashctl deploy, then the same command again",
            place=ways.place.label,
        )
    return DoctorResult(ways.place.label, request.code.digest, found[-1], ways.round_trips)
