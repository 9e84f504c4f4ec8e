"""Starts the trainer of one run and keeps how it ended: ``python -m trainer.runner --run-dir DIR``.

This is what tmux starts. The trainer gets its own session and writes straight to the log file (no
pipe: the log goes on when this process dies); process.json says which processes the run is and
exit.json how it ended, with status or signal. Standard library only.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TypeVar

from trainer.contract.completion import ends_at, latest_complete
from trainer.contract.durable import sync, write_by_rename
from trainer.contract.errors import ContractError
from trainer.contract.events import EventDecoder
from trainer.contract.exit_record import ExitRecord, TrainerExit, classify
from trainer.contract.layout import RunLayout
from trainer.contract.manifest import Manifest
from trainer.contract.process_record import ProcessRecord, boot_id, start_ticks

T = TypeVar("T")

_TAIL_BYTES = 1 << 18
_RESERVED_BYTES = 4096  # exit.json must find room on a disk that the run has filled
_MIRROR_PAUSE_S = 0.2
_MIRROR_END_S = 10.0  # a terminal that takes nothing must not hold up the end
_LOCK_WAIT_S = 2.0  # who only looks whether a run is alive takes the lock for a moment
_OWN_ERROR = re.compile(rb"error(?:\[[\w-]+\])?: .+")
_ANY_ERROR = re.compile(rb"[\w.]*(?:Error|Exception|Interrupt)\b.*")


class RunnerError(Exception):
    """The run cannot be started; the text says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run the trainer of one run directory to its end; returns its status, 128 + n for signal n."""
    parser = argparse.ArgumentParser(prog="python -m trainer.runner", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    try:
        run = _Run(args.run_dir.absolute(), resume=args.resume)
    except (RunnerError, ContractError, OSError) as error:
        sys.stderr.write(f"error: cannot start the run in {args.run_dir}: {error}\n")
        return int(TrainerExit.CONFIG)
    return run.to_the_end()


class _Run:
    """One start of the trainer, from the lock to exit.json."""

    def __init__(self, directory: Path, *, resume: bool) -> None:
        self._directory = directory
        self._resume = resume
        self._layout = RunLayout(PurePosixPath(directory), directory.name)
        self._manifest = Manifest.from_json(self._path("manifest").read_text(encoding="utf-8"))
        self._lock = self._take_lock()
        self._environment = self._read_environment()
        self._set_exit_aside()
        self._log_path = Path(self._manifest.log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._log_start = os.fstat(self._log).st_size
        self._reserved = self._reserve()
        self._child: subprocess.Popen[bytes] | None = None
        self._early_signal: int | None = None

    def to_the_end(self) -> int:
        started, oom_before = time.time(), _oom_kills()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        # Closing the terminal must not end the run; the trainer inherits this disposition.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            child = self._start(started)
        except OSError as error:
            os.write(self._log, f"error: cannot start the trainer: {error}\n".encode())
            self._finish(int(TrainerExit.FAILED), started, oom_kill=False)
            return int(TrainerExit.FAILED)
        done = threading.Event()
        mirror = threading.Thread(target=self._mirror, args=(done,), daemon=True)
        mirror.start()
        status = child.wait()
        _end_group(child.pid)
        done.set()
        self._finish(status, started, oom_kill=status == -9 and _oom_kills() > oom_before)
        mirror.join(timeout=_MIRROR_END_S)
        return status if status >= 0 else 128 - status

    def _path(self, name: str) -> Path:
        return Path(getattr(self._layout, name))

    def _take_lock(self) -> int:
        """Hold the run's lock; the trainer inherits it, so an orphaned trainer keeps it too."""
        lock = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise RunnerError("this run is already running; stop it first") from error
                time.sleep(0.1)
            else:
                return lock

    def _read_environment(self) -> dict[str, str]:
        path = self._path("environment")
        extra = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(extra, dict) or not all(isinstance(v, str) for v in extra.values()):
            raise RunnerError(f"{path.name} must map names to text")
        code = str(Path(__file__).resolve().parent.parent)
        environment = os.environ | extra
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{code}{os.pathsep}{inherited}" if inherited else code
        return environment

    def _set_exit_aside(self) -> None:
        """Keep the exit record of an earlier start as exit_N.json."""
        path = self._path("exit")
        if not path.exists():
            return
        if not self._resume:
            raise RunnerError(f"{path.name} exists: the run has ended; resume it with --resume")
        ended = _or_none(lambda: ExitRecord.from_json(path.read_text(encoding="utf-8")))
        whole = ended is not None and ends_at(self._path("checkpoints"), ended.last_step)
        if ended is not None and ended.state == "finished" and whole:
            raise RunnerError(
                f"it has finished, at step {ended.last_step}; pull or evaluate it, or launch a new"
                " run for more steps"
            )
        number = 1
        while (kept := path.with_name(f"exit_{number}.json")).exists():
            number += 1
        path.rename(kept)

    def _reserve(self) -> Path:
        path = self._path("exit").with_name("exit.json.reserved")
        with path.open("wb") as stream:
            stream.write(b" " * _RESERVED_BYTES)
            stream.flush()
            os.fsync(stream.fileno())
        return path

    def _start(self, started: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", "-m", "trainer", "train", "--run-dir"]
        command.append(str(self._directory))
        if self._resume:
            command.append("--resume")
            when = datetime.now(UTC).isoformat(timespec="seconds")
            os.write(self._log, f"--- resumed at {when} ---\n".encode())
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            start_new_session=True,
            pass_fds=(self._lock,),
        )
        self._child = child
        if self._early_signal is not None:
            child.send_signal(self._early_signal)
        record = ProcessRecord(
            run_id=self._manifest.run_id,
            runner_pid=os.getpid(),
            runner_start_ticks=start_ticks(os.getpid()),
            trainer_pid=child.pid,
            trainer_start_ticks=start_ticks(child.pid),
            pgid=child.pid,
            boot_id=boot_id(),
            started_unix_s=round(started, 3),
        )
        try:
            write_by_rename(self._path("process"), record.to_json().encode())
        except OSError:  # nobody could ever find this trainer: it must not go on
            _end_group(child.pid)
            child.wait()
            raise
        return child

    def _forward(self, number: int, _frame: object) -> None:
        # To the trainer alone, not to its group: compiler processes must live until it ends them.
        if self._child is None:
            self._early_signal = number
        else:
            self._child.send_signal(number)

    def _mirror(self, done: threading.Event) -> None:
        """Copy the growing log to our own standard output, for whoever attaches."""
        with self._log_path.open("rb") as stream:
            stream.seek(self._log_start)
            while True:
                last_round = done.is_set()
                while chunk := stream.read(1 << 16):
                    try:
                        sys.stdout.buffer.write(chunk)
                        sys.stdout.buffer.flush()
                    except OSError:
                        return  # nobody looks any more; the log itself goes on
                if last_round:
                    return
                done.wait(_MIRROR_PAUSE_S)

    def _finish(self, status: int, started: float, *, oom_kill: bool) -> None:
        rc, number = (status, None) if status >= 0 else (None, -status)
        state = classify(rc, number)
        checkpoint = _or_none(lambda: latest_complete(self._path("checkpoints"))[0])
        record = ExitRecord(
            run_id=self._manifest.run_id,
            state=state,
            rc=rc,
            signal=number,
            started_unix_s=round(started, 3),
            ended_unix_s=round(time.time(), 3),
            last_step=_or_none(lambda: _last_step(self._path("metrics"), started)),
            last_checkpoint=checkpoint.name if checkpoint else None,
            oom_kill=oom_kill,
            error=_or_none(self._error) if state in ("failed", "killed") else None,
        )
        data = record.to_json().encode()
        with self._reserved.open("r+b") as stream:
            stream.write(data)
            stream.truncate()
            stream.flush()
            os.fsync(stream.fileno())
        self._reserved.replace(self._path("exit"))
        sync(self._directory)

    def _error(self) -> str | None:
        """Return the last line of the log that names an error, else its last line."""
        size = self._log_path.stat().st_size
        with self._log_path.open("rb") as stream:
            stream.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = [line.strip() for line in stream.read().splitlines() if line.strip()]
        own = [line for line in lines if _OWN_ERROR.match(line)]
        named = [line for line in lines if _ANY_ERROR.match(line)]
        chosen = (own or named or lines)[-1:]
        return chosen[0][:2000].decode("utf-8", "replace") if chosen else None


