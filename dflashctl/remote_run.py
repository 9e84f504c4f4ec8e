"""A run over there: learn its facts, pin them in a manifest, start it, look at it again.

The laptop composes the manifest; the container answers facts and runs the programs of
``dflashctl/remote``. Nothing here decides whether a launch may go on: the verbs do.
"""

import hashlib
import json
import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflashctl import __version__
from dflashctl.bundle import Bundle
from dflashctl.errors import (
    ConfigurationError,
    DflashctlError,
    MismatchError,
    RefusedError,
    UsageError,
)
from dflashctl.inventory import Container, Place
from dflashctl.program import Program, run_program, stream_program
from dflashctl.transport import run_script, stream_script
from dflashctl.transport.base import Script, ScriptResult, Transport, readable
from trainer.contract.config import TrainConfig
from trainer.contract.layout import RunLayout, Workspace
from trainer.contract.manifest import Gpu, Manifest

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "tokenizers")
OPTIONAL_PACKAGES = ("triton",)
_CACHE_NAMES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
_FACTS_S = 900.0  # the digest of a large data set takes its time
_START_S = 150.0  # the waits of remote/start.py, one after the other
_LOCK_HELD, _NO_RUN = 75, 66  # exit statuses of remote/enter.py
_BAD_INPUT = 2  # exit status of the trainer: the configuration or the data is wrong
_SOCKET_LIMIT = 100  # a unix socket's path holds 107 bytes


@dataclass(frozen=True)
class Code:
    """The release that a run uses; ``files`` empty: its bytes are checked against its digest."""

    digest: str
    files: dict[str, str]
    requirements_digest: str
    git_commit: str | None
    git_dirty: bool | None

    @classmethod
    def of(cls, bundle: Bundle) -> "Code":
        """Take the facts of a bundle."""
        files = {f.path: f.sha256 for f in bundle.files}
        return cls(
            bundle.digest, files, bundle.requirements_digest, bundle.git_commit, bundle.git_dirty
        )


def gather_facts(
    transport: Transport, place: Place, code: Code, config: TrainConfig, tag: str
) -> dict[str, Any]:
    """Ask the container everything that a launch pins; one round trip.

    Returns the answer of ``remote/facts.py``; its ``problems`` are the caller's to judge.
    """
    container = place.container
    arguments = {
        "workspace": container.workspace,
        "tag": tag,
        "release": code.digest,
        "files": code.files,
        "python": container.python,
        "requirements_digest": code.requirements_digest,
        "packages": PACKAGES,
        "optional_packages": OPTIONAL_PACKAGES,
        "target": config.target.path,
        "revision": config.target.revision,
        "data": config.data.path,
        "max_length": config.data.max_length,
        "prompts": {} if config.evaluation.every_steps is None else config.evaluation.prompts,
        "log_dir": container.log_dir,
        # Not all of env: it may hold tokens, and arguments are seen in the process list.
        "env": {name: container.env[name] for name in _CACHE_NAMES if name in container.env},
    }
    program = Program("facts", arguments, deadline_s=_FACTS_S, python=container.python)
    return run_program(transport, program)


def raise_problems(facts: dict[str, Any], place: str, ignore: tuple[str, ...] = ()) -> None:
    """Raise RefusedError with everything that stands against a launch, the first one's code."""
    problems = [problem for problem in facts["problems"] if problem[0] not in ignore]
    if problems:
        text = "; ".join(problem[1] for problem in problems)
        hints = "\n".join(dict.fromkeys(p[2] for p in problems if p[2]))
        raise RefusedError(text, hint=hints, place=place, code=problems[0][0])


@dataclass(frozen=True)
class Pinned:
    """What the manifest is made of besides the place and the facts."""

    tag: str
    code: Code
    config: TrainConfig
    gpus: tuple[Gpu, ...]
    argv: tuple[str, ...]


