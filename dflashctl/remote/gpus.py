"""Asks the driver of a machine about its GPUs, and keeps the locks that launches take on them.

argv[1]: {"action": look, claim, bind, release, list or clear, "wanted", "claim", "run", "select",
"force", "inside": {vmid: argv}, "directory", "limit_s"}; each action says what it reads. Prints one
JSON object. Runs on the node, which sees every process, else in the container. It asks for the few
fields that are needed: some drivers hang on wider queries. A driver that hangs is left after 10 s,
and no second question is put to it while the first is stuck.

A lock is a directory DIRECTORY/GPU-UUID, made by mkdir, with holder.json. Its run lives while a
process of this machine has ``--run-dir RUN_DIR`` on its command line in the same container, so a
recycled pid is never taken for it. A lock is stale only by proof: another boot, a pid that is gone
(by start ticks), or a launch that neither renewed nor started within its lease.
"""

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FIELDS = (
    "index,uuid,name,memory.used,memory.total,utilization.gpu,"
    "ecc.errors.uncorrected.volatile.total,pci.bus_id"
)
APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
SMI_S, KILL_S, INSIDE_S, GUARD_S = 10.0, 2.0, 30.0, 20.0
HELD_MIB = 300  # what a driver reserves on an empty card stays below
MAX_TEXT = 4000
CONTAINER = re.compile(r"/lxc/([0-9]+)")
PROC = Path("/proc")
FIRST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel: the namespace of the machine

Json = dict[str, Any]


class RefusedError(Exception):
    """A rule forbids it; nothing was changed."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.fields = {"kind": "refused", "code": code, "message": message, "hint": hint}


# ---- processes


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
        if "--run-dir" in words[:-1] and stat_of(pid)[0] not in ("", "Z", "X"):
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


# ---- the driver


class Driver:
    """nvidia-smi under a time limit; remembers one that is stuck for those who come later."""

    def __init__(self, directory: Path, limit_s: float = SMI_S) -> None:
        self.note = directory / ".stuck.json"
        self.limit_s = limit_s
        self.stuck: Json | None = None
        with suppress(OSError, ValueError):
            note = json.loads(self.note.read_text())
            state, ticks = stat_of(note["pid"])
            if state not in ("", "Z", "X") and (ticks, boot_id()) == (note["ticks"], note["boot"]):
                self.stuck = describe(note["pid"])

    def ask(self, *words: str) -> tuple[int | None, str]:
        """Return the exit status and the words of nvidia-smi; status None: no answer."""
        if self.stuck is not None:
            return None, ""
        argv = ["nvidia-smi", *words, "--format=csv,noheader,nounits"]
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            data, _ = child.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            self.leave(child)
            return None, ""
        return child.returncode, data.decode("utf-8", "replace")

    def leave(self, child: "subprocess.Popen[bytes]") -> None:
        """Kill nvidia-smi; in state D it stays, and is noted."""
        for number, seconds in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, 1.0)):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
                break
        self.stuck = describe(child.pid) or {"pid": child.pid, "state": "gone", "age_s": 0}
        if child.poll() is None:
            note = {"pid": child.pid, "ticks": stat_of(child.pid)[1], "boot": boot_id()}
            with suppress(OSError):
                write(self.note, note)

    def rows(self) -> Json:
        """Return the rows of all cards; where one spoils the answer, card by card."""
        rc, text = self.ask(f"--query-gpu={FIELDS}")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        rows = [line for line in lines if re.match(r"\d+\s*,", line)]
        problem = " ".join(line for line in lines if line not in rows)
        failed: dict[str, str] = {}
        if rc and not rows and "GPU" in problem:
            for index in device_numbers():
                rc_one, one = self.ask(f"--query-gpu={FIELDS}", "-i", index)
                if rc_one == 0:
                    rows += [line.strip() for line in one.splitlines() if line.strip()]
                elif rc_one is not None:
                    failed[index] = " ".join(one.split())[:MAX_TEXT]
        return {"rows": rows, "rc": rc, "problem": problem[:MAX_TEXT], "failed": failed}

    def apps(self, rows: Json) -> Json:
        """Return the processes that the driver lists on the cards that answer."""
        healthy = [row.split(",")[0] for row in rows["rows"]]
        only = ["-i", ",".join(healthy)] if rows["failed"] else []
        rc, text = self.ask(f"--query-compute-apps={APP_FIELDS}", *only)
        return {"apps": [line.strip() for line in text.splitlines() if line.strip()], "rc": rc}


def device_numbers() -> list[str]:
    """Return the numbers of the device nodes /dev/nvidiaN."""
    found = [path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((n for n in found if n.isdigit()), key=int)


def cards() -> list[Json]:
    """Return what the kernel module knows of its cards, lost ones as well."""
    found = []
    for path in sorted(PROC.glob("driver/nvidia/gpus/*/information")):
        with suppress(OSError):
            text = path.read_text(errors="replace")
            pairs = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            values = {key.strip(): value.strip() for key, value in pairs.items()}
            found.append(
                {
                    "bus_id": path.parent.name,
                    "uuid": values.get("GPU UUID", ""),
                    "name": values.get("Model", ""),
                    "minor": values.get("Device Minor", ""),
                }
            )
    return found


def open_devices() -> Json:
    """Return who has a device node open, by its number, and every process in state D."""
    devices: dict[str, list[Json]] = {}
    waiting = []
    for pid in processes():
        if stat_of(pid)[0] == "D":
            waiting.append(describe(pid))
        numbers = set()
        with suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    found = re.fullmatch(r"/dev/nvidia(\d+)", str(link.readlink()))
                    if found:
                        numbers.add(found[1])
        for number in numbers:
            who = describe(pid)
            if who is not None:
                devices.setdefault(number, []).append(who)
    return {"devices": devices, "waiting": [who for who in waiting if who is not None][:20]}


def held_by_nobody(rows: list[str], apps: list[str]) -> bool:
    """Say whether a card holds memory and no process is listed on it."""
    listed = {line.split(",")[0].strip() for line in apps}
    for row in rows:
        words = [word.strip() for word in row.split(",")]
        if len(words) >= 8 and words[1] not in listed:
            used = words[-5]
            if used.isdigit() and int(used) >= HELD_MIB:
                return True
    return False


def look(driver: Driver, inside: dict[str, list[str]]) -> Json:
    """Ask everything there is to know; ``inside`` are commands for the view from containers."""
    views = {vmid: begin(argv) for vmid, argv in inside.items()}
    answer: Json = {"installed": shutil.which("nvidia-smi") is not None, "stuck": None}
    if answer["installed"]:
        answer["gpus"] = driver.rows()
        answer["apps"] = {"apps": [], "rc": None}
        if answer["gpus"]["rc"] is not None:
            answer["apps"] = driver.apps(answer["gpus"])
        pids = {int(found[1]) for line in answer["apps"]["apps"] if (found := APP.match(line))}
        listed = [describe(pid) for pid in sorted(pids)[:200]]
        answer["processes"] = [who for who in listed if who is not None]
        if held_by_nobody(answer["gpus"]["rows"], answer["apps"]["apps"]):
            answer |= open_devices()
        answer["cards"] = cards()
        answer["stuck"] = driver.stuck
    answer["inside"] = {vmid: finish(child) for vmid, child in views.items()}
    return answer


APP = re.compile(r"[^,]*,\s*(\d+)\s*,")


def begin(argv: list[str]) -> "subprocess.Popen[bytes] | None":
    """Start a command of a container's view; None when there is no such program."""
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError:
        return None


