"""The fault campaign in small: three cases, drawn as `make faults` draws them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fault_campaign import STEPS, Case, line_of, table, try_case
from benchmarks.fault_site import WORKSPACE, FaultSite
from dflashctl.lab.site import Lab

SEED = 10


@pytest.fixture(scope="module")
def fault_site(lab_site: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultSite]:
    site = FaultSite(lab_site, tmp_path_factory.mktemp("campaign"))
    yield site
    site.close()
    site.shell(f"rm -rf {WORKSPACE}")


@pytest.mark.lab
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "step"), list(enumerate(("deploy", "launch", "follow"))))
def test_no_rule_breaks_under_a_fault(
    fault_site: FaultSite, tmp_path: Path, number: int, step: str
) -> None:
    verdict = try_case(fault_site, Case.draw(SEED, number, step), tmp_path)
    assert verdict.violations == (), line_of(verdict)
    assert f"| {step} | 1 |" in table([verdict])


def test_a_case_is_drawn_from_its_seed_and_number_alone() -> None:
    assert Case.draw(1, 7, None) == Case.draw(1, 7, None)
    cases = [Case.draw(1, number, None) for number in range(200)]
    assert {case.step for case in cases} == set(STEPS)
    assert len({case.fault for case in cases}) == 14
