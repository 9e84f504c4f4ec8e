"""Collects what `dflashctl doctor` judges about a node; changes nothing.

argv[1]: {"vmids": [..], "become": bool, "limit_s": seconds for each command}. Prints one JSON
object of texts as the system wrote them; what could not be read is null.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PCT = "/usr/sbin/pct"
KEPT_KEYS = ("lock", "unprivileged", "lxc.", "dev")  # a configuration may hold words not for us
MAX_TEXT = 8000

Json = dict[str, Any]


def command(argv: list[str], limit_s: float) -> Json | None:
    """Run a command; None when there is no such program. One that hangs is left to itself."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return {"rc": 127, "out": "", "err": str(error)}
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # no wait: a process stuck in the driver cannot be killed
        return {"rc": None, "out": "", "err": f"no answer within {limit_s:g} s"}
    return {"rc": process.returncode, "out": out[-MAX_TEXT:], "err": err[-MAX_TEXT:]}


def text_of(path: str) -> str | None:
    """Return a small file's text, None when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")[:MAX_TEXT]
    except OSError:
        return None


def configurations(root: Path) -> list[Json] | None:
    """Return what the containers' configurations say of devices and locks; None: may not read."""
    found = []
    try:
        for path in sorted(root.glob("nodes/*/lxc/*.conf")):
            text = path.read_text(errors="replace").split("\n[", 1)[0]  # without snapshots
            lines = [line for line in text.splitlines() if line.startswith(KEPT_KEYS)]
            name = path.parents[1].name
            found.append({"node": name, "vmid": path.stem, "lines": lines})
    except OSError:
        return None
    return found or None


def kernel_log(limit_s: float) -> list[str] | None:
    """Return the last Xid lines of this boot; None when the log may not be read."""
    for argv in (["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-q", "-g", "NVRM: Xid"]):
        said = command(argv, limit_s)
        if said is not None and (said["rc"] == 0 or (said["rc"] == 1 and not said["err"])):
            return [line for line in said["out"].splitlines() if "NVRM: Xid" in line][-20:]
    return None


def cluster(limit_s: float) -> list[Json] | None:
    """Return vmid and node of every container of the cluster; None when it cannot be asked."""
    argv = ["pvesh", "get", "/cluster/resources", "--type", "vm", "--output-format", "json"]
    said = command(argv, limit_s)
    try:
        rows = json.loads(said["out"]) if said and said["rc"] == 0 else None
        return rows and [{"vmid": str(row["vmid"]), "node": row["node"]} for row in rows]
    except (ValueError, KeyError, TypeError):
        return None


def main(arguments: Json) -> Json:
    """Collect everything."""
    limit_s = arguments["limit_s"]
    sudo = ["sudo", "-n"] if arguments["become"] else []
    name = socket.gethostname().partition(".")[0]
    found = configurations(Path("/etc/pve"))
    here = [one["vmid"] for one in found or [] if one["node"] == name]
    elsewhere = [vmid for vmid in map(str, arguments["vmids"]) if vmid not in here]
    smi = ["nvidia-smi", "--query-gpu=index,persistence_mode", "--format=csv,noheader"]
    version = text_of("/proc/driver/nvidia/version")
    pct = PCT if os.access(PCT, os.X_OK) else shutil.which("pct")
    return {
        "hostname": name,
        "user": os.environ.get("USER") or str(os.getuid()),
        "pct": pct,
        "list": command([*sudo, pct or PCT, "list"], limit_s) if arguments["vmids"] else None,
        "configurations": found,
        "cluster": cluster(limit_s) if elsewhere else None,
        "driver": version,
        "devices": text_of("/proc/devices"),
        "nodes": sorted(p.name for p in Path("/dev").glob("nvidia*")),
        "persistence": command(smi, limit_s),
        "xid": kernel_log(limit_s),
        "uptime_s": float(re.split(r"\s", Path("/proc/uptime").read_text())[0]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
