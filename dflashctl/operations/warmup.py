"""warmup: compile what a run will need, one GPU at a time, into the cache that launch uses."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.gpu_roles import Ways, claim_roles
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

_TAG = "warmup"


@dataclass(frozen=True)
class WarmupResult:
    """What the trainer reported; ``devices`` has one object for each drafter device."""

    place: str
    release: str
    cache_dir: str
    devices: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    round_trips: int


def warm_up(
    ways: Ways,
    code: Code,
    config: TrainConfig,
    argv: tuple[str, ...],
    on_output: Callable[[bytes], None],
    on_report: Callable[[dict[str, Any]], None],
) -> WarmupResult:
    """Run the trainer's real step on each drafter device in turn.

    ``on_report`` gets each JSON report of the trainer as it comes, ``on_output`` every other line.
    Raises: RefusedError as launch does (release missing, GPU busy, another warm-up at work);
    DflashctlError when the trainer failed.
    """
    facts = gather_facts(ways.inside, ways.place, code, config, _TAG)
    raise_problems(facts, ways.place.label)
    gpus = claim_roles(ways, facts)
    manifest = make_manifest(ways.place, Pinned(_TAG, code, config, gpus, argv), facts)
    environment = trainer_environment(ways.place.container, manifest)
    name = manifest.cache_dir.rpartition("/")[2]
    run_dir = str(Workspace.at(manifest.workspace).warmup(name))
    reports = _Reports(on_output, on_report)
    command = TrainerCommand(
        run_dir=run_dir,
        argv=["warmup", "--run-dir", run_dir],
        staged=staged_files(manifest, environment),
        lock=f"{manifest.cache_dir}/warmup.lock",
        python=manifest.python,
    )
    run_trainer(ways.inside, command, reports.feed)
    reports.close()
    return WarmupResult(
        place=ways.place.label,
        release=code.digest,
        cache_dir=manifest.cache_dir,
        devices=tuple(reports.devices),
        notes=tuple(reports.notes),
        round_trips=ways.round_trips,
    )


class _Reports:
    """Tells the trainer's JSON reports from its other lines, and keeps those of the result."""

    def __init__(
        self, on_output: Callable[[bytes], None], on_report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.devices: list[dict[str, Any]] = []
        self.notes: list[str] = []
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
        if not isinstance(report, dict) or "kind" not in report:
            self._on_output(line + b"\n")
            return
        self._on_report(report)
        if report["kind"] == "warmup":
            self.devices.append({key: value for key, value in report.items() if key != "kind"})
        elif report["kind"] == "warmup_note":
            self.notes.append(str(report.get("text", "")))
