"""Files of a run or a release that something damaged: each is named, and nothing false is said."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.dflashctl.act.conftest import Project, wait_until

GARBAGE = (b"\xff\xfe\x00garbage", b"{}\n")


def launched(project: Project, tag: str = "x") -> None:
    done = project.run("launch", "--tag", tag)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_process_json_of_a_living_run_is_not_taken_for_its_end(
    deployed: Project, garbage: bytes
) -> None:
    launched(deployed)
    path = deployed.run_dir("x") / "process.json"
    whole = path.read_bytes()
    path.write_bytes(garbage)
    assert deployed.document("status", "x")["runs"][0]["state"] == "running"
    done = deployed.run("stop", "x")
    path.write_bytes(whole)
    pids = json.loads(whole)
    assert done.returncode == 1
    assert "error[process-unknown]" in done.stderr
    assert f"held by pid {pids['runner_pid']} {pids['trainer_pid']}" in done.stderr
    assert f"kill -INT {pids['trainer_pid']}" in done.stderr
    assert deployed.run("stop", "x").returncode == 0


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_manifest_in_the_container_is_named_by_every_verb_that_needs_it(
    deployed: Project, garbage: bytes
) -> None:
    launched(deployed)
    assert deployed.run("stop", "x").returncode == 0
    path = deployed.run_dir("x") / "manifest.json"
    path.write_bytes(garbage)
    assert deployed.document("status", "x")["runs"][0]["state"] == "stopped"
    for line in ("launch --resume x", f"evaluate x --prompts {path}"):
        done = deployed.run(*line.split())
        assert done.returncode == 7
        assert f"error[manifest-damaged]: here/self: {path} is damaged" in done.stderr
    for verb in ("export", "pull"):
        done = deployed.run(verb, "x")
        assert done.returncode != 0
        assert "manifest" in done.stderr or "cannot enter the run" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_damaged_record_here_is_named_and_can_be_passed_by(deployed: Project) -> None:
    launched(deployed)
    record = deployed.root / "runs" / "x" / "manifest.json"
    record.write_bytes(GARBAGE[0])
    done = deployed.run("stop", "x")
    assert done.returncode == 2
    assert f"the record {record} is damaged" in done.stderr
    assert deployed.run("stop", "x", "--limit", "here/self").returncode == 0


def test_a_run_whose_runner_was_killed_is_stopped_without_saying_it_has_no_checkpoint(
    deployed: Project,
) -> None:
    launched(deployed)
    process = json.loads((deployed.run_dir("x") / "process.json").read_text())
    os.kill(process["runner_pid"], signal.SIGKILL)
    checkpoints = deployed.run_dir("x") / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("step_*/COMPLETE.json")))
    done = deployed.run("stop", "x")
    assert done.returncode == 1
    assert done.stdout.startswith("x ended by SIGINT: no exit record")
    assert "none" not in done.stdout.replace("none visible", "")
    assert deployed.run("launch", "--resume", "x").returncode == 0
    assert deployed.run("stop", "x").returncode == 0


@pytest.mark.parametrize("damage", ["a byte more", "a file less", "a file more"])
def test_resume_refuses_a_release_that_is_not_the_one_of_the_launch(
    deployed: Project, damage: str
) -> None:
    launched(deployed)
    assert deployed.run("stop", "x").returncode == 0
    (release,) = Path(deployed.workspace, "releases").iterdir()
    code = release / "trainer" / "errors.py"
    if damage == "a byte more":
        code.write_bytes(code.read_bytes() + b"\n")
    elif damage == "a file less":
        code.unlink()
    else:
        (release / "trainer" / "torch.py").write_text("")
    done = deployed.run("launch", "--resume", "x")
    assert done.returncode == 3
    assert "error[release-damaged]" in done.stderr
    assert deployed.run("deploy").returncode == 0
    code.chmod(0o600)  # a mode that a file system changes is no other code
    assert deployed.run("launch", "--resume", "x").returncode == 0
    assert deployed.run("stop", "x").returncode == 0


@pytest.mark.parametrize("verb", ["export", "watch", "logs", "launch --resume"])
def test_a_run_that_never_was_is_told_by_every_verb(deployed: Project, verb: str) -> None:
    done = deployed.run(*verb.split(), "nosuch")
    assert done.returncode == 2
    assert "error[no-such-run]: here/self: there is no run" in done.stderr
