"""Collects what `dflashctl doctor` judges about a container; changes nothing.

argv[1]: {"workspace", "log_dir", "python", "requirements_digest", "gpus": bool, "target": path or
null, "limit_s"}. It is started as a launch is, so its limits are those of the trainer. Prints one
JSON object; what could not be learnt is null, or {"error": text}.
"""

import json
import locale
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.interpreter import chosen_python

PYTHON = """
import importlib.util, json, platform
found = {"version": platform.python_version()}
import torch
found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
found["fla"] = importlib.util.find_spec("fla") is not None
print(json.dumps(found))
"""
# cuInit is asked in a process of its own: on a broken driver it can hang or abort.
CUDA = """
import ctypes, json, os
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": str(error)}))
else:
    count = ctypes.c_int(-1)
    rc = library.cuInit(0)
    if rc == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    maps = [line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line]
    print(json.dumps({"rc": rc, "count": count.value, "file": os.path.realpath(maps[0])}))
"""
SHM = "/dev/shm"  # noqa: S108 - looked at, not written
LINEAR = ("linear_attention", "mamba", "recurrent")

Json = dict[str, Any]


def child(python: str, text: str, limit_s: float) -> Json:
    """Run a piece of Python as a process and return the object it prints, or its error."""
    argv = [python, "-c", text]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return {"error": f"{python} does not run: {error.strerror}"}
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # no wait: a process stuck in the driver cannot be killed
        return {"error": f"no answer within {limit_s:g} s"}
    try:
        return dict(json.loads(out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        last = err.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return {"error": last[0][:500]}


def disk(path: Path) -> Json:
    """Return bytes and inodes where ``path`` lies or would lie, and whose that is."""
    there = path
    while not os.path.exists(there):  # noqa: PTH110 - Path.exists raises where it may not look
        there = there.parent
    room, facts = os.statvfs(there), there.stat()
    return {
        "exists": path.is_dir(),
        "at": str(there),
        "free_bytes": room.f_bavail * room.f_frsize,
        "inodes": room.f_files,  # 0: the file system counts none
        "free_inodes": room.f_favail,
        "writable": os.access(there, os.W_OK | os.X_OK),
        "uid": facts.st_uid,
    }


def mount_of(path: str) -> str | None:
    """Return the line of /proc/mounts for a mount point."""
    lines = Path("/proc/mounts").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.split()[1:2] == [path]), None)


def text_of(path: str) -> str | None:
    """Return a small file's text, None when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")[:4000]
    except OSError:
        return None


def devices() -> list[Json]:
    """Return the nvidia device nodes with their numbers, and whether they can be opened."""
    found = []
    for path in sorted(Path("/dev").glob("nvidia*")):
        if path.is_char_device():
            number = path.stat().st_rdev
            usable = os.access(path, os.R_OK | os.W_OK)
            one = {"name": path.name, "major": os.major(number), "minor": os.minor(number)}
            found.append(one | {"usable": usable})
    return found


def hybrid(target: str | None) -> bool | None:
    """Say whether the target has layers that are no attention; None when it cannot be told."""
    if target is None:
        return None
    try:
        config = json.loads((Path(target) / "config.json").read_text())
        kinds = (config.get("text_config") or config).get("layer_types") or []
    except (OSError, ValueError, AttributeError):
        return None
    return any(word in str(kind) for kind in kinds for word in LINEAR)


def locale_problem() -> str | None:
    """Return why the locale of the environment cannot be used."""
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error as error:
        return f"{error}: LC_ALL={os.environ.get('LC_ALL', '')} LANG={os.environ.get('LANG', '')}"
    return None


def main(arguments: Json) -> Json:
    """Collect everything."""
    python, limit_s = chosen_python(arguments), arguments["limit_s"]
    shm = os.statvfs(SHM) if Path(SHM).is_dir() else None
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    answer = {
        "tmux": shutil.which("tmux"),
        "apt": shutil.which("apt-get"),
        "python": python,
        "packages": child(python, PYTHON, limit_s),
        "hybrid": hybrid(arguments["target"]),
        "shm_bytes": shm and shm.f_blocks * shm.f_frsize,
        "shm_mount": mount_of(SHM),
        "memlock_bytes": None if limits[0] == resource.RLIM_INFINITY else limits[0],
        "workspace": disk(Path(arguments["workspace"])),
        "log_dir": arguments["log_dir"] and disk(Path(arguments["log_dir"])),
        "uid": os.getuid(),
        "uid_map": text_of("/proc/self/uid_map"),
        "locale": locale_problem(),
        "cgroup": text_of("/proc/self/cgroup"),
        "logind": text_of("/etc/systemd/logind.conf"),
    }
    if arguments["gpus"]:
        answer["cuda"] = child(sys.executable, CUDA, limit_s)
        answer["devices"] = devices()
        answer["driver"] = text_of("/proc/driver/nvidia/version")
    answer["clock_unix_s"] = time.time()  # last: the laptop compares it with the end of its wait
    return answer


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