def make_manifest(place: Place, pinned: Pinned, facts: dict[str, Any]) -> Manifest:
    """Compose the manifest; every fact must have been learnt (the verb has checked)."""
    container = place.container
    layout = Workspace.at(container.workspace).run(pinned.tag)
    log = f"{container.log_dir}/{layout.log.name}" if container.log_dir else str(layout.log)
    return Manifest(
        run_id=f"{pinned.tag}-{secrets.token_hex(8)}",
        tag=pinned.tag,
        created_unix_s=round(facts["clock_unix_s"], 3),
        dflashctl_version=__version__,
        release=pinned.code.digest,
        git_commit=pinned.code.git_commit,
        git_dirty=pinned.code.git_dirty,
        packages=facts["packages"],
        host=place.host.name,
        vmid=container.vmid,
        gpus=pinned.gpus,
        python=facts["python"],
        workspace=container.workspace,
        log_path=log,
        cache_dir=_cache_dir(container, pinned, facts),
        target_revision=facts["target_revision"],
        dataset_sha256=facts["dataset_sha256"],
        config=pinned.config.to_dict(),
        seed=pinned.config.seed,
        argv=pinned.argv,
        driver=facts.get("driver"),
        experiments=pinned.config.compile.experiments,
    )


def _cache_dir(container: Container, pinned: Pinned, facts: dict[str, Any]) -> str:
    """Return the compile cache: one a release, torch version, driver and kind of device."""
    names = {gpu.name for gpu in pinned.gpus if gpu.name} or {"cpu"}
    kind = "cpu" if pinned.config.run.device == "cpu" else "+".join(sorted(names))
    driver = facts.get("driver")
    under = f"-driver{driver}" if driver and kind != "cpu" else ""
    key = f"{pinned.code.digest[:12]}-torch{facts['packages']['torch']}{under}-{kind}"
    safe = re.sub(r"[^A-Za-z0-9.+-]+", "_", key)
    return str(Workspace.at(container.workspace).cache(safe))


def trainer_environment(container: Container, manifest: Manifest) -> dict[str, str]:
    """Return the trainer's environment: that of hosts.yaml, the caches, and its GPUs by UUID."""
    environment = dict(container.env)
    environment |= {
        "TORCHINDUCTOR_CACHE_DIR": f"{manifest.cache_dir}/inductor",
        "TRITON_CACHE_DIR": f"{manifest.cache_dir}/triton",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
    }
    ordered = [*manifest.devices("target"), *manifest.devices("drafter")]
    uuids = list(dict.fromkeys(gpu.uuid for gpu in ordered if gpu.uuid))
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    return environment


def layout_of(manifest: Manifest) -> RunLayout:
    """Return where the run's files lie in its container."""
    return Workspace.at(manifest.workspace).run(manifest.tag)


def tmux_socket(layout: RunLayout) -> str:
    """Return the run's tmux socket; a path too long for a socket gets a short name in /tmp."""
    path = str(layout.socket)
    if len(path.encode()) <= _SOCKET_LIMIT:
        return path
    return f"/tmp/dflash-{hashlib.sha256(path.encode()).hexdigest()[:16]}.sock"  # noqa: S108


def start_run(
    transport: Transport, manifest: Manifest, environment: dict[str, str], *, resume: bool
) -> dict[str, Any]:
    """Make the run directory and start the runner; one round trip, one lock over there.

    Raises: RefusedError when the tag or a GPU is taken; StateUnknownError when the answer was lost.
    """
    layout = layout_of(manifest)
    release = Workspace.at(manifest.workspace).release(manifest.release)
    arguments = {
        "workspace": manifest.workspace,
        "tag": manifest.tag,
        "python": manifest.python,
        "release": str(release),
        "socket": tmux_socket(layout),
        "resume": resume,
        "uuids": [gpu.uuid for gpu in manifest.gpus if gpu.uuid],
    }
    program = Program(
        "start", arguments, [staged_files(manifest, environment)], _START_S, python=manifest.python
    )
    return run_program(transport, program)


