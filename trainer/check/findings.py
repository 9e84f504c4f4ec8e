"""What a check found, and the report of all of them as a table and as a document."""

from dataclasses import asdict, dataclass
from typing import Any

from trainer.export.findings import FAIL, OK, wrapped

VERSION = 1
SKIPPED = "skipped"  # beside ok and FAIL


class FaultFoundError(Exception):
    """A check failed: what was found; where and fix replace those that the check names itself."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix


class NotApplicableError(Exception):
    """A check has nothing to look at in this run; the text says why."""


@dataclass(frozen=True)
class Finding:
    """One check's result.

    status: ok, FAIL or skipped. what: what was seen (or why it was skipped). where: the key or
    module at fault. fix: what to change. faults: numbers of docs/faults.md that it guards against.
    """

    name: str
    status: str
    what: str
    where: str = ""
    fix: str = ""
    faults: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All findings of one run's check, in the order in which they were made."""

    findings: tuple[Finding, ...]
    fast: bool
    target: str
    seconds: float
    reused: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something was proven."""
        return bool(self.findings) and all(f.status != FAIL for f in self.findings)

    def count(self, status: str) -> int:
        """Return how many findings have the status."""
        return sum(finding.status == status for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of --json."""
        return {
            "v": VERSION,
            "kind": "check",
            "ok": self.ok,
            "fast": self.fast,
            "target": self.target,
            "seconds": round(self.seconds, 3),
            "reused": self.reused,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, reused: bool) -> "Report":
        """Read a document; raises KeyError or TypeError for one of another shape."""
        findings = tuple(
            Finding(**one | {"faults": tuple(one["faults"])}) for one in raw["findings"]
        )
        return cls(findings, raw["fast"], raw["target"], raw["seconds"], reused)

    def table(self) -> str:
        """Return one line a check, below a failed one where it is and the fix; then the sum."""
        width = max((len(f.name) for f in self.findings), default=0)
        lines: list[str] = []
        for finding in self.findings:
            lines += wrapped(f"{finding.status:<7}  {finding.name:<{width}}  ", finding.what)
            if finding.status == FAIL:
                lines += wrapped("         where  ", finding.where)
                lines += wrapped("         fix    ", finding.fix)
        counts = ", ".join(f"{self.count(s)} {s}" for s in (OK, FAIL, SKIPPED) if self.count(s))
        kind = "fast check" if self.fast else "check"
        origin = "proven before, not again" if self.reused else f"{self.seconds:.1f} s"
        lines.append(f"{kind} of {self.target}: {counts or 'nothing was checked'} ({origin})")
        return "\n".join(lines) + "\n"
