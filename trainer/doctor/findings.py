"""What the doctor found: problems that forbid a launch, and warnings."""

from dataclasses import dataclass

PROBLEM, WARNING = "problem", "warning"


@dataclass(frozen=True)
class Finding:
    """level: problem or warning. what: what was found. where: file or key. fix: what to change."""

    level: str
    name: str
    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}[{self.name}]: {self.where}: {self.what}\n  fix: {self.fix}"


def problem(name: str, what: str, where: str, fix: str) -> Finding:
    """Return a finding that forbids a launch."""
    return Finding(PROBLEM, name, what, where, fix)


def warning(name: str, what: str, where: str, fix: str) -> Finding:
    """Return a finding that allows one."""
    return Finding(WARNING, name, what, where, fix)
