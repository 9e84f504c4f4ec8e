"""Makes a run directory and starts its runner under tmux: all of it or nothing, under one lock.

argv[1]: {"workspace", "tag", "python", "release", "socket", "resume", "uuids"}; stdin:
one JSON object {"manifest": text, "environment": {...}}. The directory is filled under a hidden
name and renamed; a kill of the client changes nothing any more once stdin was read. A directory
that a killed start left without a runner is replaced.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflashctl.remote.file_locks import take_within
from dflashctl.remote.liveness import is_locked

LOCK_WAIT_S = 30.0
START_WAIT_S = 60.0
# The runner's own complaints come before its log exists; its stdout is the pane of `attach`.
WRAP = 'exec "$@" 2>"$0"'


class RefusedError(Exception):
    """A rule forbids the start; nothing was changed."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.fields = {"kind": "refused", "code": code, "message": message, "hint": hint}


def take(lock: Path) -> int:
    """Return the descriptor of the launch lock; one start at a time in a workspace."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    if not take_within(handle, LOCK_WAIT_S):
        raise RefusedError(
            "locked", "another launch holds the workspace", "run the same command again"
        )
    return handle


def write_synced(path: Path, text: str, mode: int) -> None:
    """Write a file with its mode from the start, and fsync it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def refuse_taken_gpus(runs: Path, tag: str, uuids: list[str]) -> None:
    """Refuse when a living run of this workspace holds one of the GPUs, loaded or not yet."""
    for manifest in runs.glob("*/manifest.json"):
        directory = manifest.parent
        if directory.name in (tag, "") or not is_locked(directory / "run.lock"):
            continue
        try:
            held = {gpu["uuid"] for gpu in json.loads(manifest.read_text())["gpus"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; nvidia-smi was asked about its GPUs before
        for uuid in uuids:
            if uuid in held:
                text = f"GPU {uuid} is not idle: run {directory.name} holds it"
                raise RefusedError("gpu-busy", text, f"dflashctl stop {directory.name}")


def session_alive(socket: str, tag: str) -> bool:
    """Say whether the run's tmux session is there: its runner may still be on its way."""
    if shutil.which("tmux") is None:
        return False
    argv = ["tmux", "-S", socket, "has-session", "-t", f"={tag}"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=30).returncode == 0


def holds_work(directory: Path) -> bool:
    """Say whether a run directory holds what a trainer wrote, whatever its records say."""
    files = [*directory.glob("train_stdout_*.log"), directory / "metrics.jsonl"]
    written = any(path.exists() and path.stat().st_size for path in files)
    return written or (directory / "checkpoints").exists()


def make_directory(arguments: dict[str, Any], sent: dict[str, Any], runs: Path) -> bool:
    """Put the run directory in place by rename; True when it replaced one that never started."""
    directory = runs / arguments["tag"]
    replaced = False
    if directory.exists():
        told = any((directory / name).exists() for name in ("process.json", "exit.json"))
        if told or holds_work(directory):
            text = f"the tag {directory.name} exists already"
            raise RefusedError("tag-exists", text, "choose another --tag, or --resume it")
        if session_alive(arguments["socket"], arguments["tag"]):
            text = f"the run {directory.name} is being started just now"
            raise RefusedError("running", text, f"dflashctl watch {directory.name}")
        shutil.rmtree(directory)
        replaced = True
    for stale in runs.glob(".starting-*"):
        shutil.rmtree(stale, ignore_errors=True)  # we hold the lock: its start was killed
    partial = runs / f".starting-{arguments['tag']}"
    partial.mkdir()
    write_synced(partial / "manifest.json", sent["manifest"], 0o644)
    write_synced(partial / "environment.json", json.dumps(sent["environment"]), 0o600)
    sync_directory(partial)
    partial.rename(directory)
    sync_directory(runs)
    return replaced


def runner_argv(arguments: dict[str, Any], directory: Path) -> list[str]:
    """Return the command that tmux (or setsid) runs."""
    argv = [arguments["python"], "-u", "-m", "trainer.runner", "--run-dir", str(directory)]
    if arguments["resume"]:
        argv.append("--resume")
    return ["sh", "-c", WRAP, str(directory / "runner_stderr.log"), *argv]


def start_runner(arguments: dict[str, Any], directory: Path) -> str:
    """Start the runner detached; returns "tmux" or "setsid"."""
    environment = os.environ | {
        "PYTHONPATH": arguments["release"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
    }
    argv = runner_argv(arguments, directory)
    way = "setsid"
    if shutil.which("tmux"):
        way = "tmux"
        session = ["new-session", "-d", "-s", arguments["tag"], "-x", "200", "-y", "50"]
        argv = ["tmux", "-f", "/dev/null", "-S", arguments["socket"], *session, "--", *argv]
        Path(arguments["socket"]).unlink(missing_ok=True)
    else:
        argv = ["setsid", "-f", *argv]
    done = subprocess.run(
        argv,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode != 0:
        raise OSError(f"{way} could not start the runner: {done.stderr.strip()}")
    return way


def wait_for_process(directory: Path, old: bytes | None, lives: Callable[[], bool]) -> bool:
    """Wait until the runner has written process.json anew; False when it did not.

    lives: whether what was started is there; words on its stderr alone may be a mere warning.
    """
    path, complaint = directory / "process.json", directory / "runner_stderr.log"
    limit = time.monotonic() + START_WAIT_S
    while time.monotonic() < limit:
        said = complaint.exists() and complaint.stat().st_size > 0
        ended = said and not lives() and not is_locked(directory / "run.lock")
        try:
            if path.read_bytes() != old:
                return True
        except FileNotFoundError:
            pass
        if ended:
            return False
        time.sleep(0.01)
    return False


def main(arguments: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """Start or resume a run."""
    runs = Path(arguments["workspace"]) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    directory = runs / arguments["tag"]
    lock = take(runs / ".launch.lock")
    if is_locked(directory / "run.lock"):
        text = f"the run {directory.name} is running"
        raise RefusedError("running", text, f"dflashctl watch {directory.name}")
    refuse_taken_gpus(runs, arguments["tag"], arguments["uuids"])
    replaced = not arguments["resume"] and make_directory(arguments, sent, runs)
    process = directory / "process.json"
    old = process.read_bytes() if process.exists() else None
    (directory / "runner_stderr.log").unlink(missing_ok=True)
    way = start_runner(arguments, directory)
    session = (arguments["socket"], arguments["tag"])
    started = wait_for_process(directory, old, lambda: way == "tmux" and session_alive(*session))
    complaint = directory / "runner_stderr.log"
    text = complaint.read_text(errors="replace")[-2000:] if complaint.exists() else ""
    os.close(lock)
    return {"started": started, "way": way, "replaced": replaced, "complaint": text}


if __name__ == "__main__":
    try:
        answer = main(json.loads(sys.argv[1]), json.loads(sys.stdin.read()))
    except RefusedError as refusal:
        answer = {"error": refusal.fields}
    except (OSError, subprocess.SubprocessError) as problem:
        answer = {"error": {"kind": "failed", "message": f"cannot start the run: {problem}"}}
    print(json.dumps(answer))
    sys.exit("error" in answer)
