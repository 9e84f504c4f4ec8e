"""launch: pin everything, start the trainer under tmux, and prove from a second look that it lives.

A kill of this program at any moment leaves the container before or after the start, never between:
the start is one program over there. The laptop notes its intent first (run_store), so a rerun finds
out whether the earlier launch took place, and completes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    MismatchError,
    RefusedError,
    StateUnknownError,
    UnreachableError,
)
from dflashctl.gpu_roles import Ways, claim_roles, require_free_again
from dflashctl.parity import CheckRequest, look_before_launch, require_passed
from dflashctl.remote_run import (
    Code,
    Pinned,
    gather_facts,
    look_again,
    make_manifest,
    raise_problems,
    remote_manifest,
    start_run,
    trainer_environment,
)
from dflashctl.run_store import RunStore
from trainer.contract.config import TrainConfig
from trainer.contract.layout import check_tag
from trainer.contract.manifest import Manifest

Say = Callable[[str], None]


@dataclass(frozen=True)
class LaunchRequest:
    """A new run.

    wait_s: how long the second look waits for the run's first event. skip_check: start without the
    train-serve check; the manifest then says so.
    """

    tag: str
    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    wait_s: float = 10.0
    skip_check: bool = False


@dataclass(frozen=True)
class LaunchResult:
    """What was pinned, and what the second look saw."""

    manifest: Manifest
    record: str
    state: str
    event: dict[str, Any] | None
    process: dict[str, Any] | None
    adopted: bool
    resumed: bool
    round_trips: int


def launch(ways: Ways, request: LaunchRequest, runs: RunStore, say: Say) -> LaunchResult:
    """Start a run.

    Raises: RefusedError (tag exists, GPU busy, release or data missing, a failed check),
    MismatchError, StateUnknownError when the answer of the start was lost, DflashctlError when the
    run ended.
    """
    tag, label = check_tag(request.tag), ways.place.label
    refuse_recorded(runs, tag, label)
    intent = runs.intent(tag)
    say("reading facts")
    facts = gather_facts(ways.inside, ways.place, request.code, request.config, tag)
    there = facts.get("run")
    if there is not None and there["state"] != "never-started":
        if intent is None or there["run_id"] != intent.run_id:
            raise _tag_exists(tag, f"its run directory is there ({there['state']})", label)
        say(f"an earlier launch of {tag} was interrupted after its start; completing it")
        _require_same(intent, request)
        return _prove(ways, intent, runs, _Proof(request.wait_s, adopted=True), say)
    raise_problems(facts, label)
    gpus = claim_roles(ways, facts)
    pinned = Pinned(tag, request.code, request.config, gpus, request.argv)
    manifest = _checked(ways, make_manifest(ways.place, pinned, facts), request, say)
    runs.intend(manifest)
    say("starting")
    _start(ways, manifest, runs, resume=False)
    return _prove(ways, manifest, runs, _Proof(request.wait_s), say)


def _checked(ways: Ways, manifest: Manifest, request: LaunchRequest, say: Say) -> Manifest:
    """Make the fast check over there and return the manifest with what came of it."""
    if request.skip_check:
        say("the check is skipped; the manifest says so")
        return replace(manifest, check="skipped")
    say("checking that training and serving agree")
    asked = CheckRequest(request.code, request.config, request.argv, fast=True, reuse=True)
    found = look_before_launch(
        ways, manifest, asked, lambda data: say(data.decode("utf-8", "replace").rstrip("\n"))
    )
    require_passed(found, ways.place.label)
    return replace(manifest, check="passed")


def resume(ways: Ways, tag: str, runs: RunStore, say: Say, *, wait_s: float = 10.0) -> LaunchResult:
    """Start a run that has ended again, from its last complete checkpoint.

    The manifest, the release and the GPUs are those of the first launch. Raises: as ``launch``.
    """
    label = ways.place.label
    manifest = remote_manifest(ways.inside, ways.place, check_tag(tag))
    if manifest is None:
        raise RefusedError(
            f"there is no run {tag} to resume", hint="dflashctl runs list", place=label
        )
    config = TrainConfig.from_dict(manifest.config)
    code = Code(manifest.release, {}, "", manifest.git_commit, manifest.git_dirty)
    say("reading facts")
    facts = gather_facts(ways.inside, ways.place, code, config, tag)
    if facts.get("run", {}).get("state") == "running":
        raise RefusedError(
            f"the run {tag} is running", hint=f"dflashctl watch {tag}", place=label, code="running"
        )
    raise_problems(facts, label, ignore=("tag-exists", "packages", "python"))
    _require_unchanged(manifest, facts, label)
    require_free_again(ways, manifest)
    say("starting")
    _start(ways, manifest, runs, resume=True)
    return _prove(ways, manifest, runs, _Proof(wait_s, resumed=True), say)


@dataclass(frozen=True)
class _Proof:
    wait_s: float
    adopted: bool = False
    resumed: bool = False


def _start(ways: Ways, manifest: Manifest, runs: RunStore, *, resume: bool) -> None:
    environment = trainer_environment(ways.place.container, manifest)
    tag = manifest.tag
    try:
        answer = start_run(ways.inside, manifest, environment, resume=resume)
    except (RefusedError, ContainerDownError):
        if not resume:
            runs.forget_intent(tag)  # nothing was started, and that is certain
        raise
    except (StateUnknownError, UnreachableError) as error:
        again = f"--resume {tag}" if resume else f"--tag {tag}"
        error.hint = f"dflashctl status {tag}   (the same `launch {again}` completes it)"
        raise
    if not answer["started"]:
        if not resume:
            runs.forget_intent(tag)
        raise DflashctlError(
            f"the runner of {tag} did not start",
            hint=answer["complaint"] or "it said nothing; look at the run directory",
            place=ways.place.label,
            code="not-started",
        )


def _prove(ways: Ways, manifest: Manifest, runs: RunStore, proof: _Proof, say: Say) -> LaunchResult:
    """Look from a second command; only what it saw is told as true."""
    say("looking again")
    seen = look_again(ways.inside, manifest, proof.wait_s)
    record = runs.record(manifest)
    ended = seen["exit"] or {}
    if seen["state"] == "lost" or (seen["state"] == "ended" and ended.get("state") != "finished"):
        how = ended.get("error") or ended.get("state") or "no process and no exit record"
        raise DflashctlError(
            f"the run {manifest.tag} ended at once: {how}",
            hint="\n".join(["last lines of the log:", *seen["log"][-8:]]),
            place=ways.place.label,
            code="run-failed",
        )
    return LaunchResult(
        manifest=manifest,
        record=str(record),
        state=seen["state"],
        event=seen["event"],
        process=seen["process"],
        adopted=proof.adopted,
        resumed=proof.resumed,
        round_trips=ways.round_trips,
    )


def refuse_recorded(runs: RunStore, tag: str, place: str) -> None:
    """Raise RefusedError when the laptop has a record of the tag."""
    if runs.manifest(tag) is not None:
        raise _tag_exists(tag, f"recorded in {runs.directory(tag)}", place)


def _tag_exists(tag: str, where: str, place: str) -> RefusedError:
    return RefusedError(
        f"the tag {tag} exists: {where}",
        hint=f"another --tag, or: dflashctl launch --resume {tag}",
        place=place,
        code="tag-exists",
    )


def _require_same(intent: Manifest, request: LaunchRequest) -> None:
    # By value, not as documents: JSON made lists of the tuples.
    same_config = TrainConfig.from_dict(intent.config) == request.config
    if not same_config or intent.release != request.code.digest:
        raise RefusedError(
            f"the tag {intent.tag} exists: an interrupted launch started it with another"
            " configuration or release",
            hint=f"dflashctl status {intent.tag}; then another --tag, or --resume",
            code="tag-exists",
        )


def _require_unchanged(manifest: Manifest, facts: dict[str, Any], place: str) -> None:
    for name in ("target_revision", "dataset_sha256"):
        if facts[name] != getattr(manifest, name):
            raise MismatchError(
                f"{name} is {facts[name]}, the run was launched with {getattr(manifest, name)}",
                hint="put the files of the launch back, or launch a new tag",
                place=place,
            )
