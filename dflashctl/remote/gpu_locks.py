"""The locks that launches take on the GPUs of a machine; a part of ``gpus.py``.

A lock is a directory DIRECTORY/GPU-UUID, made by mkdir, with holder.json. Its run lives while a
process of this machine has ``--run-dir RUN_DIR`` on its command line in the same container, so a
recycled pid is never taken for it. A lock is stale only by proof: another boot, a pid that is gone
(by start ticks), or a launch that neither renewed nor started within its lease.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflashctl.remote.file_locks import take_within
from dflashctl.remote.json_files import write_json
from dflashctl.remote.processes import (
    boot_id,
    container_of,
    runs_alive,
    stat_of,
    trainer_among,
    uptime_s,
    words_of,
)

GUARD_S = 20.0

Json = dict[str, Any]


def lock_directory(named: str | None, *, make: bool) -> Path:
    """Return the directory of the locks, sticky, as every login locks; ``make`` it if needed.

    It is root's where root has ever been here. It lies in memory: a restart leaves no lock.
    """
    if named is not None:
        directory = Path(named)
    else:
        bases = [Path(base) for base in ("/run/lock", "/var/lock", "/tmp")]  # noqa: S108
        directory = next(base for base in bases if base.is_dir()) / "dflashctl"
    if make:
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(0o1777)
    if directory.is_symlink() or (make and not directory.is_dir()):
        raise OSError(f"{directory} is no directory")
    if make and os.geteuid() == 0 and directory.stat().st_uid != 0:
        os.chown(directory, 0, 0)
    return directory


def open_guard(path: Path) -> int:
    """Return the guard's descriptor; made for every login when it is not there.

    Not by O_CREAT alone: the kernel refuses that for another login's file in a sticky directory.
    """
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR)
        with suppress(FileExistsError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(handle, 0o666)  # whatever the umask
            return handle


class Locks:
    """The locks of this machine; every change is made while the guard is held."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.boot, self.now = boot_id(), uptime_s()
        self.alive = runs_alive() if self.holders() else {}
        self.mine = container_of("self")
        self.blind = not words_of(1)  # hidepid: this login does not see the others' processes

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Hold the guard; raises TimeoutError. Where nobody ever locked there is none."""
        if not self.directory.is_dir():
            yield
            return
        handle = open_guard(self.directory / ".guard")
        try:
            if not take_within(handle, GUARD_S):
                raise TimeoutError(f"{self.directory}/.guard is held")
            self.now, self.alive = uptime_s(), runs_alive()
            yield
        finally:
            os.close(handle)

    def holders(self) -> list[Json]:
        """Return what each lock says; one without a holder was left half made by a kill."""
        found = []
        for path in sorted(self.directory.glob("[A-Z]*-*")):
            holder: Any = None
            try:
                holder = json.loads((path / "holder.json").read_text())
            except PermissionError:
                holder = {"token": "?", "unreadable": True}
            except (OSError, ValueError):
                holder = None
            found.append((holder if isinstance(holder, dict) else {}) | {"uuid": path.name})
        return found

    def listed(self) -> list[Json]:
        """Judge every lock as it is now; a run may have begun or ended since the last look."""
        holders = self.holders()  # first: whoever is bound in one of them was alive then
        self.now, self.alive = uptime_s(), runs_alive() if holders else {}
        return [self.judged(holder) for holder in holders]

    def processes_of(self, holder: Json) -> list[int]:
        """Return the processes of the run that holds a lock."""
        vmid, wanted = holder.get("vmid"), str(holder.get("run_dir"))
        place = self.mine if vmid is None else vmid
        found = []
        for (where, run_dir), pids in self.alive.items():
            below = wanted.endswith("/") and run_dir.startswith(wanted)  # warmup/KEY and the like
            if where == place and (run_dir == wanted or below):
                found += pids
        return found

    def judged(self, holder: Json) -> Json:
        """Return the lock with ``state`` live, starting or stale, and ``why``."""
        pids = self.processes_of(holder)
        pid = holder.get("pid")
        if holder.get("unreadable"):
            state, why = "live", "this login may not read who holds it"
        elif not holder.get("token"):
            state, why = "stale", "it was left half made"
        elif holder.get("boot_id") != self.boot:
            state, why = "stale", "the machine was restarted since"
        elif pids:
            pid = pid if pid in pids else trainer_among(pids)
            state, why = "live", f"its process {pid} lives"
        elif pid is not None and self.blind:
            state, why = "live", "this login cannot see whether its process lives (hidepid)"
        elif pid is not None:
            state, why = "stale", f"its process {pid} has ended"
        elif self.now < holder["lease_until_s"]:
            left = holder["lease_until_s"] - self.now
            state, why = "starting", f"its launch is under way (lease: {left:.0f} s more)"
        else:
            state, why = "stale", "its launch ended without a start (lease over, no process)"
        return holder | {"state": state, "why": why, "pid": pid}

    def drop(self, uuid: str) -> None:
        """Remove a lock."""
        path = self.directory / uuid
        for file in path.iterdir():
            file.unlink()
        path.rmdir()

    def put(self, uuid: str, holder: Json) -> None:
        """Write a lock's holder; mkdir is what takes it."""
        path = self.directory / uuid
        path.mkdir(exist_ok=(path / "holder.json").exists())
        path.chmod(0o755)
        write_json(path / "holder.json", holder)

    def claim(self, uuids: list[str], wish: Json) -> Json:
        """Take all of the locks or none; returns the conflicts, and the stale ones taken over."""
        known = {holder["uuid"]: self.judged(holder) for holder in self.holders()}
        held = [known[uuid] for uuid in uuids if uuid in known]
        other = [holder for holder in held if holder.get("token") != wish["token"]]
        conflicts = [holder for holder in other if holder["state"] != "stale"]
        if conflicts:
            return {"conflicts": conflicts, "taken_over": []}
        taken_over = [h for h in held if h["state"] == "stale"]
        lease = {"lease_until_s": self.now + wish["lease_s"], "boot_id": self.boot, "pid": None}
        values = {key: value for key, value in wish.items() if key != "lease_s"}
        made = values | lease | {"created_unix_s": time.time()}
        for holder in taken_over:
            self.drop(holder["uuid"])
        for uuid in uuids:
            self.put(uuid, made)
        return {"conflicts": [], "taken_over": taken_over}

    def bind(self, token: str) -> int | None:
        """Write the run's process into its locks; None when there is no process."""
        bound: int | None = None
        for holder in self.holders():
            pids = self.processes_of(holder) if holder.get("token") == token else []
            if pids:
                bound = trainer_among(pids)
                ticks = stat_of(bound)[1]
                self.put(holder.pop("uuid"), holder | {"pid": bound, "start_ticks": ticks})
        return bound

    def release(self, run: Json) -> Json:
        """Let go of a run's locks, by its token or its place, unless a process of it lives.

        Without the token a launch that is under way keeps its locks: it may be a resume.
        """
        released, kept = [], []
        for holder in self.holders():
            judged = self.judged(holder)
            mine = run.get("token") is not None and holder.get("token") == run["token"]
            place = (holder.get("vmid"), holder.get("run_dir"))
            if not mine and place != (run["vmid"], run["run_dir"]):
                continue
            if judged["state"] == "live" or (judged["state"] == "starting" and not mine):
                kept.append(judged)
            else:
                self.drop(judged["uuid"])
                released.append(judged)
        return {"released": released, "kept": kept}

    def clear(self, select: str, *, force: bool) -> Json:
        """Remove the locks of a tag or a GPU; a live one only by force."""
        judged = [self.judged(holder) for holder in self.holders()]
        found = [h for h in judged if h.get("tag") == select or h["uuid"].startswith(select)]
        held = [holder for holder in found if holder["state"] != "stale"]
        if held and not force:
            return {"cleared": [], "refused": held}
        for holder in found:
            self.drop(holder["uuid"])
        return {"cleared": found, "refused": []}