def _or_none(learn: Callable[[], T | None]) -> T | None:
    """Return a fact, or None when it cannot be learnt: exit.json must be written all the same."""
    try:
        return learn()
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _end_group(pgid: int) -> None:
    """End what the trainer left behind in its process group, such as compiler processes."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_step(metrics: Path, since_unix_s: float) -> int | None:
    """Return the highest step that events of this start name, of whatever kind.

    Step events alone would not do: of log_every_steps one is told, while a checkpoint or the end
    may come at any step. A start that told none leaves what the start before it had reached.
    """
    if not metrics.exists():
        return None
    with metrics.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        data = stream.read()
    told = [
        (float(event["t_unix_s"]), int(event["step"]))
        for event in EventDecoder(lenient=True).feed(data)
        if event.get("step")
    ]
    now = [step for t_unix_s, step in told if t_unix_s >= since_unix_s]
    return max(now) if now else told[-1][1] if told else None


def _oom_kills() -> int:
    """Return how many processes of our memory cgroup the kernel has killed for memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    candidates: list[Path] = []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            candidates += [root / below / "memory.oom_control", root / "memory.oom_control"]
        elif not controllers:
            root = Path("/sys/fs/cgroup")
            candidates += [root / below / "memory.events", root / "memory.events"]
    for candidate in candidates:
        try:
            pairs = [line.split() for line in candidate.read_text(encoding="utf-8").splitlines()]
        except OSError:
            continue
        counts = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
