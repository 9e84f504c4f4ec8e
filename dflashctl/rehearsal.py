"""A command of the trainer in a staged run directory, without a launch: warmup, check, doctor.

The manifest is made exactly as launch makes it and lies outside runs/, so that the command sees
the configuration, release, data and devices of the run that may follow, and takes no tag.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.gpu_locks import Holder, new_token
from dflashctl.gpu_roles import Claim, Ways, claim_roles, cpu_roles
from dflashctl.remote_run import (
    Code,
    Pinned,
    TrainerCommand,
    gather_facts,
    make_manifest,
    raise_problems,
    run_trainer,
    staged_files,
    trainer_environment,
)
from trainer.contract.config import TrainConfig
from trainer.contract.layout import Workspace
from trainer.contract.manifest import Gpu, Manifest

Report = dict[str, Any]


@dataclass(frozen=True)
class Rehearsal:
    """What to run.

    command: the trainer's, warmup, check or doctor. options: its further words. argv: of this
    program, for the manifest. claim: False takes no GPU; the roles are then threads on the CPU.
    accepted: exit statuses that are an answer and no failure. stage: brings files to the run
    directory, once the GPUs are locked, and returns yet further words.
    """

    command: str
    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    options: tuple[str, ...] = ()
    claim: bool = True
    accepted: tuple[int, ...] = (0,)
    stage: Callable[[Manifest, str], tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Rehearsed:
    """How it ended: the staged manifest, the command's exit status, and where it ran."""

    manifest: Manifest
    rc: int
    run_dir: str


def rehearse(
    ways: Ways,
    request: Rehearsal,
    on_output: Callable[[bytes], None],
    on_report: Callable[[Report], None],
) -> Rehearsed:
    """Stage a run directory and run the command in it; two round trips and those of the GPUs.

    ``on_report`` gets each JSON report of the trainer (a line with a ``kind``) as it comes,
    ``on_output`` every other line. Raises: RefusedError as launch does (release missing, GPU busy,
    the same command at work with the same cache); DflashctlError when the trainer failed.
    """
    name = request.command
    facts = gather_facts(ways.inside, ways.place, request.code, request.config, name)
    raise_problems(facts, ways.place.label)

    def run(gpus: tuple[Gpu, ...], claim: Claim | None) -> Rehearsed:
        pinned = Pinned(name, request.code, request.config, gpus, request.argv)
        manifest = make_manifest(ways.place, pinned, facts)
        staged = request
        if request.stage is not None:
            words = request.stage(manifest, _run_dir(manifest, name))
            staged = replace(request, options=(*request.options, *words))
            if claim is not None:
                claim.renew_if_due()
        return rehearse_pinned(ways, manifest, staged, on_output, on_report)

    container = ways.place.container
    if not request.claim:
        return run(cpu_roles(container), None)
    directory = str(Workspace.at(container.workspace).rehearsal(name, "x"))[:-1]  # ends with /
    holder = Holder(name, container.host_name, container.vmid, directory, new_token())
    gpus, claim = claim_roles(ways, facts, holder)
    with claim:
        return run(gpus, claim)


def rehearse_pinned(
    ways: Ways,
    manifest: Manifest,
    request: Rehearsal,
    on_output: Callable[[bytes], None],
    on_report: Callable[[Report], None],
) -> Rehearsed:
    """Run the command with a manifest that is made already, in one round trip.

    Raises: as ``rehearse``, but for the facts and the GPUs.
    """
    name, run_dir = request.command, _run_dir(manifest, request.command)
    environment = trainer_environment(ways.place.container, manifest)
    if not request.claim:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = TrainerCommand(
        run_dir=run_dir,
        argv=[name, "--run-dir", run_dir, *request.options],
        staged=staged_files(manifest, environment),
        lock=f"{manifest.cache_dir}/{name}.lock",
        python=manifest.python,
        accepted=request.accepted,
    )
    lines = _Lines(on_output, on_report)
    result = run_trainer(ways.inside, command, lines.feed)
    lines.close()
    return Rehearsed(manifest, result.rc, run_dir)


def _run_dir(manifest: Manifest, command: str) -> str:
    key = manifest.cache_dir.rpartition("/")[2]
    return str(Workspace.at(manifest.workspace).rehearsal(command, key))


class _Lines:
    """Tells the trainer's JSON reports from its other lines."""

    def __init__(
        self, on_output: Callable[[bytes], None], on_report: Callable[[Report], None]
    ) -> None:
        self._on_output, self._on_report = on_output, on_report
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)

    def close(self) -> None:
        """Take an unfinished last line as a line."""
        if self._rest:
            self.feed(b"\n")

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if isinstance(report, dict) and "kind" in report:
            self._on_report(report)
        else:
            self._on_output(line + b"\n")
