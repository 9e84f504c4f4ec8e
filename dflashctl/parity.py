"""The train-serve check of a run in its container, and what launch makes of its findings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import DflashctlError, RefusedError
from dflashctl.gpu_roles import Ways
from dflashctl.rehearsal import Rehearsal, rehearse, rehearse_pinned
from dflashctl.remote_run import Code
from trainer.contract.config import TrainConfig
from trainer.contract.exit_record import TrainerExit
from trainer.contract.manifest import Manifest

FAIL = "FAIL"
_COMMAND = "check"
_ANSWERS = (int(TrainerExit.FINISHED), int(TrainerExit.FAULTS))
_MAX_TOLD = 12  # findings that an error message names


@dataclass(frozen=True)
class Finding:
    """One check: status ok, FAIL or skipped; what was seen; for a failure where and the fix."""

    name: str
    status: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True)
class Findings:
    """All that the trainer's check said; ``reused``: proven by an earlier check of the same."""

    ok: bool
    fast: bool
    target: str
    seconds: float
    reused: bool
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that stand against a launch."""
        return tuple(finding for finding in self.findings if finding.status == FAIL)


@dataclass(frozen=True)
class CheckRequest:
    """Which check: fast needs no weights and no GPU; reuse takes an earlier answer for the same."""

    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    fast: bool = False
    reuse: bool = False


def look(ways: Ways, request: CheckRequest, on_output: Callable[[bytes], None]) -> Findings:
    """Check a configuration in its container, as a launch of it would be.

    The full check takes the run's GPUs, which must be idle. Raises: as ``rehearse``.
    """
    found = _Reports()
    rehearse(ways, _rehearsal(request), on_output, found.take)
    return found.read(ways)


def look_before_launch(
    ways: Ways, manifest: Manifest, request: CheckRequest, on_output: Callable[[bytes], None]
) -> Findings:
    """Check a manifest that is about to be launched; one round trip. Raises: as ``rehearse``."""
    found = _Reports()
    rehearse_pinned(ways, manifest, _rehearsal(request), on_output, found.take)
    return found.read(ways)


def require_passed(findings: Findings, place: str) -> None:
    """Raise RefusedError, with every finding and its fix, unless the check passed."""
    failed = findings.failed
    if findings.ok and not failed:
        return
    told = "; ".join(f"{f.name}: {f.what} ({f.where})" for f in failed[:_MAX_TOLD])
    fixes = [f"{finding.name}: {finding.fix}" for finding in failed[:_MAX_TOLD]]
    raise RefusedError(
        f"the check found {len(failed)} fault{'' if len(failed) == 1 else 's'}: {told}",
        hint="\n".join([*fixes, "dflashctl check shows all; --skip-check launches all the same"]),
        place=place,
        code="check-failed",
    )


def summary(findings: Findings) -> str:
    """Return in one line what was proven, and what was not."""
    skipped = [finding for finding in findings.findings if finding.status == "skipped"]
    proven = sum(finding.status == "ok" for finding in findings.findings)
    told = ", ".join(f"{finding.name}: {finding.what}" for finding in skipped[:_MAX_TOLD])
    once = ", by an earlier check of the same run" if findings.reused else ""
    return f"check passed: {proven} ok{once}" + (f"; skipped {told}" if told else "")


def _rehearsal(request: CheckRequest) -> Rehearsal:
    options = ["--json"]
    options += ["--fast"] if request.fast else []
    options += ["--reuse"] if request.reuse else []
    return Rehearsal(
        _COMMAND,
        request.code,
        request.config,
        request.argv,
        options=tuple(options),
        claim=not request.fast,
        accepted=_ANSWERS,
    )


class _Reports:
    """Keeps the one document that the check prints."""

    def __init__(self) -> None:
        self._document: dict[str, Any] | None = None

    def take(self, report: dict[str, Any]) -> None:
        if report["kind"] == _COMMAND:
            self._document = report

    def read(self, ways: Ways) -> Findings:
        """Return the findings. Raises: DflashctlError when there was no document, or a bad one."""
        try:
            raw = self._document or {}
            return Findings(
                ok=bool(raw["ok"]),
                fast=bool(raw["fast"]),
                target=str(raw["target"]),
                seconds=float(raw["seconds"]),
                reused=bool(raw["reused"]),
                findings=tuple(
                    Finding(**{key: str(one[key]) for key in Finding.__dataclass_fields__})
                    for one in raw["findings"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DflashctlError(
                f"the trainer's check gave no report that can be read ({error!r})",
                hint="dflashctl deploy, then the same command again",
                place=ways.place.label,
            ) from error
