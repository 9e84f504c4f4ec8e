"""The second look at a run that was just started: is it alive, and does it speak?

argv[1]: {"run_dir", "log", "wait_s"}. Waits until the run writes its first event, ends, or wait_s
have passed; for one that is about to tell its end a little longer. Prints one JSON object:
``state`` is running, ended or lost; ``event`` the first event of this start, ``exit`` the exit
record, ``log`` the last lines of the log.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.json_files import read_json
from dflashctl.remote.liveness import is_alive, is_locked

POLL_S = 0.02
END_WAIT_S = 10.0  # for exit.json, while the run's lock is held and no trainer lives
TAIL_BYTES = 4096  # of the log
EVENT_BYTES = 1 << 16  # more than an event; the file of a resumed run may have hundreds of MB


def last_event(run_dir: Path, since_unix_s: float) -> dict[str, Any] | None:
    """Return the newest event written since this start, None when there is none yet."""
    try:
        lines = end_of(run_dir / "metrics.jsonl", EVENT_BYTES).splitlines()[-1:]
        event = json.loads(lines[0]) if lines else None
    except (OSError, ValueError):
        return None
    recent = isinstance(event, dict) and event.get("t_unix_s", 0.0) >= since_unix_s
    return event if recent else None


def tail(path: Path) -> list[str]:
    """Return the last lines of the log."""
    try:
        return end_of(path, TAIL_BYTES).decode("utf-8", "replace").splitlines()[-15:]
    except OSError:
        return []


def end_of(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file. Raises: OSError."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - num_bytes))
        return stream.read()


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Look until there is something to say."""
    run_dir = Path(arguments["run_dir"])
    limit = time.monotonic() + arguments["wait_s"]
    while True:
        held = is_locked(run_dir / "run.lock")  # first: who lets go has written the records
        process = read_json(run_dir / "process.json")
        ended = read_json(run_dir / "exit.json")
        event = last_event(run_dir, (process or {}).get("started_unix_s", 0.0) - 1.0)
        living = is_alive(process, "trainer")
        left_s = limit - time.monotonic()
        over = left_s < 0 and (living or not held or left_s < -END_WAIT_S)
        if ended is not None or over or (living and event is not None):
            break
        time.sleep(POLL_S)
    state = "ended" if ended is not None else "running" if living else "lost"
    log = tail(Path(arguments["log"]))
    return {"state": state, "process": process, "exit": ended, "event": event, "log": log}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
