"""Recorded faults, seeded one by one into a copy of the code: the check finds each of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "seed_faults"


@pytest.mark.timeout(150)
def test_every_seeded_fault_is_found_by_the_check() -> None:
    # Measured, the copies would be files of the report that are gone.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, str(TOOL), "--checks-only", "--few"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "10 of 10 seeded faults were caught"
