"""exit.json: how a run ended, and the trainer's own exit statuses."""

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from trainer.contract.errors import ManifestError

VERSION = 1


class TrainerExit(IntEnum):
    """Exit status of ``python -m trainer``."""

    FINISHED = 0
    FAILED = 1
    CONFIG = 2
    FAULTS = 7  # a check or the doctor found what would spoil the run
    STOPPED = 10  # asked to stop by a signal, and the checkpoint was written


@dataclass(frozen=True)
class ExitRecord:
    """What exit.json says; written by the runner by rename, so it is whole or absent.

    ``state`` is finished, stopped (on request, checkpoint written), failed or killed (a signal).
    Exactly one of ``rc`` and ``signal`` is set. Times are unix seconds of the container's clock.
    """

    run_id: str
    state: str
    rc: int | None
    signal: int | None
    started_unix_s: float
    ended_unix_s: float
    last_step: int | None
    last_checkpoint: str | None
    oom_kill: bool
    error: str | None = None
    v: int = VERSION

    def to_json(self) -> str:
        """Return the record as one JSON document."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ExitRecord":
        """Read a record; unknown keys are skipped. Raises: ManifestError."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if int(raw["v"]) > VERSION:
                raise ManifestError(
                    f"exit.json has version {raw['v']}, this reader knows {VERSION}"
                )
            known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
            return cls(**known)
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"exit.json is not readable: {error}") from error


def classify(rc: int | None, signal: int | None) -> str:
    """Name the state for a trainer that ended with this status or signal."""
    if signal is not None:
        return "killed"
    names = {TrainerExit.FINISHED: "finished", TrainerExit.STOPPED: "stopped"}
    return names.get(TrainerExit(rc), "failed") if rc in set(TrainerExit) else "failed"
