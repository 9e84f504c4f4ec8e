"""Reports from the field about launch, stop and warm-up that no other file covers."""

import fcntl
import json
import os
import re
import tomllib
from pathlib import Path

from tests.dflashctl.act.conftest import REPOSITORY, Project, wait_until


def trainer_pid(project: Project, tag: str) -> int:
    process = json.loads((project.run_dir(tag) / "process.json").read_text())
    pid: int = process["trainer_pid"]
    return pid


def group_members(group: int) -> list[str]:
    """Command lines of the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended
    return found


def test_stop_of_a_name_like_that_of_a_run_leaves_it_alone(deployed: Project) -> None:  # F45
    assert deployed.run("launch", "--tag", "fresh7").returncode == 0
    pid = trainer_pid(deployed, "fresh7")
    for other in ("fresh", "fresh7*", "resh7"):
        assert deployed.run("-l", "here/self", "stop", other).returncode == 2
    assert Path(f"/proc/{pid}").exists()
    assert deployed.document("status", "fresh7")["runs"][0]["state"] == "running"
    assert deployed.run("stop", "fresh7").returncode == 0


def test_a_run_has_its_own_environment_while_an_older_one_and_its_tmux_live(  # F47
    deployed: Project,
) -> None:
    hosts = deployed.root / "hosts.yaml"
    text = hosts.read_text()
    for value in ("old", "new"):
        hosts.write_text(f"{text}        env: {{FOO: {value}}}\n")
        assert deployed.run("launch", "--tag", value).returncode == 0
    for value in ("old", "new"):
        environment = Path(f"/proc/{trainer_pid(deployed, value)}/environ").read_bytes()
        assert f"FOO={value}".encode() in environment.split(b"\0")
    secret = deployed.run_dir("new") / "environment.json"
    assert secret.stat().st_mode & 0o777 == 0o600
    for value in ("old", "new"):
        assert deployed.run("stop", value).returncode == 0


def test_a_worker_that_ignores_signals_ends_with_its_run(deployed: Project) -> None:  # F53
    assert deployed.run("launch", "--tag", "x", "--set", "seed=12").returncode == 0
    group = trainer_pid(deployed, "x")
    wait_until(lambda: len(group_members(group)) >= 2)
    stopped = deployed.document("stop", "x")
    assert (stopped["rc"], stopped["signal"]) == (0, "SIGINT"), stopped
    assert group_members(group) == []


def test_a_second_warm_up_into_the_same_cache_is_refused(deployed: Project) -> None:  # F55
    first = deployed.document("warmup")
    assert first["rc"] == 0, first
    lock = Path(first["cache_dir"]) / "warmup.lock"
    (staged,) = Path(deployed.workspace).glob("warmup/*/manifest.json")
    before = staged.read_bytes()
    handle = os.open(lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    second = deployed.run("warmup", "--set", "seed=5")
    os.close(handle)
    assert second.returncode == 3
    assert "another warmup is at work with the same cache" in second.stderr
    assert staged.read_bytes() == before, "the one at work may read it at any time"
    assert deployed.run("warmup").returncode == 0


def test_every_dependency_has_a_lowest_and_a_highest_version() -> None:  # F70
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    assert wanted
    bounds = r"[\w.-]+>=[\d.]+,<[\d.]+"
    assert [one for one in wanted if not re.fullmatch(bounds, one)] == []
    locked = {
        line.split("==")[0].lower()
        for line in (REPOSITORY / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    names = {re.split(r"[<>=]", one)[0].lower() for one in wanted}
    assert names <= locked
