"""Tell the state of every run in a workspace, or of some, as one JSON object on stdout.

By hand: python3 -m dflashctl.remote.status '{"workspace": "/workspace", "tags": null}'

States: running; finished, stopped, failed, killed (from exit.json); lost (the process is gone and
left no exit.json); starting and never-started (no process.json). Ages are measured with this
machine's clock, because the reader's may differ.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.json_files import read_json
from dflashctl.remote.liveness import is_alive, is_locked

TAIL_BYTES = 256 * 1024  # of metrics.jsonl: the last step is somewhere in it
START_WITHIN_S = 20.0


def last_events(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last event of each kind near the end of metrics.jsonl; ``""`` is the very last."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    newest: dict[str, dict[str, Any]] = {}
    for line in lines[:-1]:
        try:
            event = json.loads(line)
            newest[event["kind"]] = newest[""] = event
        except (ValueError, KeyError, TypeError):
            continue  # a line cut by the seek or by a kill
    return newest


def last_checkpoint(directory: Path) -> str | None:
    """Return the name of the newest complete checkpoint."""
    complete = [path.parent.name for path in directory.glob("step_*/COMPLETE.json")]
    steps = [name for name in complete if name.removeprefix("step_").isdigit()]  # not .partial
    return max(steps, key=lambda name: int(name.removeprefix("step_")), default=None)


def state_of(root: Path, manifest_age_s: float) -> tuple[str, dict[str, Any] | None]:
    """Return the state of the run in ``root`` and its exit record."""
    process = read_json(root / "process.json")
    alive = is_alive(process, "runner", "trainer")
    record = read_json(root / "exit.json")  # after the process: it may just have ended
    if record is None and not alive:
        # process.json is damaged, or that of a start or a resume is not written yet
        alive = is_locked(root / "run.lock")
        record = read_json(root / "exit.json")
    if record is not None:
        return str(record.get("state", "failed")), record
    if alive:
        return "running", None
    if process is not None:
        return "lost", None
    return ("starting" if manifest_age_s < START_WITHIN_S else "never-started"), None


def age_s(path: Path, now: float) -> float | None:
    """Return the seconds since ``path`` was written, or None when it is not there."""
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def look(root: Path, now: float) -> dict[str, Any] | None:
    """Describe the run in ``root``; None when there is no run."""
    if not (root / "manifest.json").exists():
        return None
    manifest = read_json(root / "manifest.json") or {}  # damaged: the run is there all the same
    state, record = state_of(root, age_s(root / "manifest.json", now) or 0.0)
    events = last_events(root / "metrics.jsonl")
    newest = events.get("", {}).get("t_unix_s")
    log = Path(str(manifest.get("log_path") or root / f"train_stdout_{root.name}.log"))
    return {
        "tag": root.name,
        "state": state,
        "run_id": manifest.get("run_id"),
        "created_unix_s": manifest.get("created_unix_s"),
        "release": manifest.get("release"),
        "exit": record,
        "step": events.get("step"),
        "phase": events.get("phase"),
        "last_event_age_s": None if newest is None else max(0.0, now - newest),
        "log_age_s": age_s(log, now),
        "last_checkpoint": last_checkpoint(root / "checkpoints"),
        "evaluation": read_json(root / "evaluation.json") or events.get("eval"),
    }


def main() -> None:
    """Print the state of the runs that argv[1] names."""
    asked = json.loads(sys.argv[1])
    runs = Path(asked["workspace"]) / "runs"
    if asked.get("tags") is None:
        roots = sorted(path.parent for path in runs.glob("*/manifest.json"))
    else:
        roots = [runs / tag for tag in asked["tags"]]
    now = time.time()
    found = [run for root in roots if not root.name.startswith(".") and (run := look(root, now))]
    json.dump({"now_unix_s": now, "runs": found}, sys.stdout)


if __name__ == "__main__":
    main()