def finish(child: "subprocess.Popen[bytes] | None") -> Json:
    """Return how a container's view came out."""
    if child is None:
        return {"rc": 127, "text": "it cannot be run"}
    try:
        data, _ = child.communicate(timeout=INSIDE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # pct waits in the container for what hangs there; nothing waits for pct
        return {"rc": None, "text": ""}
    return {"rc": child.returncode, "text": data.decode("utf-8", "replace")[:MAX_TEXT]}


# ---- locks


def write(path: Path, value: Json) -> None:
    """Replace a JSON file in one step."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.chmod(0o644)
    temporary.replace(path)


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
        limit = time.monotonic() + GUARD_S
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > limit:
                        raise TimeoutError(f"{self.directory}/.guard is held") from None
                    time.sleep(0.02)
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
        write(path / "holder.json", holder)

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


# ---- actions


def uuids_of(wanted: list[str], rows: Json) -> list[str] | None:
    """Return the UUIDs of indexes and UUIDs, each once, sorted; None when one is not there."""
    by_index = {}
    for row in rows["rows"]:
        words = [word.strip() for word in row.split(",")]
        by_index[words[0]] = words[1]
    there = set(by_index.values())
    uuids = {by_index.get(one, one) for one in wanted}
    return sorted(uuids) if uuids <= there else None


def claim(locks: Locks, driver: Driver, arguments: Json) -> Json:
    """Lock the ``wanted`` GPUs, all or none, and look at the cards inside the locks.

    A machine without nvidia-smi locks UUIDs unseen; its container is asked about them.
    """
    wanted = arguments["wanted"]
    named = all(one.startswith(("GPU-", "MIG-")) for one in wanted)
    uuids: list[str] | None = sorted(set(wanted)) if named else None
    if shutil.which("nvidia-smi"):
        uuids = uuids_of(wanted, driver.rows())
    if uuids is None:  # the look says which is not there
        return {"claim": None} | look(driver, arguments.get("inside", {}))
    with locks.guarded():
        taken = locks.claim(uuids, arguments["claim"])
    seen = {"uuids": uuids, "confined": is_confined()}
    return {"claim": taken | seen} | look(driver, arguments.get("inside", {}))


def main(arguments: Json) -> Json:
    """Do what is asked."""
    action = arguments["action"]
    locks = Locks(lock_directory(arguments.get("directory"), make=action == "claim"))
    driver = Driver(locks.directory, arguments.get("limit_s", SMI_S))
    answer: Json = {}
    if action == "claim":
        answer = claim(locks, driver, arguments)
    elif action == "bind":
        with locks.guarded():
            answer = {"pid": locks.bind(arguments["run"]["token"])}
    elif action == "release":
        with locks.guarded():
            answer = locks.release(arguments["run"])
    elif action == "clear":
        with locks.guarded():
            answer = locks.clear(arguments["select"], force=arguments["force"])
    if action == "look" or arguments.get("look"):
        answer |= look(driver, arguments.get("inside", {}))
    return answer | {"locks": [locks.judged(holder) for holder in locks.holders()]}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except OSError as problem:
        hint = "as root on that machine: install -d -m 1777 /run/lock/dflashctl"
        text = f"the locks of the GPUs cannot be kept: {problem}"
        error = {"kind": "failed", "code": "locks", "message": text, "hint": hint}
        print(json.dumps({"error": error}))
        sys.exit(1)
