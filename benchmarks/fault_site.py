"""One lab with a project for the fault campaign: its commands, and what is really there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.warm_start import Command, WarmStart
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import default_site
from tests.dflashctl.act.conftest import (
    REPOSITORY,
    Project,
    write_model,
    write_project,
    write_stand_in,
)

HOST, VMID, PLACE = "kpro6", 200, "kpro6/200"
WORKSPACE = "/workspace/w"
ENDLESS = "optim.max_steps=100000"
SETTLE_S = 15.0  # what a dead client started over there has ended by then
COMMAND_S = 120.0

# Runs in the container; its own command line does not hold the workspace's name.
_PROBE = """
import json, os, re
root = ROOT
def read(path):
    try:
        with open(path, errors="replace") as stream:
            return stream.read()
    except OSError:
        return None
def listed(path):
    return sorted(os.listdir(path)) if os.path.isdir(path) else []
runs = {}
for name in listed(root + "/runs"):
    path = f"{root}/runs/{name}"
    if os.path.isdir(path):
        facts = {key: read(f"{path}/{key}.json") for key in ("manifest", "process", "exit")}
        complete = [step for step in listed(path + "/checkpoints")
                    if os.path.exists(f"{path}/checkpoints/{step}/COMPLETE.json")]
        facts.update(log=read(f"{path}/train_stdout_{name}.log"), checkpoints=complete,
                     metrics=read(path + "/metrics.jsonl"))
        runs[name] = facts
processes = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    argv = (read(f"/proc/{pid}/cmdline") or "").split("\\0")
    if any(root in one for one in argv):
        processes.append(" ".join(argv)[:300])
print(json.dumps({"releases": listed(root + "/releases"), "runs": runs, "processes": processes}))
"""


@dataclass(frozen=True)
class Look:
    """What is in the container: releases by name, runs by tag, command lines of its processes."""

    releases: list[str]
    runs: dict[str, dict[str, Any]]
    processes: list[str]

    @property
    def trainers(self) -> list[str]:
        """Command lines of the trainers that live."""
        return [argv for argv in self.processes if " trainer train " in argv]

    def record(self, tag: str, name: str) -> dict[str, Any] | None:
        """Return manifest, process or exit of a run, or None when it is not there."""
        text = self.runs.get(tag, {}).get(name)
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found


class FaultSite:
    """A lab of its own, a project in it, its trainer deployed, and the finished run ``base``."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        root = directory / "project"
        root.mkdir(parents=True)
        code = directory / "code"
        code.mkdir()
        write_stand_in(code)
        hosts = lab.hosts_yaml(python=sys.executable, env={"PVE_LAB_GPU_MIB": "9000"})
        hosts = hosts.replace("workspace: /workspace\n", f"workspace: {WORKSPACE}\n")
        write_project(root, WORKSPACE, hosts)
        write_model(root / "target")
        (root / "chats.jsonl").write_text("{}\n")
        self.project = Project(root, WORKSPACE, code, place=PLACE)
        self._warm = WarmStart(root, {"PYTHONPATH": f"{code}:{REPOSITORY}"})
        self.must("deploy")
        self.must("push", "target", "chats.jsonl", WORKSPACE)

    def close(self) -> None:
        """End what starts the commands."""
        self._warm.close()

    def start(self, arguments: tuple[str, ...], out: Path) -> Command:
        """Start a command; its stdout goes to ``out`` and its stderr beside it."""
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            return self._warm.start(["-l", PLACE, *arguments], stdout, stderr)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            command = self._warm.start(["-l", PLACE, *arguments], out, err)
            try:
                status = command.wait(COMMAND_S)
            except subprocess.TimeoutExpired:
                command.kill()
                raise
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        return subprocess.CompletedProcess(list(arguments), status, *texts)

    def must(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that no fault disturbs. Raises: RuntimeError when it fails."""
        done = self.run(*arguments)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: exit {done.returncode}: {done.stderr}")
        return done

    def make_base(self, num_bytes: int) -> None:
        """Make a finished run with an export of ``num_bytes`` to be pulled."""
        self.must("launch", "--tag", "base", "--set", "optim.max_steps=40")
        self.run("logs", "-f", "base")
        export = f"{WORKSPACE}/runs/base/export"
        self.shell(f"mkdir -p {export}; head -c {num_bytes} /dev/urandom >{export}/weights")

    def shell(self, script: str) -> str:
        """Run a script in the container, not through dflashctl."""
        return self.lab.in_container(HOST, VMID, script).stdout.decode(errors="replace")

    def look(self) -> Look:
        """Tell what is in the container now."""
        text = _PROBE.replace("ROOT", repr(WORKSPACE), 1).encode()
        done = self.lab.in_container(HOST, VMID, "python3 -", stdin=text)
        return Look(**json.loads(done.stdout))

    def settled(self, condition: Any) -> Look:
        """Look until the condition holds or SETTLE_S have passed; return the last look."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            look = self.look()
            if condition(look) or time.monotonic() > end_s:
                return look
            time.sleep(0.2)

    def end_faults(self) -> None:
        """Switch every fault off and start the container when it was stopped."""
        self.lab.fault(HOST, "none")
        end_s = time.monotonic() + SETTLE_S
        while not self._answers():
            if time.monotonic() > end_s:
                raise RuntimeError(f"container {VMID} does not start again")
            self.lab.in_host(HOST, ["pct", "start", str(VMID)])

    def _answers(self) -> bool:
        return self.shell("echo here") == "here\n"

    def forget(self, tag: str) -> None:
        """Remove a run on both sides; end what is left of it and of any other."""
        self.lab.restore()
        self.shell(f"rm -rf {WORKSPACE}/runs/{tag}")
        shutil.rmtree(self.project.root / "runs" / tag, ignore_errors=True)

    def local(self, tag: str) -> dict[str, Any] | None:
        """Return the laptop's record of a run, or None."""
        path = self.project.root / "runs" / tag / "manifest.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def has_intent(self, tag: str) -> bool:
        """Say whether a launch is noted here that nothing has confirmed or taken back."""
        return (self.project.root / "runs" / tag / "launching.json").exists()


def open_site(directory: Path) -> FaultSite:
    """Bring up a lab that ends with this process, with a project below ``directory``."""
    # Short: unix sockets live below it.
    lab = Lab(Path(tempfile.mkdtemp(prefix="lab-")))
    lab.up(default_site("1g", expose=tuple(python_paths(sys.executable))), owner=os.getpid())
    try:
        return FaultSite(lab, directory)
    except BaseException:
        lab.down()
        raise
