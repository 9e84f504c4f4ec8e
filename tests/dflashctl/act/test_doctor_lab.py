"""doctor through real ssh, pct and containers of the lab."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import Project

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]


@pytest.fixture
def laptop(tmp_path: Path, stand_in: Path, lab_site: Lab) -> Project:
    (tmp_path / "hosts.yaml").write_text(lab_site.hosts_yaml(python=sys.executable))
    return Project(tmp_path, "/workspace", stand_in)


def by_name(document: dict[str, Any], place: str) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in document["checks"] if c["place"] == place}


def test_doctor_finds_the_faults_of_a_site_in_one_look(  # F04, F25, F31
    laptop: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro6", "lock", "200")
    lab_site.fault("kpro6", "noise", "Welcome to node-a")
    lab_site.fault("kpro7", "net", "cut")
    found = laptop.document("doctor", "-l", "kpro6", "-l", "kpro7")
    assert found["rc"] == 1, json.dumps(found)
    node = by_name(found, "kpro6")
    assert node["pct"]["found"] == "/usr/sbin/pct on kpro6"
    assert node["container 200"]["status"] == "warn"
    assert (node["container 201"]["status"], node["container 201"]["fix"]) == (
        "FAIL",
        "pct start 201",
    )
    assert "to 200, 201" in node["shared GPUs"]["found"]
    assert by_name(found, "kpro6/201")["reach"]["found"] == "see `container 201` of kpro6"
    inside = by_name(found, "kpro6/200")
    assert inside["tmux"]["found"] == "/usr/bin/tmux"
    assert inside["CUDA"]["status"] == "FAIL", "the lab has no libcuda"
    assert inside["device nodes"]["status"] == "ok"
    assert inside["workspace"]["status"] == "ok"
    assert by_name(found, "kpro7")["reach"]["status"] == "FAIL"
    assert by_name(found, "kpro7/200")["reach"]["status"] == "skipped"


def test_a_host_that_cannot_be_reached_ends_the_verb_with_4(laptop: Project, lab_site: Lab) -> None:
    lab_site.fault("kpro7", "net", "cut")
    done = laptop.run("doctor", "-l", "kpro7")
    assert done.returncode == 4
    assert "FAIL     reach" in done.stdout
