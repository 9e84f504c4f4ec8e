"""What the documents name exists: tests, checks."""

import re
from pathlib import Path

import pytest

from trainer.check.gate import CHECKS

ROOT = Path(__file__).resolve().parents[1]
NUM_FAULTS = 52
NUM_REPORTS = 54


def _missing_tests(text: str, below: Path) -> list[str]:
    """Return the tests named ``path::name`` that are not there."""
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert found
    return [
        f"{path}::{name}"
        for path, name in found
        if not (below / path).is_file()
        or not re.search(rf"^\s*def {name}\b", (below / path).read_text(), re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def faults() -> str:
    return (ROOT / "docs" / "faults.md").read_text()


def test_every_test_that_the_faults_name_exists(faults: str):
    assert _missing_tests(faults, ROOT / "tests" / "trainer") == []


def test_every_fault_has_a_line_with_a_check_or_a_test_or_a_reason(faults: str):
    lines = re.findall(r"^\| (\d+) \|.*$", faults, re.MULTILINE)
    assert [int(number) for number in lines] == list(range(1, NUM_FAULTS + 1))
    for line in re.findall(r"^\| \d+ \|.*$", faults, re.MULTILINE):
        assert "::test_" in line or "Does not apply" in line


def test_checks_that_the_faults_name_are_those_of_the_gate(faults: str):
    named: dict[str, set[int]] = {}
    for number, cell in re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|", faults, re.MULTILINE):
        for name in re.findall(r"`([\w-]+)`", cell):
            named.setdefault(name, set()).add(int(number))
    assert named == {check.name: set(check.faults) for check in CHECKS}


def test_every_test_that_the_field_reports_name_exists():
    text = (ROOT / "docs" / "field_reports.md").read_text()
    assert _missing_tests(text, ROOT / "tests") == []
    lines = re.findall(r"^\| F\d+ \|.*$", text, re.MULTILINE)
    assert len(lines) == NUM_REPORTS
    for line in lines:
        assert "::test_" in line or "Not in the lab" in line, line
