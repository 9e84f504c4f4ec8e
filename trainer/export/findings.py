"""What validation says of an export: one finding a rule, and the report of all of them."""

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 1
OK, WARN, FAIL = "ok", "warn", "FAIL"
EVERY = "every"  # a rule that all engines share
NOT_RUN = "Rules were checked without a GPU; no engine was run."
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One rule's result.

    level: ok, warn or FAIL. where: ``file: key``. fix: the next step. faults: numbers of
    docs/faults.md that the rule guards against. engine: who has the rule.
    """

    level: str
    rule: str
    what: str
    where: str = ""
    fix: str = ""
    faults: tuple[int, ...] = ()
    engine: str = EVERY


@dataclass(frozen=True)
class Report:
    """All findings of one directory. engines: those asked for."""

    directory: str
    layout: str
    engines: tuple[str, ...]
    findings: tuple[Finding, ...]
    target: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every rule was looked at and none failed; warnings do not count."""
        return bool(self.findings) and not self.count(FAIL)

    def count(self, level: str) -> int:
        """Return how many findings have the level."""
        return sum(finding.level == level for finding in self.findings)

    def failed(self, engine: str) -> bool:
        """Say whether a rule of this engine, or one that all share, failed."""
        return any(f.level == FAIL and f.engine in (EVERY, engine) for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of --json."""
        return {
            "v": VERSION,
            "kind": "validate",
            "ok": self.ok,
            "directory": self.directory,
            "layout": self.layout,
            "target": self.target,
            "engines": {engine: not self.failed(engine) for engine in self.engines},
            "engine_run": False,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def table(self) -> str:
        """Return one line a rule, below a failed one where it is and the fix; then the verdict."""
        engine_width = max((len(f.engine) for f in self.findings), default=0)
        rule_width = max((len(f.rule) for f in self.findings), default=0)
        lines: list[str] = []
        for found in self.findings:
            head = f"{found.level:<4}  {found.engine:<{engine_width}}  {found.rule:<{rule_width}}  "
            lines += wrapped(head, found.what)
            if found.level != OK:
                lines += wrapped("      where  ", found.where)
                lines += wrapped("      fix    ", found.fix)
        counts = ", ".join(f"{self.count(n)} {n}" for n in (OK, WARN, FAIL) if self.count(n))
        verdicts = ", ".join(
            f"{engine} {'FAIL' if self.failed(engine) else 'ok'}" for engine in self.engines
        )
        lines += [f"{self.directory} ({self.layout} layout): {counts}", verdicts, NOT_RUN]
        return "\n".join(lines) + "\n"


def wrapped(head: str, text: str) -> list[str]:
    """Return ``text`` behind ``head`` in lines of at most 100 columns, indented below it."""
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
