"""warmup: compile what a run will need, one GPU at a time, into the cache that launch uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.gpu_roles import Ways
from dflashctl.rehearsal import Rehearsal, Report, rehearse
from dflashctl.remote_run import Code
from trainer.contract.config import TrainConfig


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
    on_report: Callable[[Report], None],
) -> WarmupResult:
    """Run the trainer's real step on each drafter device in turn.

    ``on_report`` gets each JSON report of the trainer as it comes, ``on_output`` every other line.
    Raises: RefusedError as launch does (release missing, GPU busy, another warm-up at work);
    DflashctlError when the trainer failed.
    """
    devices: list[Report] = []
    notes: list[str] = []

    def take(report: Report) -> None:
        on_report(report)
        if report["kind"] == "warmup":
            devices.append({key: value for key, value in report.items() if key != "kind"})
        elif report["kind"] == "warmup_note":
            notes.append(str(report.get("text", "")))

    done = rehearse(ways, Rehearsal("warmup", code, config, argv), on_output, take)
    return WarmupResult(
        place=ways.place.label,
        release=code.digest,
        cache_dir=done.manifest.cache_dir,
        devices=tuple(devices),
        notes=tuple(notes),
        round_trips=ways.round_trips,
    )
