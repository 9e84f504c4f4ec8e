"""`dflashctl data doctor` with the real trainer, in a container that is this machine itself."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dflashctl.act.conftest import HOSTS, REPOSITORY, Project, names
from tests.trainer.conftest import MASK_TOKEN_ID, tiny_chats, tiny_target

__all__ = ["tiny_chats", "tiny_target"]  # fixtures
SETTINGS: dict[str, Any] = {
    "target": {"dtype": "float32"},
    "data": {"max_length": 32, "token_budget": 64, "max_batch_size": 4, "packing": False},
    "draft": {"num_draft_layers": 1, "block_size": 4, "num_taps": 2, "dtype": "float32"},
    "loss": {"position_decay": 3.0},
    "run": {"cpu_threads": 1},
}


@pytest.fixture
def real_project(tmp_path: Path, tiny_target: Path, tiny_chats: Path) -> Iterator[Project]:
    workspace = Path(tempfile.mkdtemp(prefix="ws-"))
    (tmp_path / "hosts.yaml").write_text(HOSTS.format(workspace=workspace, python=sys.executable))
    train = SETTINGS | {
        "target": SETTINGS["target"] | {"path": str(tiny_target)},
        "data": SETTINGS["data"] | {"path": str(tiny_chats), "max_anchors": 4},
        "draft": SETTINGS["draft"] | {"mask_token_id": MASK_TOKEN_ID},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(train))
    try:
        project = Project(tmp_path, str(workspace), REPOSITORY)
        assert project.run("deploy").returncode == 0
        yield project
    finally:
        shutil.rmtree(workspace)


@pytest.mark.timeout(120)
def test_doctor_tells_the_runs_own_data_and_exits_7_for_what_forbids_a_launch(
    real_project: Project,
) -> None:
    sound = real_project.run("data", "doctor", "--samples", "2")
    assert sound.returncode == 0, sound.stderr
    first, *lines = sound.stdout.splitlines()
    assert first.startswith("here/self  release ")
    told = {line.split()[0]: line for line in lines if line[:1] not in ("", " ")}
    assert {"samples", "tokens", "on-policy", "steps", "anchors", "time", "disk"} <= told.keys()
    assert "2 steps timed now" in told["time"]
    # the answers are not the target's own; a busy machine may be warned about as well
    assert any(line.startswith("warning") and "on-policy" in line for line in lines)
    assert lines[-1].startswith("ready: 0 problems, ")
    spoiled = real_project.document(
        *("data", "doctor", "--samples", "0"), "--set", "draft.mask_token_id=1"
    )
    assert (spoiled["rc"], spoiled["ok"], spoiled.get("on_policy")) == (7, False, None), spoiled
    (finding,) = [f for f in spoiled["findings"] if f["level"] == "problem"]
    assert (finding["name"], "mask token 1" in finding["what"]) == ("mask-token", True)
    assert spoiled["data"]["num_samples"] == 24
    assert "text" not in spoiled
    assert names(real_project.workspace) == ["cache", "doctor", "releases"]  # no run was made
