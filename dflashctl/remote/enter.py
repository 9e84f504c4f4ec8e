"""Becomes one command of the trainer in a run directory: ``python -m trainer ARGV``.

argv[1]: {"run_dir", "argv", "stage": bool, "lock": path or null}. With ``stage`` stdin holds one
JSON object {"manifest": text, "environment": {...}} that is put into run_dir once ``lock`` is
held, as it is for as long as the command lives. The command's output and exit status are its own.
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from dflashctl.remote.file_locks import take_within

REFUSED = 75  # EX_TEMPFAIL: the lock is held
NO_RUN = 66  # EX_NOINPUT: there is no manifest.json
LOCK_WAIT_S = 3.0  # who only looks, or was given up and ends, lets go in a moment


def write_by_rename(path: Path, text: str, mode: int) -> None:
    """Write a file whole, with its mode from the start."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def hold(path: Path) -> bool:
    """Take a lock that lasts through exec; False when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if not take_within(handle, LOCK_WAIT_S):
        return False
    os.set_inheritable(handle, True)  # noqa: FBT003 - the signature of the standard library
    return True


def main(arguments: dict[str, Any]) -> int:
    """Lock, stage, and become the command; returns only when it cannot."""
    run_dir = Path(arguments["run_dir"])
    if arguments["lock"] and not hold(Path(arguments["lock"])):
        print(f"another command holds {arguments['lock']}", file=sys.stderr)
        return REFUSED
    if arguments["stage"]:
        sent = json.loads(sys.stdin.read())
        run_dir.mkdir(parents=True, exist_ok=True)
        write_by_rename(run_dir / "environment.json", json.dumps(sent["environment"]), 0o600)
        write_by_rename(run_dir / "manifest.json", sent["manifest"], 0o644)
    if not (run_dir / "manifest.json").exists():
        print(f"there is no run directory {run_dir}", file=sys.stderr)
        return NO_RUN
    return become(run_dir, arguments["argv"])


def become(run_dir: Path, command: list[str]) -> NoReturn:
    """Replace this process by the trainer's command, with the run's code and environment."""
    manifest = json.loads((run_dir / "manifest.json").read_text())
    extra = json.loads((run_dir / "environment.json").read_text())
    release = Path(manifest["workspace"]) / "releases" / manifest["release"]
    environment = os.environ | extra | {"PYTHONPATH": str(release)}
    os.chdir(run_dir)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    argv = [manifest["python"], "-u", "-m", "trainer", *command]
    os.execve(argv[0], argv, environment)  # noqa: S606 - an argv list, no shell


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except OSError as problem:
        room = "; make room: dflashctl runs gc --keep 1" if problem.errno == errno.ENOSPC else ""
        print(f"cannot enter the run: {problem}{room}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, KeyError, TypeError) as problem:
        print(f"cannot enter the run: {problem!r}", file=sys.stderr)
        sys.exit(1)
