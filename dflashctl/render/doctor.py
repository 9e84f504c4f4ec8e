"""What ``doctor`` prints: a line a check, by place, with the fix below what is not right."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from dflashctl.diagnosis import FAIL, OK, SKIPPED, WARN, Check
from dflashctl.operations.doctor import DoctorResult

_COUNTED = (OK, WARN, FAIL, SKIPPED)


def doctor_text(result: DoctorResult) -> str:
    """Return the checks as text, and the count of each kind last."""
    width = max(len(check.name) for check in result.checks)
    lines: list[str] = []
    for place, checks in groupby(result.checks, key=lambda check: check.place):
        lines.append(place)
        for check in checks:
            lines += _lines(check, width)
    counts = ", ".join(f"{number} {status}" for status, number in _counts(result).items())
    return "\n".join([*lines, counts]) + "\n"


def _lines(check: Check, width: int) -> list[str]:
    found = " ".join(check.found.split())
    lines = [f"  {check.status:<7}  {check.name:<{width}}  {found}"]
    if check.fix and check.status in (WARN, FAIL):
        lines.append(f"  {'':<7}  {'':<{width}}  fix: {' '.join(check.fix.split())}")
    return lines


def _counts(result: DoctorResult) -> dict[str, int]:
    return {status: sum(check.status == status for check in result.checks) for status in _COUNTED}


def doctor_document(result: DoctorResult) -> Mapping[str, Any]:
    """Return the document of ``doctor``."""
    return {"checks": [asdict(check) for check in result.checks], "counts": _counts(result)}
