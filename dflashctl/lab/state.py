"""A lab's state directory: what it holds, who is alive, and how to run something inside.

DIR/lab.json      the site, its ports, the name of its cgroups
DIR/pids.json     the supervisor, "lan", and by its name each host's pid 1: [PID, START TIME]
DIR/lab.log       what the supervisor and the hosts said
DIR/key, known_hosts, ssh_config, ssh_config.lan
DIR/HOST/shared/  seen inside as /var/lib/pve-lab/shared: faults.json, gpu.json, pct_calls.log, ...
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflashctl.errors import LabError
from dflashctl.lab.spec import SiteSpec, dump_site, parse_site

SUPERVISOR = "dflashctl.lab.supervisor"
# The longest path of a unix socket is 107 bytes; the rest is for the name of one in the directory,
# such as an ssh agent's or OpenSSH's control socket.
MAX_STATE_BYTES = 90
_SSHD_S = 30.0
_INSIDE = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"]


class SiteState:
    """What a state directory says about its site; reads files anew on every question."""

    def __init__(self, state: Path) -> None:
        self.state = state
        data = read_json(state / "lab.json")
        if not data:
            raise LabError(f"there is no lab in {state}", hint=f"dflashctl lab up --state {state}")
        self.spec = parse_site(data["site"], f"{state}/lab.json")
        self.cgroup: str = data["cgroup"]
        self.ports: dict[str, int] = data["ports"]

    @staticmethod
    def record(state: Path, spec: SiteSpec, ports: Mapping[str, int], cgroup: str) -> None:
        """Write lab.json."""
        write_json(
            state / "lab.json", {"site": dump_site(spec), "ports": dict(ports), "cgroup": cgroup}
        )

    def shared(self, host: str) -> Path:
        """The directory that a host and its containers see as well."""
        return self.state / host / "shared"

    def pid_of(self, name: str) -> int:
        """The process that holds a host's namespaces ("lan": the LAN's).

        Raises: LabError when that host does not run.
        """
        pids = live_pids(self.state)
        if name not in pids:
            known = ", ".join(self.spec.hosts)
            what = f"no host {name}; known are {known}" if pids else "the lab is down"
            raise LabError(
                f"{what} (state {self.state})", hint=f"dflashctl lab status --state {self.state}"
            )
        return pids[name]

    def check_container(self, host: str, vmid: int) -> None:
        """Raises: LabError when the site has no such host or container."""
        self.pid_of(host)
        known = self.spec.hosts[host].containers
        if vmid not in known:
            names = ", ".join(map(str, known)) or "none"
            raise LabError(f"no container {vmid}; known are {names}", place=host)

    def is_running(self, host: str, vmid: int) -> bool:
        """Whether a container runs, by LXC's command socket, as pct decides it."""
        name = f"@/var/lib/lxc/{host}/{vmid}/command"
        # /proc/PID/net is that process's network namespace: no need to enter it.
        path = Path(f"/proc/{self.pid_of(host)}/net/unix")
        try:
            return any(s.endswith(name) for s in path.read_text(encoding="utf-8").splitlines())
        except OSError:  # the host ended meanwhile
            return False

    def in_host(
        self, host: str, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program on a host, without ssh. Output is captured, the exit status not judged."""
        enter = ["nsenter", "-t", str(self.pid_of(host)), "-a", *_INSIDE]
        try:
            return subprocess.run(
                [*enter, *argv], input=stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise LabError(
                f"{' '.join(argv)[:200]} took longer than {timeout_s:g} s", place=host
            ) from None

    def in_container(
        self, host: str, vmid: int, script: str, *, stdin: bytes = b"", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a /bin/sh script in a container, without ssh and pct."""
        self.check_container(host, vmid)
        attach = ["lxc-attach", "-P", f"/var/lib/lxc/{host}", "-n", str(vmid), "--clear-env"]
        argv = [*attach, "--", "sh", "-c", script]
        return self.in_host(host, argv, stdin=stdin, timeout_s=timeout_s)


def record_pids(state: Path, pids: Mapping[str, int]) -> None:
    """Write pids.json: a number with its start time, as the number alone may be anybody's later."""
    write_json(state / "pids.json", {name: [pid, _start_time(pid)] for name, pid in pids.items()})


def recorded_pids(state: Path) -> dict[str, int]:
    """Processes of a lab that still live, by name, also when its supervisor has ended."""
    recorded: dict[str, list[int]] = read_json(state / "pids.json")
    return {
        name: pid
        for name, (pid, started) in recorded.items()
        if started and _start_time(pid) == started
    }


def live_pids(state: Path) -> dict[str, int]:
    """Processes of a lab that is up, by name; empty when it is down."""
    pids = recorded_pids(state)
    return pids if "supervisor" in pids else {}


def _start_time(pid: int) -> int:
    """When a process began, in ticks since boot; 0 when it is gone or nobody reaped it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # from field 3, the state, on; see proc(5)
    return 0 if fields[0] == "Z" else int(fields[19])


def wait_for_sshd(host: str, port: int) -> None:
    """Return when a host's sshd greets on its port of 127.0.0.1.

    Raises: LabError when it does not within 30 s.
    """
    end = time.monotonic() + _SSHD_S
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as s:
            if s.recv(4) == b"SSH-":
                return
        time.sleep(0.02)
    raise LabError(f"sshd does not answer on 127.0.0.1:{port}", place=host)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when the file is missing or no JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file in one step: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
