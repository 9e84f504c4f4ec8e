"""warmup: compile what a run will need, one GPU at a time, into the cache that launch uses.

What was compiled can be kept here in one file, and offered to other hosts of the same kind.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflashctl.errors import MismatchError, UsageError
from dflashctl.files import collect, fetch, send, wanted
from dflashctl.gpu_roles import Ways
from dflashctl.rehearsal import Rehearsal, Report, rehearse
from dflashctl.remote_run import Code
from dflashctl.transport import Transport
from trainer.contract.compile_artifacts import (
    content_of,
    may_be_written,
    require_kind,
    unframed,
)
from trainer.contract.config import TrainConfig
from trainer.contract.durable import sync
from trainer.contract.errors import ArtifactsError
from trainer.contract.manifest import Manifest

_LOADED, _SAVED = "artifacts-in", "artifacts-out"  # in the run directory over there
_MAX_BYTES = 16 << 30


@dataclass(frozen=True)
class WarmupRequest:
    """What to warm up for; ``load``: begin with this file of compile caches, ``save``: keep one."""

    code: Code
    config: TrainConfig
    argv: tuple[str, ...]
    load: Path | None = None
    save: Path | None = None


@dataclass(frozen=True)
class WarmupResult:
    """What the trainer reported; ``devices`` has one object for each drafter device.

    loaded, saved: the files of compile caches here.
    """

    place: str
    release: str
    cache_dir: str
    devices: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    round_trips: int
    loaded: str | None = None
    saved: str | None = None


@dataclass(frozen=True)
class Sinks:
    """Where the words of a warm-up go: each JSON report of the trainer, every other line, and the
    size of each block of the file that comes."""

    on_output: Callable[[bytes], None]
    on_report: Callable[[Report], None]
    on_bytes: Callable[[int], None]


def require_files(request: WarmupRequest) -> None:
    """Look at both files before anything is asked over there.

    Raises: UsageError where one cannot be read or written, MismatchError for a damaged one.
    """
    if request.load is not None:
        _read(request.load)
    save = request.save
    if save is not None and not may_be_written(save):
        raise UsageError(
            f"{save}: no file can be written there",
            hint="--save-artifacts FILE, in a directory of yours",
        )


def warm_up(ways: Ways, request: WarmupRequest, sinks: Sinks) -> WarmupResult:
    """Run the trainer's real step on each drafter device in turn.

    Raises: RefusedError as launch does (release missing, GPU busy, another warm-up at work);
    MismatchError for artefacts that are damaged, or of another torch, driver or GPU; DflashctlError
    when the trainer failed.
    """
    devices: list[Report] = []
    notes: list[str] = []

    def take(report: Report) -> None:
        sinks.on_report(report)
        if report["kind"] == "warmup":
            devices.append({key: value for key, value in report.items() if key != "kind"})
        elif report["kind"] == "warmup_note":
            notes.append(str(report.get("text", "")))

    def stage(manifest: Manifest, run_dir: str) -> tuple[str, ...]:
        words: list[str] = []
        if request.load is not None:
            _offer(ways.inside, request.load, manifest, run_dir)
            words += ["--load-artifacts", f"{run_dir}/{_LOADED}"]
        if request.save is not None:
            words += ["--save-artifacts", f"{run_dir}/{_SAVED}"]
        return tuple(words)

    rehearsal = Rehearsal("warmup", request.code, request.config, request.argv, stage=stage)
    done = rehearse(ways, rehearsal, sinks.on_output, take)
    if request.save is not None:
        _keep(ways.inside, f"{done.run_dir}/{_SAVED}", request.save, sinks.on_bytes)
    return WarmupResult(
        place=ways.place.label,
        release=request.code.digest,
        cache_dir=done.manifest.cache_dir,
        devices=tuple(devices),
        notes=tuple(notes),
        round_trips=ways.round_trips,
        loaded=None if request.load is None else str(request.load),
        saved=None if request.save is None else str(request.save),
    )


def _offer(inside: Transport, file: Path, manifest: Manifest, run_dir: str) -> None:
    """Send a file of the run's kind, unless it is there already."""
    try:
        require_kind(_read(file), file, manifest)
    except ArtifactsError as error:
        raise MismatchError(
            str(error),
            place=manifest.place,
            code="artifacts-kind",
            hint="the same warmup without --load-artifacts",
        ) from error
    outgoing = [replace(entry, name=_LOADED) for entry in collect([file])]
    differing = wanted(inside, outgoing, run_dir)
    if differing:
        send(inside, differing, run_dir)


def _keep(inside: Transport, source: str, file: Path, on_bytes: Callable[[int], None]) -> None:
    """Bring the file that was saved over there; it appears here whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fetch(inside, source, partial, _MAX_BYTES, on_bytes)
        _read(partial)
        partial.replace(file)
        sync(file.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """Return the head of a file of compile caches that is whole."""
    try:
        content = content_of(file)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", hint=f"ls {file.parent}") from error
    try:
        return unframed(content, file)[0]
    except ArtifactsError as error:
        hint = "make one on a host of the same kind: dflashctl warmup --save-artifacts FILE"
        raise MismatchError(
            str(error), place=str(file), code="artifacts-damaged", hint=hint
        ) from error
