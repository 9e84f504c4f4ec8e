"""A project on the local backend with a workspace of its own, and the real command line as process.

The trainer that gets deployed is the real package with stand_in_main.py as its __main__: contract
and runner are the real ones, a step takes 20 ms and needs no torch.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dflashctl
import trainer
from dflashctl.remote.liveness import is_alive

REPOSITORY = Path(dflashctl.__file__).resolve().parents[1]
HOSTS = """\
version: 1
hosts:
  here:
    backend: local
    containers:
      self:
        workspace: {workspace}
        python: {python}
        gpus: {{target: [cpu], drafter: [cpu]}}
"""
TRAIN = """\
target: {{path: {target}}}
data: {{path: {data}, max_length: 64, token_budget: 64}}
draft: {{mask_token_id: 1, block_size: 8}}
optim: {{max_steps: 100000}}
run: {{checkpoint_every_steps: 10}}
"""


def write_stand_in(root: Path) -> Path:
    """Write a ``trainer`` package that needs no torch into ``root``, and return that."""
    source = Path(trainer.__file__).parent
    package = root / "trainer"
    package.mkdir()
    for name in ("__init__.py", "runner.py", "errors.py", "requirements.txt"):
        shutil.copy(source / name, package)
    shutil.copytree(
        source / "contract", package / "contract", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(Path(__file__).parent / "stand_in_main.py", package / "__main__.py")
    return root


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a ``trainer`` package that needs no torch."""
    return write_stand_in(tmp_path_factory.mktemp("stand-in"))


@dataclass
class Project:
    """A directory with hosts.yaml and train.yaml, and dflashctl as a process in it."""

    root: Path
    workspace: str
    code: Path
    place: str = "here/self"
    environment: dict[str, str] = field(default_factory=dict)

    def popen(self, *arguments: str, **extra: Any) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": f"{self.code}:{REPOSITORY}"} | self.environment
        argv = [sys.executable, "-m", "dflashctl", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | extra
        return subprocess.Popen(
            argv, cwd=self.root, env=environment, text=True, stdin=subprocess.DEVNULL, **pipes
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.popen(*arguments) as process:
            try:
                out, err = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def document(self, *arguments: str) -> dict[str, Any]:
        done = self.run("--json", *arguments)
        document: dict[str, Any] = json.loads(done.stdout)
        return document | {"rc": done.returncode}

    def run_dir(self, tag: str) -> Path:
        return Path(self.workspace) / "runs" / tag

    def exit_record(self, tag: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run_dir(tag) / "exit.json").read_text())
        return record


def write_project(root: Path, workspace: str, hosts: str) -> None:
    """Write hosts.yaml, train.yaml, and target and data into the workspace."""
    (root / "hosts.yaml").write_text(hosts)
    target, data = f"{workspace}/target", f"{workspace}/chats.jsonl"
    (root / "train.yaml").write_text(TRAIN.format(target=target, data=data))


def write_model(directory: Path) -> None:
    """Write a directory with the files of a model, whole by their headers, and nothing in them."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "none"}')
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")


@pytest.fixture
def project(tmp_path: Path, stand_in: Path) -> Iterator[Project]:
    """A project whose container is this machine itself, with two CPU roles."""
    # Short, unlike tmp_path: the runs' tmux sockets live below it.
    workspace = Path(tempfile.mkdtemp(prefix="ws-"))
    write_model(workspace / "target")
    (workspace / "chats.jsonl").write_text('{"messages": []}\n')
    hosts = HOSTS.format(workspace=workspace, python=sys.executable)
    write_project(tmp_path, str(workspace), hosts)
    try:
        yield Project(tmp_path, str(workspace), stand_in)
    finally:
        end_runs(workspace)
        shutil.rmtree(workspace)


@pytest.fixture
def deployed(project: Project) -> Project:
    """The same, with a release in its workspace."""
    assert project.run("deploy").returncode == 0
    return project


def names(directory: str | Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(path.name for path in Path(directory).iterdir())


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.02)


def held_gpu(gpu: int) -> str:
    """Return a script that has a process hold a GPU of a container of the lab, and waits for it."""
    start = f"CUDA_VISIBLE_DEVICES={gpu} PVE_LAB_GPU_MIB=8123 setsid -f sleep 600 >/dev/null 2>&1"
    return f"{start}; until pgrep -fx 'sleep 600' >/dev/null; do sleep 0.05; done"


def end_runs(workspace: Path) -> None:
    """End what a failed test left running in its own workspace."""
    for path in workspace.glob("runs/*/process.json"):
        record = json.loads(path.read_text())
        if (path.parent / "exit.json").exists():
            continue
        for who in ("runner", "trainer"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record[f"{who}_pid"], signal.SIGKILL)
        wait_until(lambda record=record: not is_alive(record, "runner", "trainer"))
