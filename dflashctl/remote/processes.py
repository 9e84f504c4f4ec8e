"""The processes of this machine, read from /proc: who they are, and which runs they belong to.

A part of programs sent to a node or container (see ``dflashctl.remote``), which import it.
"""

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

CONTAINER = re.compile(r"/lxc/([0-9]+)")
PROC = Path("/proc")
FIRST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel: the namespace of the machine
ENDED = ("", "Z", "X")  # states of a process that is gone, or waits for its parent alone

Json = dict[str, Any]


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def uptime_s() -> float:
    """Return the seconds since boot, which no change of the clock moves."""
    return float((PROC / "uptime").read_text().split()[0])


def stat_of(pid: int | str) -> tuple[str, int]:
    """Return state and start ticks of a process; ("", 0) when it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started, in ticks since boot; None when it has ended."""
    state, ticks = stat_of(pid)
    return None if state in ENDED else ticks


def words_of(pid: int | str) -> list[str]:
    """Return the command line of a process; empty when it is gone."""
    try:
        data = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return data.decode("utf-8", "replace").rstrip("\0").split("\0")


def container_of(pid: int | str) -> int | None:
    """Return the vmid of the container that a process belongs to, by its cgroup."""
    try:
        found = CONTAINER.findall((PROC / str(pid) / "cgroup").read_text())
    except OSError:
        return None
    return int(found[-1]) if found else None


def describe(pid: int) -> Json | None:
    """Return who a process is; None when it is gone."""
    state, ticks = stat_of(pid)
    if not state:
        return None
    inside: int | None = None
    with suppress(OSError, ValueError):
        status = (PROC / str(pid) / "status").read_text(errors="replace")
        numbers = re.findall(r"^NSpid:\s+(.+)$", status, re.MULTILINE)
        inside = int(numbers[0].split()[-1]) if numbers else None
    with suppress(OSError):
        name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    user: str | None = None
    with suppress(OSError, KeyError):
        user = pwd.getpwuid((PROC / str(pid)).stat().st_uid).pw_name
    return {
        "pid": pid,
        "inside_pid": None if inside == pid else inside,
        "state": state,
        "user": user,
        "age_s": max(0, int(uptime_s() - ticks / os.sysconf("SC_CLK_TCK"))),
        "vmid": container_of(pid),
        "command": " ".join(words_of(pid))[:2000] or name,
    }


def processes() -> Iterator[int]:
    """Return the pids of this machine."""
    return (int(path.name) for path in PROC.iterdir() if path.name.isdigit())


def runs_alive() -> dict[tuple[int | None, str], list[int]]:
    """Return the processes by the container and run directory on their command line."""
    found: dict[tuple[int | None, str], list[int]] = {}
    for pid in processes():
        words = words_of(pid)
        if "--run-dir" in words[:-1] and start_ticks(pid) is not None:
            run_dir = words[words.index("--run-dir") + 1]
            found.setdefault((container_of(pid), run_dir), []).append(pid)
    return found


def trainer_among(pids: list[int]) -> int:
    """Return the trainer of a run's processes, else its runner, else the first."""
    for module in ("trainer", "trainer.runner"):
        for pid in pids:
            words = words_of(pid)
            if "-m" in words[:-1] and words[words.index("-m") + 1] == module:
                return pid
    return pids[0]


def is_confined() -> bool:
    """Say whether this is a container, whose locks neither its node nor its neighbours see."""
    return str((PROC / "self/ns/pid").readlink()) != FIRST_PIDS
