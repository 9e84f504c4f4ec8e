"""Whether a run lives, by its process.json and its run.lock; a part of programs of this package.

The contract's ``ProcessRecord.alive`` says the same where the trainer's code is at hand.
"""

import fcntl
from pathlib import Path
from typing import Any

from dflashctl.remote.processes import boot_id, start_ticks


def is_alive(process: dict[str, Any] | None, *who: str) -> bool:
    """Tell whether one of ``who`` (runner, trainer) in a process.json lives: boot, pid, start."""
    if process is None or process.get("boot_id") != boot_id():
        return False
    for one in who:
        ticks = start_ticks(process.get(f"{one}_pid", ""))
        if ticks is not None and ticks == process.get(f"{one}_start_ticks"):
            return True
    return False


def is_locked(path: Path) -> bool:
    """Tell whether another process holds the lock; a run's is held by its runner and trainer."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # two who look do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
