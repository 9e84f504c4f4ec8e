"""launch looks at the target's files in the container and names what is wrong, before any GPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer
from dflashctl import remote
from tests.dflashctl.act.conftest import Project, write_model

SHARD = "model-00001-of-00002.safetensors"


def facts(workspace: Path, target: str, **extra: Any) -> dict[str, Any]:
    """Run the facts program as launch does, on a release that is this package itself."""
    release = workspace / "releases" / "r"
    if not release.exists():
        release.mkdir(parents=True)
        (release / "trainer").symlink_to(Path(trainer.__file__).parent)
    arguments = {
        "workspace": str(workspace),
        "tag": "x",
        "release": "r",
        "files": {"trainer/__init__.py": remote_digest(release / "trainer/__init__.py")},
        "python": sys.executable,
        "requirements_digest": "0",
        "packages": [],
        "optional_packages": [],
        "target": target,
        "revision": None,
        "data": str(workspace / "chats.jsonl"),
        "log_dir": None,
        "env": {},
    } | extra
    argv = [sys.executable, "-I", "-S", "-c", remote.program("facts"), json.dumps(arguments)]
    done = subprocess.run(argv, capture_output=True, check=True, timeout=100)
    return dict(json.loads(done.stdout))


def remote_digest(path: Path) -> str:
    done = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def in_shards(target: Path) -> None:
    (target / "model.safetensors").rename(target / SHARD)
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors", "b": SHARD}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def as_adapter(target: Path) -> None:
    for path in list(target.iterdir()):
        path.unlink()
    (target / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (in_shards, [f"{SHARD} lacks 1 tensors", "model-00002-of-00002.safetensors is missing"]),
        (as_adapter, ["adapter_config.json is there: an adapter (LoRA) is no target"]),
    ],
)
def test_facts_name_each_bad_file_of_the_target(
    tmp_path: Path, spoil: Callable[[Path], None], told: list[str]
) -> None:
    write_model(tmp_path / "target")
    assert facts(tmp_path, str(tmp_path / "target"))["target_revision"].startswith("sha256:")
    spoil(tmp_path / "target")
    answer = facts(tmp_path, str(tmp_path / "target"))
    found = [text for code, text, _ in answer["problems"] if code == "target-damaged"]
    for text in told:
        assert any(f"target.path {tmp_path}/target: {text}" in one for one in found), found
    assert answer["target_revision"] is None


def test_a_target_that_is_not_there_is_one_problem(tmp_path: Path) -> None:
    problems = facts(tmp_path, str(tmp_path / "none"))["problems"]
    assert [code for code, _, _ in problems if code.startswith("target")] == ["target-missing"]


def test_a_release_without_the_look_at_files_still_wants_config_and_weights(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    answer = facts(tmp_path, str(tmp_path / "target"), release="old", files={"x": "0"})
    assert [c for c, _, _ in answer["problems"] if c.startswith("target")] == ["target-missing"]


def test_a_half_copied_snapshot_is_a_problem_where_nothing_can_be_fetched(tmp_path: Path) -> None:
    commit, hub = "a" * 40, {"HF_HUB_CACHE": str(tmp_path / "hub")}
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    write_model(snapshot)
    (snapshot / "tokenizer.json").unlink()
    at = {"target": "org/tiny", "revision": commit}
    online = facts(tmp_path, **at, env=hub)
    assert [c for c, _, _ in online["problems"] if c.startswith("target")] == []
    offline = facts(tmp_path, **at, env=hub | {"HF_HUB_OFFLINE": "1"})
    (found,) = [text for code, text, _ in offline["problems"] if code == "target-damaged"]
    assert found.endswith("tokenizer.json is missing")
    assert (online["target_revision"], offline["target_revision"]) == (commit, commit)


def test_launch_refuses_a_half_copied_target_with_its_name(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    weights = Path(project.workspace, "target", "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:9])
    refused = project.run("launch", "--tag", "x")
    assert refused.returncode == 3
    assert "error[target-damaged]" in refused.stderr
    assert "model.safetensors is damaged or half copied (9 bytes" in refused.stderr
    assert "copy the model again, whole" in refused.stderr
    assert not (project.root / "runs").exists(), "a refused launch leaves no record"
