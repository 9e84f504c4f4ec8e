"""lab up, hosts, status, fault, run, down through the real command line."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import Project


def test_lab_fault_lists_what_can_be_broken(project: Project) -> None:
    listed = project.run("lab", "fault")
    assert listed.returncode == 0
    assert "latency" in listed.stdout
    half = project.run("lab", "fault", "kpro6")
    assert half.returncode == 2
    assert "which fault" in half.stderr


def test_without_a_lab_status_says_down_and_down_is_fine(project: Project) -> None:
    assert project.run("lab", "status").stdout == "down\n"
    assert project.run("lab", "down").returncode == 0


@pytest.fixture
def state(lab_site: Lab) -> Iterator[str]:  # lab_site: skipped where no lab can run
    assert lab_site.status().up
    directory = tempfile.mkdtemp(prefix="lab-")
    Path(directory).rmdir()
    yield directory
    Lab(Path(directory)).down()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_second_lab_goes_up_is_used_broken_and_taken_down(project: Project, state: str) -> None:
    up = project.run("lab", "up", "--state", state)
    assert up.returncode == 0, up.stderr
    assert "up: kpro6, kpro7" in up.stdout
    twice = project.run("lab", "up", "--state", state)
    assert twice.returncode == 1
    assert "already up" in twice.stderr
    (project.root / "hosts.yaml").write_text(project.run("lab", "hosts", "--state", state).stdout)
    assert project.run("gpus", "--limit", "kpro7").returncode == 0
    status = project.document("lab", "status", "--state", state)
    assert [host["name"] for host in status["hosts"]] == ["kpro6", "kpro7"]
    assert project.run("lab", "fault", "kpro7", "net", "cut", "--state", state).returncode == 0
    assert "net cut" in project.run("lab", "status", "--state", state).stdout
    assert project.run("gpus", "--limit", "kpro7").returncode == 4
    inside = project.run("lab", "run", "--state", state, "--", "cat", "/proc/net/dev")
    assert inside.returncode == 0
    assert "lo:" in inside.stdout
    assert project.run("lab", "down", "--state", state).returncode == 0
    assert not Path(state).exists()
    assert (
        json.loads(project.run("lab", "status", "--state", state, "--json").stdout)["up"] is False
    )
