"""The whole road with the real trainer: a tiny random Llama, trained in a container of the lab."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import REPOSITORY, Project, wait_until
from tests.trainer.conftest import MASK_TOKEN_ID, tiny_chats, tiny_target

__all__ = ["tiny_chats", "tiny_target"]  # fixtures
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(420)]

TRAIN: dict[str, Any] = {
    "target": {"dtype": "float32"},
    "data": {"max_length": 32, "token_budget": 64, "max_batch_size": 4, "packing": False},
    "draft": {"num_draft_layers": 1, "block_size": 4, "num_taps": 2, "dtype": "float32"},
    "loss": {"position_decay": 3.0},
    "optim": {"lr": 0.003, "epochs": 1000.0, "max_steps": 2000},
    "run": {"device": "cpu", "cpu_threads": 1, "checkpoint_every_steps": 10},
}


@pytest.fixture
def project(tmp_path: Path, lab_site: Lab) -> Project:
    workspace = "/workspace/real"
    hosts = lab_site.hosts_yaml(python=sys.executable, env={"PVE_LAB_GPU_MIB": "9000"})
    hosts = hosts.replace("workspace: /workspace\n", f"workspace: {workspace}\n")
    # kpro7 has one GPU for each role: one thread each on the CPU.
    (tmp_path / "hosts.yaml").write_text(hosts)
    paths = {"path": f"{workspace}/data/target"}, {"path": f"{workspace}/data/chats.jsonl"}
    train = TRAIN | {
        "target": TRAIN["target"] | paths[0],
        "data": TRAIN["data"] | paths[1] | {"max_anchors": 4},
        "draft": TRAIN["draft"] | {"mask_token_id": MASK_TOKEN_ID},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(train))
    return Project(tmp_path, workspace, REPOSITORY, place="kpro7/200")


def test_deploy_warmup_launch_kill_resume_stop_evaluate_export_pull(
    project: Project, lab_site: Lab, tiny_target: Path, tiny_chats: Path
) -> None:
    target = project.root / "target"
    target.symlink_to(tiny_target)
    here = ("-l", "kpro7/200")
    for arguments in (
        ("deploy",),
        ("push", "target", str(tiny_chats), f"{project.workspace}/data"),
    ):
        done = project.run(*here, *arguments)
        assert done.returncode == 0, done.stderr
    warm = project.document(*here, "warmup")
    assert warm["rc"] == 0, warm
    assert [report["device"] for report in warm["devices"]] == ["cpu"]
    launched = project.document(*here, "launch", "--tag", "tiny1")
    assert launched["rc"] == 0, launched
    assert launched["manifest"]["cache_dir"] == warm["cache_dir"]
    directory = f"{project.workspace}/runs/tiny1"

    def steps() -> int:
        text = lab_site.in_container("kpro7", 200, f"grep -c loss {directory}/metrics.jsonl")
        return int(text.stdout or 0)

    wait_until(lambda: steps() > 15, 60)
    lab_site.in_container("kpro7", 200, f"kill -9 {launched['process']['trainer_pid']}")

    def record(name: str = "exit.json") -> dict[str, Any]:
        found = lab_site.in_container("kpro7", 200, f"cat {directory}/{name}").stdout
        document: dict[str, Any] = json.loads(found) if found else {}
        return document

    wait_until(lambda: bool(record()))
    killed = record()
    assert (killed["state"], killed["signal"]) == ("killed", 9)
    assert killed["last_checkpoint"] is not None
    assert project.run("status", "tiny1").returncode == 1
    resumed = project.document("launch", "--resume", "tiny1")
    assert resumed["rc"] == 0, resumed
    wait_until(lambda: steps() > killed["last_step"] + 5, 60)
    stopped = project.document("stop", "tiny1")
    assert (stopped["rc"], stopped["signal"], stopped["gpus_released"]) == (0, "SIGINT", True)
    assert stopped["exit"]["state"] == "stopped"
    assert stopped["exit"]["last_step"] > killed["last_step"]
    few = ("--num-prompts", "2", "--max-new-tokens", "6")
    evaluated = project.document("evaluate", "tiny1", "--prompts", str(tiny_chats), *few)
    assert evaluated["rc"] == 0, evaluated
    assert 1.0 <= evaluated["evaluation"]["acceptance_length"] <= 4.0
    assert evaluated["evaluation"]["lossless"] is True
    (project.root / "bad.jsonl").write_text('{"id": 1}\n')
    bad = project.run("evaluate", "tiny1", "--prompts", "bad.jsonl")
    assert (bad.returncode, 'no list "messages"' in bad.stderr) == (2, True), bad.stderr
    assert project.run("export", "tiny1").returncode == 0
    assert project.run("pull", "tiny1").returncode == 0
    kept = {path.name for path in (project.root / "runs" / "tiny1").iterdir()}
    assert {"manifest.json", "exit.json", "metrics.jsonl", "export", "evaluation.json"} <= kept