def look_again(transport: Transport, manifest: Manifest, wait_s: float) -> dict[str, Any]:
    """Ask whether the run lives, from a second command; waits for its first event or its end."""
    layout = layout_of(manifest)
    arguments = {"run_dir": str(layout.root), "log": manifest.log_path, "wait_s": wait_s}
    return run_program(transport, Program("look", arguments, (), wait_s + 30, manifest.python))


def stop_run(
    transport: Transport, layout: RunLayout, grace_s: float, on_line: Callable[[bytes], None]
) -> dict[str, Any]:
    """Stop a run and return what was proven; ``on_line`` gets the JSON line of each step."""
    arguments = {
        "run_dir": str(layout.root),
        "tag": layout.tag,
        "socket": tmux_socket(layout),
        "grace_s": grace_s,
    }
    return stream_program(transport, Program("stop", arguments, deadline_s=30.0), on_line)


@dataclass(frozen=True)
class TrainerCommand:
    """A command of the trainer run in the foreground of a run directory.

    accepted: exit statuses that are an answer, for the caller to read.
    """

    run_dir: str
    argv: Sequence[str]
    staged: bytes | None = None
    lock: str | None = None
    silence_s: float | None = 3600.0
    python: str = "python3"
    accepted: tuple[int, ...] = (0,)


def run_trainer(
    transport: Transport, command: TrainerCommand, on_output: Callable[[bytes], None]
) -> ScriptResult:
    """Run the command; its stdout goes to ``on_output`` as it comes; one round trip.

    Raises: RefusedError when its lock is held, UsageError when there is no such run,
    ConfigurationError with the trainer's words when it does not accept its configuration or data,
    DflashctlError when it ended non-zero otherwise.
    """
    arguments = {
        "run_dir": command.run_dir,
        "argv": list(command.argv),
        "stage": command.staged is not None,
        "lock": command.lock,
    }
    payload = [command.staged] if command.staged is not None else []
    program = Program("enter", arguments, payload, command.silence_s, command.python)
    result = stream_script(transport, program.script(), on_output)
    what, place = command.argv[0], transport.place
    if result.rc in command.accepted:
        return result
    if result.rc == _LOCK_HELD:
        text = f"another {what} is at work with the same cache"
        raise RefusedError(text, hint="wait for its end", place=place, code="locked")
    if result.rc == _NO_RUN:
        raise UsageError(
            f"there is no run directory {command.run_dir}",
            hint="dflashctl runs list",
            place=place,
            code="no-such-run",
        )
    if result.rc == _BAD_INPUT:
        said = re.findall(r"^error: (.+)$", readable(result.stderr), re.MULTILINE)
        if said:
            hint = f"correct it, then run dflashctl {what} again"
            raise ConfigurationError(f"{what}: {said[-1]}", hint=hint, place=place)
    return result.check(DflashctlError, f"{what} failed", place=place)


def read_remote_file(transport: Transport, path: str) -> bytes | None:
    """Return a small file of the place, None when it is not there; one round trip."""
    name = shlex.quote(path)
    text = f"[ -e {name} ] || exit 44\ncat -- {name}"
    result = run_script(transport, Script(text, what="read"))
    if result.rc == 44:
        return None
    return result.check(DflashctlError, f"cannot read {path}", place=transport.place).stdout


def remote_manifest(transport: Transport, place: Place, tag: str) -> Manifest | None:
    """Return the manifest in the run directory, None when there is none.

    Raises: MismatchError naming the file when it is damaged.
    """
    layout = Workspace.at(place.container.workspace).run(tag)
    data = read_remote_file(transport, str(layout.manifest))
    try:
        return None if data is None else Manifest.from_json(data.decode())
    except ValueError as error:  # ManifestError, or bytes that are no UTF-8
        raise MismatchError(
            f"{layout.manifest} is damaged: {error}",
            hint=f"put the copy of runs/{tag} here back with `dflashctl push`, or launch a new tag",
            place=transport.place,
            code="manifest-damaged",
        ) from error


def staged_files(manifest: Manifest, environment: dict[str, str]) -> bytes:
    """Return manifest and environment as the starting programs read them from stdin."""
    return json.dumps({"manifest": manifest.to_json(), "environment": environment}).encode()
