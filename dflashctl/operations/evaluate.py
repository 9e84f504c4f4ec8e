"""evaluate: the acceptance length of a run's drafter, by real decoding in its container."""

import json
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.errors import DflashctlError, UsageError
from dflashctl.files import collect, send, wanted
from dflashctl.gpu_locks import Holder, new_token
from dflashctl.gpu_roles import Ways, claim_again
from dflashctl.remote_run import TrainerCommand, read_remote_file, remote_manifest, run_trainer
from dflashctl.transport.base import Transport
from trainer.contract.layout import RunLayout, Workspace


@dataclass(frozen=True)
class EvaluateResult:
    """The evaluation as the trainer wrote it."""

    tag: str
    evaluation: dict[str, Any]
    round_trips: int


@dataclass(frozen=True)
class EvaluateRequest:
    """prompts: a local file or a container path; options: further words for the trainer."""

    tag: str
    prompts: str
    options: Sequence[str] = ()


def evaluate(
    ways: Ways, request: EvaluateRequest, on_output: Callable[[bytes], None]
) -> EvaluateResult:
    """Measure the drafter of the last checkpoint.

    Raises: UsageError for an unknown run or prompts that are nowhere, RefusedError when a GPU of
    the run is busy, DflashctlError when the trainer failed.
    """
    manifest = remote_manifest(ways.inside, ways.place, request.tag)
    if manifest is None:
        raise UsageError(
            f"there is no run {request.tag}",
            hint="dflashctl runs list",
            place=ways.place.label,
            code="no-such-run",
        )
    layout = Workspace.at(manifest.workspace).run(request.tag)
    prompts = _prompt_path(ways.inside, layout, request.prompts)
    argv = ["evaluate", "--run-dir", str(layout.root), "--prompts", prompts]
    command = TrainerCommand(str(layout.root), [*argv, *request.options])
    container = ways.place.container
    holder = Holder(request.tag, container.host_name, container.vmid, str(layout.root), new_token())
    with claim_again(ways, manifest, holder):
        run_trainer(ways.inside, command, on_output)
    data = read_remote_file(ways.inside, str(layout.evaluation))
    if data is None:
        raise DflashctlError(
            "the trainer wrote no evaluation.json",
            place=ways.place.label,
            hint=f"dflashctl status {request.tag}; then the same command again",
        )
    return EvaluateResult(request.tag, json.loads(data), ways.round_trips)


def _prompt_path(transport: Transport, layout: RunLayout, name: str) -> str:
    """Return the container's path of a prompts file; a local one is brought there first."""
    local = Path(name)
    if local.is_file():
        directory = str(layout.root / "prompts")
        outgoing = collect([local])
        if wanted(transport, outgoing, directory):
            send(transport, outgoing, directory)
        return posixpath.join(directory, local.name)
    if name.startswith("/"):
        return name
    raise UsageError(
        f"{name}: no such file here, and no absolute path in the container",
        hint="--prompts FILE of this machine, or /workspace/... of the container",
    )
