"""The start program as a process: its rules, and its way without tmux."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl import remote
from tests.dflashctl.act.conftest import names, wait_until
from trainer.contract.config import TrainConfig
from trainer.contract.manifest import Gpu, Manifest

CONFIG = TrainConfig.from_dict(
    {
        "target": {"path": "/t"},
        "data": {"path": "/d"},
        "draft": {"mask_token_id": 1, "block_size": 8},
        "optim": {"max_steps": 2},
    }
).to_dict()


def manifest(workspace: Path, tag: str, *uuids: str) -> Manifest:
    return Manifest(
        run_id=f"{tag}-1",
        tag=tag,
        created_unix_s=1.0,
        dflashctl_version="0.1.0",
        release="ab",
        git_commit=None,
        git_dirty=None,
        packages={},
        host="here",
        vmid=None,
        gpus=tuple(Gpu("target", i, uuid, "X") for i, uuid in enumerate(uuids)),
        python=sys.executable,
        workspace=str(workspace),
        log_path=str(workspace / "runs" / tag / f"train_stdout_{tag}.log"),
        cache_dir=str(workspace / "cache"),
        target_revision="r",
        dataset_sha256="d",
        config=CONFIG,
        seed=0,
        argv=(),
    )


def start(
    facts: Manifest, release: Path, path: str = os.environ["PATH"], **extra: Any
) -> dict[str, Any]:
    order = {
        "workspace": facts.workspace,
        "tag": facts.tag,
        "python": extra.get("python", facts.python),
        "release": str(release),
        "socket": f"{facts.workspace}/runs/{facts.tag}/tmux.sock",
        "resume": False,
        "uuids": [gpu.uuid for gpu in facts.gpus],
    }
    sent = {"manifest": facts.to_json(), "environment": {"CUDA_VISIBLE_DEVICES": ""}}
    argv = [sys.executable, "-I", "-S", "-c", remote.program("start"), json.dumps(order)]
    done = subprocess.run(
        argv,
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PATH": path},
    )
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def hold(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_without_tmux_the_runner_is_started_by_setsid(tmp_path: Path, stand_in: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "setsid"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    answer = start(manifest(tmp_path, "x"), stand_in, path=str(tools))
    assert (answer["started"], answer["way"]) == (True, "setsid")
    wait_until((tmp_path / "runs/x/exit.json").exists)
    assert json.loads((tmp_path / "runs/x/exit.json").read_text())["state"] == "finished"


def test_a_gpu_that_a_living_run_was_given_is_refused_before_it_shows_any_load(
    tmp_path: Path, stand_in: Path
) -> None:
    handle = hold(tmp_path / "runs/other/run.lock")
    (tmp_path / "runs/other/manifest.json").write_text(
        manifest(tmp_path, "other", "GPU-a").to_json()
    )
    error = start(manifest(tmp_path, "x", "GPU-b", "GPU-a"), stand_in)["error"]
    assert (error["kind"], error["code"]) == ("refused", "gpu-busy")
    assert error["message"] == "GPU GPU-a is not idle: run other holds it"
    os.close(handle)
    assert start(manifest(tmp_path, "x", "GPU-b", "GPU-a"), stand_in)["started"] is True
    wait_until((tmp_path / "runs/x/exit.json").exists)


def test_a_running_or_ended_tag_is_refused_and_nothing_changes(
    tmp_path: Path, stand_in: Path
) -> None:
    handle = hold(tmp_path / "runs/x/run.lock")
    assert start(manifest(tmp_path, "x"), stand_in)["error"]["code"] == "running"
    os.close(handle)
    (tmp_path / "runs/x/exit.json").write_text("{}")
    assert start(manifest(tmp_path, "x"), stand_in)["error"]["code"] == "tag-exists"
    assert names(tmp_path / "runs/x") == ["exit.json", "run.lock"]


def test_a_runner_that_cannot_start_is_told_in_its_own_words(
    tmp_path: Path, stand_in: Path
) -> None:
    answer = start(manifest(tmp_path, "x"), stand_in, python="/nowhere/python")
    assert answer["started"] is False
    assert "/nowhere/python" in answer["complaint"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_session_whose_runner_is_on_its_way_is_not_taken_for_one_that_never_started(
    tmp_path: Path, stand_in: Path
) -> None:
    directory = tmp_path / "runs/x"
    directory.mkdir(parents=True)
    socket = str(directory / "tmux.sock")
    tmux = ["tmux", "-f", "/dev/null", "-S", socket]
    subprocess.run([*tmux, "new-session", "-d", "-s", "x", "sleep", "20"], check=True)
    try:
        assert start(manifest(tmp_path, "x"), stand_in)["error"]["code"] == "running"
        assert directory.exists()
    finally:
        subprocess.run([*tmux, "kill-session", "-t", "=x"], check=True)


def test_second_look_finds_the_newest_event_of_a_long_file(tmp_path: Path) -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    process = {"trainer_pid": os.getpid(), "trainer_start_ticks": ticks, "boot_id": boot}
    (tmp_path / "process.json").write_text(json.dumps(process | {"started_unix_s": 5000.0}))
    events = [{"t_unix_s": float(number), "text": "x" * 100} for number in range(5001)]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "metrics.jsonl").write_text(lines)
    order = {"run_dir": str(tmp_path), "log": str(tmp_path / "none"), "wait_s": 0.0}
    argv = [sys.executable, "-I", "-S", "-c", remote.program("look"), json.dumps(order)]
    told = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    assert (told["state"], told["event"], told["log"]) == ("running", events[-1], [])
