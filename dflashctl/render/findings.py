"""The table of a check: one line a finding, below a failed one where it is and the fix."""

import shutil
import textwrap

from dflashctl.operations.check import CheckResult
from dflashctl.parity import FAIL

_LABELS = ("where", "fix")


def check_text(result: CheckResult) -> str:
    """Return the table of ``check`` and its verdict."""
    found = result.check
    width = max((len(finding.name) for finding in found.findings), default=0)
    lines: list[str] = []
    for finding in found.findings:
        lines += _wrapped(f"{finding.status:<7}  {finding.name:<{width}}  ", finding.what)
        if finding.status == FAIL:
            for label in _LABELS:
                lines += _wrapped(f"         {label:<5}  ", getattr(finding, label))
    kind = "fast check" if found.fast else "check"
    failed, skipped = len(found.failed), _count(result, "skipped")
    verdict = f"{failed} failed" if failed else "passed"
    counts = f"{_count(result, 'ok')} ok" + (f", {skipped} skipped" if skipped else "")
    how = "proven before" if found.reused else f"{found.seconds:.1f} s"
    lines.append(f"{result.place}  {kind} {verdict}: {counts}  ({found.target}, {how})")
    return "\n".join(lines) + "\n"


def _count(result: CheckResult, status: str) -> int:
    return sum(finding.status == status for finding in result.check.findings)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        max(60, shutil.get_terminal_size((100, 24)).columns),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
