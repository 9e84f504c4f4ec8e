"""Stops a run: SIGINT and time for a checkpoint, then SIGTERM, then SIGKILL to its whole group.

argv[1]: {"run_dir", "tag", "socket", "grace_s"}. A pid is signalled only when its start ticks and
boot are those of process.json. Prints a JSON line at each step and every two seconds; the last line
says what was proven: ``signal`` that worked, ``exit`` record, ``session_gone``, ``ended_before``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.json_files import read_json
from dflashctl.remote.liveness import is_alive, is_locked

POLL_S = 0.1
BEAT_S = 2.0
TERM_GRACE_S = 10.0
KILL_GRACE_S = 10.0
RECORD_WAIT_S = 10.0
SETTLE_S = 5.0  # from the lock of a start to its process.json, and from exit.json to a free lock


def read_process(run_dir: Path) -> dict[str, Any] | None:
    """Return process.json, None when it is absent or does not say which processes the run is."""
    process = read_json(run_dir / "process.json")
    names = ("trainer_pid", "trainer_start_ticks", "pgid", "boot_id")
    return process if process is not None and all(name in process for name in names) else None


def lock_holders(path: Path) -> list[int]:
    """Return the processes that have the run's lock open, without our own."""
    found = []
    for directory in Path("/proc").glob("[0-9]*/fd"):
        pid = int(directory.parent.name)
        try:
            held = any(link.readlink() == path.resolve() for link in directory.iterdir())
        except OSError:  # it ended, or is not ours to look at
            continue
        if held and pid != os.getpid():
            found.append(pid)
    return sorted(found)


def say(**values: Any) -> None:
    """Print one line at once, so that the client hears from us."""
    print(json.dumps(values), flush=True)


def wait_gone(process: dict[str, Any], seconds: float) -> bool:
    """Wait until the trainer is gone; False when it still lives after ``seconds``."""
    started = beat = time.monotonic()
    while is_alive(process, "trainer"):
        now = time.monotonic()
        if now - started > seconds:
            return False
        if now - beat > BEAT_S:
            beat = now
            say(waiting_s=round(now - started, 1))
        time.sleep(POLL_S)
    return True


def send(process: dict[str, Any], number: signal.Signals) -> None:
    """Signal the trainer; SIGKILL goes to its group, so that no child keeps GPU memory."""
    say(signal=number.name, pid=process["trainer_pid"])
    try:
        if number == signal.SIGKILL:
            os.killpg(process["pgid"], number)
        else:
            os.kill(process["trainer_pid"], number)
    except ProcessLookupError:
        return


def session_gone(socket: str, tag: str) -> bool:
    """Wait until the run's tmux session has ended."""
    if shutil.which("tmux") is None:
        return True
    limit = time.monotonic() + RECORD_WAIT_S
    while time.monotonic() < limit:
        argv = ["tmux", "-S", socket, "has-session", "-t", f"={tag}"]
        if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
            return True
        time.sleep(POLL_S)
    return False


def wait_for(path: Path) -> dict[str, Any] | None:
    """Wait for a JSON file that another process is about to write."""
    limit = time.monotonic() + RECORD_WAIT_S
    while (value := read_json(path)) is None and time.monotonic() < limit:
        time.sleep(POLL_S)
    return value


def settled(run_dir: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return process and exit record once they agree with the lock.

    A resume takes the lock, sets exit.json aside and writes process.json anew: in between the run
    is neither what the records say nor over.
    """
    limit = time.monotonic() + SETTLE_S
    while True:
        held = is_locked(run_dir / "run.lock")  # first: who lets go has written the records
        process, ended = read_process(run_dir), read_json(run_dir / "exit.json")
        if not held or is_alive(process, "trainer") or time.monotonic() > limit:
            return process, ended
        time.sleep(POLL_S)


def unknown_process(run_dir: Path) -> dict[str, Any]:
    """Return the error for a run that lives while process.json does not say what to signal."""
    pids = lock_holders(run_dir / "run.lock")
    listed = " ".join(map(str, pids))
    text = f"the run lives (run.lock is held by pid {listed or '?'}), and process.json is damaged"
    hint = f"in the container: kill -INT {pids[-1]}" if pids else "dflashctl attach, then Ctrl-C"
    return {"error": {"kind": "failed", "code": "process-unknown", "message": text, "hint": hint}}


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Stop the run and say what is proven."""
    run_dir = Path(arguments["run_dir"])
    if not run_dir.is_dir():
        text = f"there is no run {arguments['tag']} in the container"
        hint = "dflashctl runs list"
        return {"error": {"kind": "usage", "code": "no-such-run", "message": text, "hint": hint}}
    process, ended = settled(run_dir)
    if process is None and ended is None and is_locked(run_dir / "run.lock"):
        return unknown_process(run_dir)
    if process is None or ended is not None or not is_alive(process, "trainer"):
        gone = session_gone(arguments["socket"], arguments["tag"])
        return {"ended_before": True, "signal": None, "exit": ended, "session_gone": gone}
    used = None
    steps = (
        (signal.SIGINT, arguments["grace_s"]),
        (signal.SIGTERM, TERM_GRACE_S),
        (signal.SIGKILL, KILL_GRACE_S),
    )
    for number, seconds in steps:
        used = number.name
        send(process, number)
        if wait_gone(process, seconds):
            break
    return {
        "ended_before": False,
        "signal": used,
        "gone": not is_alive(process, "trainer"),
        "exit": wait_for(run_dir / "exit.json"),
        "session_gone": session_gone(arguments["socket"], arguments["tag"]),
    }


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
    sys.exit("error" in answer)
