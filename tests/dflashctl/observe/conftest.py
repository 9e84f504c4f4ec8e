"""A run directory made by hand in a workspace on this machine, with real processes in it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from dflashctl.inventory import Container, Host, Place
from dflashctl.transport import Transport, connect
from trainer.contract.events import encode
from trainer.contract.exit_record import ExitRecord, classify
from trainer.contract.layout import RunLayout
from trainer.contract.process_record import ProcessRecord, boot_id, start_ticks

EXAMPLE_MANIFEST = {
    "v": 1,
    "run_id": "r-1",
    "tag": "fresh7",
    "created_unix_s": 1_700_000_000.0,
    "dflashctl_version": "0.1.0",
    "release": "ab" * 32,
    "git_commit": None,
    "git_dirty": None,
    "packages": {},
    "host": "here",
    "vmid": None,
    "gpus": [],
    "python": "python3",
    "workspace": "/workspace",
    "log_path": "",
    "cache_dir": "/workspace/cache/x",
    "target_revision": "x",
    "dataset_sha256": "x",
    "config": {},
    "seed": 0,
    "argv": [],
}


class HandMadeRun:
    """WORKSPACE/runs/TAG as the trainer leaves it, one file at a time."""

    def __init__(self, workspace: Path, tag: str) -> None:
        self.workspace = workspace
        self.tag = tag
        self.root = workspace / "runs" / tag
        self.root.mkdir(parents=True)
        self.layout = RunLayout(PurePosixPath(self.root), tag)
        self.log = Path(self.layout.log)
        self.metrics = Path(self.layout.metrics)
        self.children: list[subprocess.Popen[bytes]] = []
        self._seq = 0
        manifest = EXAMPLE_MANIFEST | {"tag": tag, "workspace": str(workspace)}
        self.manifest = manifest | {"log_path": str(self.log), "run_id": f"id-{tag}"}
        Path(self.layout.manifest).write_text(json.dumps(self.manifest))

    def start(self) -> None:
        """Two real processes stand for the runner and the trainer; process.json names them."""
        code = "import time; time.sleep(600)"
        pair = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        self.children += pair
        runner, trainer = (child.pid for child in pair)
        record = ProcessRecord(
            run_id=f"id-{self.tag}",
            runner_pid=runner,
            runner_start_ticks=start_ticks(runner),
            trainer_pid=trainer,
            trainer_start_ticks=start_ticks(trainer),
            pgid=trainer,
            boot_id=boot_id(),
            started_unix_s=time.time(),
        )
        Path(self.layout.process).write_text(record.to_json())

    def event(self, kind: str, **values: object) -> bytes:
        """Append one event to metrics.jsonl and return its line."""
        head = {"v": 1, "seq": self._seq, "t_unix_s": time.time(), "run_id": "r", "kind": kind}
        line = encode(head | values)
        with self.metrics.open("ab") as stream:
            stream.write(line)
        self._seq += 1
        return line

    def kill(self) -> None:
        """SIGKILL both processes; no exit.json is written."""
        for child in self.children:
            child.kill()
            child.wait()

    def end(self, rc: int | None = 0, signal: int | None = None) -> None:
        """As the runner does: exit.json by rename once the trainer is gone, then its own end."""
        for trainer in self.children[1:]:
            trainer.kill()
            trainer.wait()
        record = ExitRecord(
            run_id=f"id-{self.tag}",
            state=classify(rc, signal),
            rc=rc,
            signal=signal,
            started_unix_s=1.0,
            ended_unix_s=2.0,
            last_step=120,
            last_checkpoint="step_00000100",
            oom_kill=False,
        )
        partial = self.root / ".exit.json"
        partial.write_text(record.to_json())
        partial.rename(Path(self.layout.exit))
        self.kill()

    def follow_pids(self) -> list[int]:
        """Processes of the follow program that read this run."""
        wanted = str(self.root).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                argv = path.read_bytes().split(b"\0")
                if b"-I" in argv and any(wanted in a and b'"start"' in a for a in argv):
                    found.append(int(path.parent.name))
        return found

    def kill_followers(self) -> int:
        """SIGKILL the follow programs of this run, as a dying container would; return how many."""
        pids = self.follow_pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[[str], HandMadeRun]]:
    """Make runs by tag in one workspace; their processes end with the test."""
    runs: list[HandMadeRun] = []

    def make(tag: str) -> HandMadeRun:
        runs.append(HandMadeRun(tmp_path / "workspace", tag))
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


@pytest.fixture
def run(make_run: Callable[[str], HandMadeRun]) -> HandMadeRun:
    """The run fresh7, not started."""
    return make_run("fresh7")


@pytest.fixture
def here(tmp_path: Path) -> Place:
    """This machine as a place, without SSH; its workspace holds the hand-made runs."""
    container = Container("here", None, workspace=str(tmp_path / "workspace"))
    return Place(Host("here", "", backend="local", containers=(container,)), container)


@pytest.fixture
def connect_here(here: Place) -> Callable[[], Transport]:
    """Open a way to ``here``."""
    return lambda: connect(here)
