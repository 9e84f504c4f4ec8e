"""What the driver of a machine says of its GPUs, through nvidia-smi, /proc and /dev.

A part of ``gpus.py``. It asks for the few fields that are needed: some drivers hang on wider
queries. A driver that hangs is left after 10 s, and no second question is put to it while the first
is stuck.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflashctl.remote.json_files import write_json
from dflashctl.remote.processes import PROC, boot_id, describe, processes, start_ticks, stat_of

FIELDS = (
    "index,uuid,name,memory.used,memory.total,utilization.gpu,"
    "ecc.errors.uncorrected.volatile.total,pci.bus_id"
)
APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
APP = re.compile(r"[^,]*,\s*(\d+)\s*,")
SMI_S, KILL_S, INSIDE_S = 10.0, 2.0, 30.0
HELD_MIB = 300  # what a driver reserves on an empty card stays below
MAX_TEXT = 4000

Json = dict[str, Any]


class Driver:
    """nvidia-smi under a time limit; remembers one that is stuck for those who come later."""

    def __init__(self, directory: Path, limit_s: float = SMI_S) -> None:
        self.note = directory / ".stuck.json"
        self.limit_s = limit_s
        self.stuck: Json | None = None
        with suppress(OSError, ValueError):
            note = json.loads(self.note.read_text())
            if (start_ticks(note["pid"]), boot_id()) == (note["ticks"], note["boot"]):
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
                write_json(self.note, note)

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
