"""What a launch refuses and warns of before it takes anything, and what its trainer is given."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnosis.preflight import Preflight, least_checkpoint_bytes
from dflashctl.errors import ExitCode, RefusedError
from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import Project, write_model, write_project
from trainer.contract.config import CompileConfig, OptimConfig, TrainConfig

GIB = 1 << 30
TARGET = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# 5 layers of 2*4096*128*(32+8) + 3*4096*12288 numbers; 4 bytes a weight and for each of 2 moments.
CHECKPOINT_BYTES = 5 * (41_943_040 + 150_994_944) * 12


def preflight(*, free_bytes: int = 1 << 42, free_inodes: int = 10**6, **room: Any) -> Preflight:
    disk = {"path": "/workspace", "free_bytes": free_bytes, "total_bytes": 1 << 43}
    plain = {
        "disks": {"workspace": disk | {"inodes": 10**7, "free_inodes": free_inodes}},
        "shm_bytes": 16 * GIB,
        "memlock_bytes": None,
        "tmux": True,
        "target": TARGET,
    }
    return Preflight(TrainConfig(), plain | room, on_gpus=True)


def test_an_experiment_is_told_before_the_launch() -> None:
    config = TrainConfig(compile=CompileConfig(gate="off"))
    (told,) = replace(preflight(), config=config).warnings("kpro6/200", 0.0)
    assert told.startswith("compile.gate=off is an experiment: the run may crash, hang or be slow")


def test_the_least_a_checkpoint_takes_is_weights_and_moments_of_the_layers() -> None:
    assert least_checkpoint_bytes(TrainConfig(), TARGET) == CHECKPOINT_BYTES
    averaged = TrainConfig(optim=OptimConfig(name="muon", ema_decay=0.99))
    assert least_checkpoint_bytes(averaged, TARGET) == CHECKPOINT_BYTES, "one moment, one average"
    assert least_checkpoint_bytes(TrainConfig(), {}) is None


def test_room_for_one_checkpoint_only_is_refused_with_the_figures() -> None:
    with pytest.raises(RefusedError) as caught:
        preflight(free_bytes=CHECKPOINT_BYTES + GIB).require_room("kpro6/200")
    assert (caught.value.exit_code, caught.value.code) == (ExitCode.REFUSED, "disk-full")
    assert "has 11.8 GiB free; needed at least: 21.6 GiB, for the log and 2 check" in str(
        caught.value
    )
    preflight(free_bytes=2 * CHECKPOINT_BYTES + GIB).require_room("kpro6/200")


def test_a_disk_without_inodes_is_refused() -> None:
    with pytest.raises(RefusedError, match="has 7 free inodes"):
        preflight(free_inodes=7).require_room("kpro6/200")


def test_what_may_not_work_is_told_and_what_is_well_is_not() -> None:  # F58, F59
    assert list(preflight().warnings("kpro6/200", 0.0)) == []
    poor = preflight(shm_bytes=64 << 20, memlock_bytes=8 << 20, tmux=False)
    tmux, shm, memlock, clock = poor.warnings("kpro6/200", -60.0)
    assert "starts with setsid" in tmux
    assert "dflashctl doctor -l kpro6/200 --fix installs it" in tmux
    assert "has 64.0 MiB" in shm
    assert "8192 KiB" in memlock
    assert "is 60 s behind the one here" in clock


def test_a_full_disk_is_refused_before_anything_is_left_over_there(project: Project) -> None:
    sizes = dict.fromkeys(TARGET, 10**6) | {"head_dim": 1}
    config = Path(project.workspace) / "target" / "config.json"
    config.write_text(json.dumps({"model_type": "none", "text_config": sizes}))
    assert project.run("deploy").returncode == 0
    done = project.run("launch", "--tag", "huge")
    assert done.returncode == 3
    assert "error[disk-full]: here/self:" in done.stderr
    assert "2 checkpoints of" in done.stderr
    assert not project.run_dir("huge").exists()
    assert not (project.root / "runs" / "huge").exists()


def test_the_trainer_neither_buffers_its_log_nor_colours_it(project: Project) -> None:  # F52, F64
    assert project.run("deploy").returncode == 0
    pid = project.document("launch", "--tag", "x")["process"]["trainer_pid"]
    given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"PYTHONUNBUFFERED=1", b"NO_COLOR=1"} <= set(given)
    assert project.run("stop", "x").returncode == 0


@pytest.mark.lab
@pytest.mark.timeout(90)
def test_a_full_workspace_of_a_container_stops_a_launch_and_doctor_shows_it(
    tmp_path: Path, stand_in: Path, lab_site: Lab
) -> None:
    workspace = "/workspace/preflight"
    hosts = lab_site.hosts_yaml(python=sys.executable, cpu=True)
    write_project(
        tmp_path, workspace, hosts.replace("workspace: /workspace\n", f"workspace: {workspace}\n")
    )
    write_model(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    laptop = Project(tmp_path, workspace, stand_in, place="kpro7/200")
    on = ("-l", "kpro7/200")
    assert laptop.run(*on, "deploy").returncode == 0
    assert laptop.run(*on, "push", "target", "chats.jsonl", workspace).returncode == 0
    lab_site.fault("kpro7", "disk_full", "200")
    full = laptop.run(*on, "launch", "--tag", "full")
    assert full.returncode == 3, full.stderr
    assert "error[disk-full]: kpro7/200: /workspace/preflight has 0.0 MiB free" in full.stderr
    assert "hint: dflashctl runs gc --keep 1 -l kpro7/200" in full.stderr
    pushed = laptop.run(*on, "push", "hosts.yaml", workspace)
    assert pushed.returncode == 1
    assert "make room: dflashctl runs gc --keep 1 -l kpro7/200" in pushed.stderr
    seen = laptop.document(*on, "doctor")
    checks = {c["name"]: c for c in seen["checks"] if c["place"] == "kpro7/200"}
    assert (checks["disk"]["status"], checks["clock"]["status"]) == ("FAIL", "ok")
    assert checks["disk"]["fix"] == "dflashctl runs gc --keep 1 -l kpro7/200"
