"""process.json: which processes a run is, told so that a recycled pid is never taken for it.

A pid alone proves nothing after a reboot or a wrap-around; with start ticks and boot id it does.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract.errors import ManifestError

VERSION = 1
_START_TICKS_FIELD = 19  # of /proc/PID/stat, counted after the closing parenthesis of the name
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessRecord:
    """What process.json says; pids are those of the container's own pid namespace."""

    run_id: str
    runner_pid: int
    runner_start_ticks: int  # in clock ticks since boot
    trainer_pid: int
    trainer_start_ticks: int
    pgid: int  # of the trainer
    boot_id: str
    started_unix_s: float
    v: int = VERSION

    def to_json(self) -> str:
        """Return the record as one JSON document."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ProcessRecord":
        """Read a record; unknown keys are skipped. Raises: ManifestError."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if int(raw["v"]) > VERSION:
                raise ManifestError(
                    f"process.json has version {raw['v']}, this reader knows {VERSION}"
                )
            return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"process.json is not readable: {error}") from error

    def alive(self) -> bool:
        """Say whether the run is running: its runner or its trainer lives."""
        return boot_id() == self.boot_id and (
            _lives(self.runner_pid, self.runner_start_ticks)
            or _lives(self.trainer_pid, self.trainer_start_ticks)
        )


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot. Raises: OSError when it is gone."""
    return int(_stat_fields(pid)[_START_TICKS_FIELD])


def process_age_s() -> float:
    """Return how long ago this process began, its interpreter and imports included."""
    began_s = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def _lives(pid: int, ticks: int) -> bool:
    """Say whether this very process lives; a zombie does not."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return False
    return int(fields[_START_TICKS_FIELD]) == ticks and fields[0] not in ("Z", "X")


def _stat_fields(pid: int) -> list[str]:
    # The name stands in parentheses and may hold spaces and parentheses itself.
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text[text.rindex(")") + 2 :].split()
