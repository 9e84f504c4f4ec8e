"""launch: pin everything, start the trainer under tmux, and prove from a second look that it lives.

A kill of this program at any moment leaves the container before or after the start, never between:
the start is one program over there. The laptop notes its intent first (run_store), so a rerun finds
out whether the earlier launch took place, and completes it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.diagnosis.container import Interval
from dflashctl.diagnosis.preflight import Preflight
from dflashctl.diagnosis.warmth import needs_warmth, warmth_of
from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    MismatchError,
    RefusedError,
    StateUnknownError,
    UnreachableError,
    UsageError,
)
from dflashctl.gpu_locks import Holder, new_token
from dflashctl.gpu_roles import (
    Bound,
    Claim,
    Ways,
    claim,
    claim_again,
    claim_roles,
    require_idle,
    uses_gpus,
)
from dflashctl.gpu_wait import Patience, when_free
from dflashctl.gpus import Probe
from dflashctl.landing import Landing, landing_of, stray_error
from dflashctl.parity import CheckRequest, look_before_launch, require_passed, summary
from dflashctl.remote_run import (
    Code,
    Pinned,
    gather_facts,
    layout_of,
    look_again,
    make_manifest,
    raise_problems,
    remote_manifest,
    start_run,
    trainer_environment,
)
from dflashctl.run_store import RunStore, tag_exists
from trainer.contract.config import TrainConfig
from trainer.contract.layout import Workspace, check_tag
from trainer.contract.manifest import Gpu, Manifest

Say = Callable[[str], None]


@dataclass(frozen=True)
class LaunchRequest:
    """A new run.

    look_s: how long the second look waits for the run's first event. skip_check: start without the
    train-serve check; the manifest then says so. wait_s: how long to wait for GPUs to be free.
    require_warm: refuse a run whose warm-up is stale or missing.
    """

    tag: str
    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    look_s: float = 10.0
    skip_check: bool = False
    wait_s: float = 0.0
    require_warm: bool = False


@dataclass(frozen=True)
class LaunchResult:
    """What was pinned, and what the second look saw.

    log: its last lines by then. landed: UUIDs of its GPUs on which the driver listed it already.
    """

    manifest: Manifest
    record: str
    state: str
    event: dict[str, Any] | None
    process: dict[str, Any] | None
    adopted: bool
    resumed: bool
    round_trips: int
    log: tuple[str, ...]
    landed: tuple[str, ...]


def launch(ways: Ways, request: LaunchRequest, runs: RunStore, say: Say) -> LaunchResult:
    """Start a run.

    Raises: RefusedError (tag exists, GPU busy, release or data missing, a failed check),
    UsageError (no such run to resume), MismatchError, StateUnknownError when the answer of the
    start was lost, DflashctlError when the run ended.
    """
    tag, container = check_tag(request.tag), ways.place.container
    runs.require_new(tag, ways.place.label)
    patience = Patience(request.wait_s, lambda answer: claim(container, answer))
    with runs.guarded(tag):
        return when_free(ways, patience, lambda: _launch(ways, request, runs, say), say)


def _launch(ways: Ways, request: LaunchRequest, runs: RunStore, say: Say) -> LaunchResult:
    """Launch, or find out at once why not."""
    tag, label = request.tag, ways.place.label
    intent, token = runs.intent(tag), runs.token(tag)
    facts = _facts(ways, request.code, request.config, tag, say)
    there = facts.get("run")
    if there is not None and there["state"] != "never-started":
        if intent is None or there["run_id"] != intent.run_id:
            raise tag_exists(tag, f"its run directory is there ({there['state']})", label)
        return _complete(ways, intent, request, runs, say)
    raise_problems(facts, label)
    _look_at_room(ways, request.config, facts, say)
    with _Locking(ways, tag, runs, say) as locking:
        gpus = locking.hold(lambda holder: claim_roles(ways, facts, holder))
        pinned = Pinned(tag, request.code, request.config, gpus, request.argv)
        manifest = make_manifest(ways.place, pinned, facts)
        manifest = _with_warmth(manifest, facts["warmups"], request, say)
        manifest = _checked(ways, manifest, request, say)
        runs.intend(manifest)
        say("starting")
        try:
            _start(ways, manifest, runs, locking, resume=False)
        except RefusedError as error:
            if intent is None or not _has_started(ways, intent, error):
                raise
            locking.kept = True  # the locks and the run are those of the earlier launch
            runs.intend(intent)
            if token is not None:
                runs.note_token(tag, token)
            return _complete(ways, intent, request, runs, say)
        return _prove(ways, manifest, runs, _Proof(request.look_s), locking)


def _has_started(ways: Ways, intent: Manifest, error: RefusedError) -> bool:
    """Say whether a start was refused because that of the same launch before came to its end."""
    if error.code not in ("running", "tag-exists"):
        return False
    there = remote_manifest(ways.inside, ways.place, intent.tag)
    return there is not None and there.run_id == intent.run_id


def _complete(
    ways: Ways, intent: Manifest, request: LaunchRequest, runs: RunStore, say: Say
) -> LaunchResult:
    """Adopt the run of an earlier try of the same launch. Raises: RefusedError for another."""
    say(f"an earlier launch of {intent.tag} was interrupted after its start; completing it")
    _require_same(intent, request)
    return _adopt(ways, intent, runs, _Proof(request.look_s, adopted=True), say)


def _facts(ways: Ways, code: Code, config: TrainConfig, tag: str, say: Say) -> dict[str, Any]:
    """Ask for the facts, and note when they were on their way by the clock here."""
    say("reading facts")
    sent_unix_s = time.time()
    facts = gather_facts(ways.inside, ways.place, code, config, tag)
    return facts | {"interval": Interval(sent_unix_s, time.time())}


def _look_at_room(
    ways: Ways, config: TrainConfig, facts: dict[str, Any], say: Say, num_checkpoints: int = 2
) -> None:
    """Refuse what cannot work over there, and warn of what may not. Raises: RefusedError."""
    container = ways.place.container
    on_gpus = uses_gpus(container)
    preflight = Preflight(config, facts["room"], on_gpus, num_checkpoints)
    preflight.require_room(ways.place.label)
    skew_s = facts["interval"].skew_s(facts["clock_unix_s"])
    for text in preflight.warnings(ways.place.label, skew_s):
        say(f"warning: {text}")


def _with_warmth(
    manifest: Manifest, stamps: list[dict[str, Any]], request: LaunchRequest, say: Say
) -> Manifest:
    """Tell a stale warm-up, and return the manifest with what it is. Raises: RefusedError."""
    found = warmth_of(manifest, stamps)
    if found.why and needs_warmth(request.config):
        place = manifest.place
        hint = f"dflashctl -l {place} warmup   (with the --train and --set of this launch)"
        if request.require_warm:
            raise RefusedError(found.why, hint=hint, place=place, code="not-warm")
        say(f"warning: {found.why}; the run compiles at its start; to do it before: {hint}")
    return replace(manifest, warmup=found.state)


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
    say(summary(found))
    return replace(manifest, check="passed")


@dataclass(frozen=True)
class ResumeRequest:
    """A run to go on with; the waits are those of LaunchRequest."""

    tag: str
    look_s: float = 10.0
    wait_s: float = 0.0


def resume(ways: Ways, request: ResumeRequest, runs: RunStore, say: Say) -> LaunchResult:
    """Start a run that has ended again, from its last complete checkpoint.

    The manifest, the release and the GPUs are those of the first launch. Raises: as ``launch``.
    """
    with runs.guarded(request.tag):
        again = _Again(ways, request, runs, say)
        return when_free(ways, Patience(request.wait_s, again.require_free), again.resume, say)


class _Again:
    """One resume, tried until its GPUs are free."""

    def __init__(self, ways: Ways, request: ResumeRequest, runs: RunStore, say: Say) -> None:
        self._ways, self._request, self._runs, self._say = ways, request, runs, say
        self._uuids: list[str] = []

    def require_free(self, answer: Probe) -> None:
        """Raise unless the run's GPUs are idle."""
        label = self._ways.place.label
        for uuid in self._uuids:
            require_idle(answer.find(uuid, label), label, answer)

    def resume(self) -> LaunchResult:
        """Resume, or find out at once why not."""
        ways, request, runs, say = self._ways, self._request, self._runs, self._say
        manifest = _resumable(ways, request.tag, say)
        self._uuids = [gpu.uuid for gpu in manifest.gpus if gpu.uuid is not None]
        with _Locking(ways, request.tag, runs, say) as locking:
            locking.hold(lambda holder: ((), claim_again(ways, manifest, holder)))
            say("starting")
            _start(ways, manifest, runs, locking, resume=True)
            return _prove(ways, manifest, runs, _Proof(request.look_s, resumed=True), locking)


def _resumable(ways: Ways, tag: str, say: Say) -> Manifest:
    """Return the manifest of a run that may be resumed; raises as ``launch``."""
    label = ways.place.label
    manifest = remote_manifest(ways.inside, ways.place, check_tag(tag))
    if manifest is None:
        raise UsageError(
            f"there is no run {tag} to resume",
            hint=f"dflashctl runs list   (where a record runs/{tag} is left here, removing it frees"
            " the tag)",
            place=label,
            code="no-such-run",
        )
    config = TrainConfig.from_dict(manifest.config)
    code = Code(manifest.release, {}, "", manifest.git_commit, manifest.git_dirty)
    facts = _facts(ways, code, config, tag, say)
    if facts.get("run", {}).get("state") == "running":
        raise RefusedError(
            f"the run {tag} is running", hint=f"dflashctl watch {tag}", place=label, code="running"
        )
    _require_unfinished(tag, facts, label)
    raise_problems(facts, label, ignore=("tag-exists", "packages", "python"))
    _require_unchanged(manifest, facts, label)
    _look_at_room(ways, config, facts, say, num_checkpoints=1)
    return manifest


class _Locking:
    """The GPU locks of one launch: let go when it fails, kept while nobody knows, bound at last.

    The token is noted here first, so that a rerun takes over the locks of a try that was killed.
    """

    def __init__(self, ways: Ways, tag: str, runs: RunStore, say: Say) -> None:
        self.say = say
        self.claim: Claim | None = None
        self.kept = False  # whether the run lives, or may
        self._ways, self._tag, self._runs = ways, tag, runs

    def __enter__(self) -> "_Locking":
        return self

    def hold(self, take: Callable[[Holder], tuple[tuple[Gpu, ...], Claim]]) -> tuple[Gpu, ...]:
        """Take the locks; a place without GPUs has none."""
        container = self._ways.place.container
        token = self._runs.token(self._tag) or new_token()
        if uses_gpus(container):
            self._runs.note_token(self._tag, token)
        run_dir = str(Workspace.at(container.workspace).run(self._tag).root)
        names = (self._tag, container.host_name, container.vmid)
        gpus, self.claim = take(Holder(*names, run_dir, token))
        for text in dict.fromkeys(lock.text() for lock in self.claim.taken_over):
            self.say(f"took over stale GPU locks: {text}")
        if self.claim.warning:
            self.say(f"warning: {self.claim.warning}")
        return gpus

    def found(self, manifest: Manifest) -> None:
        """Take up the locks of an earlier try again, by the token that it noted here."""
        token = self._runs.token(self._tag)
        if token is not None:
            names = (manifest.tag, manifest.host, manifest.vmid, str(layout_of(manifest).root))
            self.claim = Claim(self._ways, Holder(*names, token))
            self.claim.took([gpu.uuid for gpu in manifest.gpus if gpu.uuid], ())

    def tie(self) -> Bound | None:
        """Tie the locks to the process of a run that was seen alive, and look where it landed."""
        try:
            return None if self.claim is None else self.claim.bind()
        except DflashctlError as error:
            self.say(f"the GPU locks are not tied to the run yet ({error.message}); it holds them")
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let go of the locks, unless the run lives, or may."""
        if self.kept:
            return
        if self.claim is None:
            gone = isinstance(error, DflashctlError) and not _leaves_doubt(error)
        else:
            gone = self.claim.let_go()
        if gone:
            self._runs.forget_token(self._tag)


def _leaves_doubt(error: DflashctlError) -> bool:
    """Say whether a command may have been carried out over there although it failed here."""
    return isinstance(error, UnreachableError) or error.code == StateUnknownError.code


@dataclass(frozen=True)
class _Proof:
    look_s: float
    adopted: bool = False
    resumed: bool = False


def _start(
    ways: Ways, manifest: Manifest, runs: RunStore, locking: _Locking, *, resume: bool
) -> None:
    environment = trainer_environment(ways.place.container, manifest)
    tag = manifest.tag
    if locking.claim is not None:
        locking.claim.renew_if_due()
    locking.kept = True
    try:
        answer = start_run(ways.inside, manifest, environment, resume=resume)
    except (RefusedError, ContainerDownError):
        locking.kept = False
        if not resume:
            runs.forget_intent(tag)  # nothing was started, and that is certain
        raise
    except (StateUnknownError, UnreachableError) as error:
        again = f"--resume {tag}" if resume else f"--tag {tag}"
        error.hint = f"dflashctl status {tag}   (the same `launch {again}` completes it)"
        raise
    locking.kept = False
    if not answer["started"]:
        if not resume:
            runs.forget_intent(tag)
        raise DflashctlError(
            f"the runner of {tag} did not start",
            hint=answer["complaint"] or "it said nothing; look at the run directory",
            place=ways.place.label,
            code="not-started",
        )


def _adopt(ways: Ways, manifest: Manifest, runs: RunStore, proof: _Proof, say: Say) -> LaunchResult:
    """Complete a launch whose command was killed after the start; its locks are found again."""
    with _Locking(ways, manifest.tag, runs, say) as locking:
        locking.found(manifest)
        return _prove(ways, manifest, runs, proof, locking)


def _prove(
    ways: Ways, manifest: Manifest, runs: RunStore, proof: _Proof, locking: _Locking
) -> LaunchResult:
    """Look again, and once more when what started it is gone; only what is seen then is told."""
    locking.say("looking again")
    locking.kept = True
    seen = look_again(ways.inside, manifest, proof.look_s)
    landing = Landing()
    if seen["state"] == "running":
        has_left, bound = ways.leave(), locking.tie()
        if bound is not None:
            landing = landing_of(manifest, bound.seen)
        if has_left and (bound is None or bound.pid is None):
            seen = look_again(ways.inside, manifest, 0.0)
    locking.kept = seen["state"] == "running"
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
    if landing.strayed:
        raise stray_error(manifest, landing)
    return LaunchResult(
        manifest=manifest,
        record=str(record),
        state=seen["state"],
        event=seen["event"],
        process=seen["process"],
        adopted=proof.adopted,
        resumed=proof.resumed,
        round_trips=ways.round_trips,
        log=tuple(seen["log"]),
        landed=landing.landed,
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


def _require_unfinished(tag: str, facts: dict[str, Any], place: str) -> None:
    step = facts.get("run", {}).get("finished_step")
    if step is not None:
        raise RefusedError(
            f"the run {tag} has finished, at step {step}; nothing is left to do",
            hint=f"dflashctl pull {tag}   (or evaluate it; more steps need a new run:"
            " launch --tag with another optim.max_steps or optim.epochs)",
            place=place,
            code="finished",
        )


def _require_unchanged(manifest: Manifest, facts: dict[str, Any], place: str) -> None:
    for name in ("target_revision", "dataset_sha256"):
        if facts[name] != getattr(manifest, name):
            raise MismatchError(
                f"{name} is {facts[name]}, the run was launched with {getattr(manifest, name)}",
                hint="put the files of the launch back, or launch a new tag",
                place=place,
            )
