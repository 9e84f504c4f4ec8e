"""The process that keeps a lab alive: namespaces of the hosts, their LAN, the forwarders.

When it ends, by whatever signal, the kernel ends everything of the lab with it.
Run (by ``Lab.up`` only): python -m dflashctl.lab.supervisor STATE_DIR JSON
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import LabError
from dflashctl.lab.claim import clear_away
from dflashctl.lab.forwarder import Forwarder, Line
from dflashctl.lab.spec import GATEWAY, LAN
from dflashctl.lab.state import SiteState, record_pids

_TICK_S = 0.2
_END_S = 1.0
_CLEAR_S = 30.0
_FORK_S = 30.0


@dataclass(frozen=True)
class Orders:
    """What ``Lab.up`` hands over: open file descriptors and a process to outlive no further."""

    listeners: dict[str, int]
    ready: int
    claim: int
    owner: int | None


class Supervisor:
    """Starts a site and ends it."""

    def __init__(self, site: SiteState, orders: Orders) -> None:
        self._site = site
        self._orders = orders
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids = {"supervisor": os.getpid()}
        self._owner = None if orders.owner is None else os.pidfd_open(orders.owner)
        self._told_to_end = False
        for fd in (orders.ready, orders.claim, *orders.listeners.values()):
            os.set_inheritable(fd, False)  # noqa: FBT003  it takes no keyword

    def start(self) -> None:
        """Bring up LAN and hosts; returns when every host's sshd was started."""
        self._record()  # from here on `down` finds this process
        self._start_lan()
        self._record()
        namespaces = ["--mount", "--uts", "--net", "--ipc", "--pid", "--propagation", "private"]
        for name in self._site.spec.hosts:
            host = [sys.executable, "-P", "-m", "dflashctl.lab.host", str(self._site.state), name]
            self._pids[name] = self._spawn(namespaces, host)
            self._record()
        for number, name in enumerate(self._site.spec.hosts):
            self._connect(number, name)
        self._wait_for_hosts()
        os.write(self._orders.ready, b"ready")  # BrokenPipeError: `up` was killed meanwhile
        os.close(self._orders.ready)

    def watch(self) -> None:
        """Return when a host, the owner or the state directory is gone."""
        while (self._site.state / "lab.json").exists() and not self.is_abandoned():
            self._pause(_TICK_S)
            if any(p.poll() is not None for p in self._processes):
                return

    def tell_to_end(self) -> None:
        """Ask for the end at the next pause; an exception here could break off poll() in a lock."""
        self._told_to_end = True

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._told_to_end:
            sys.exit(0)

    def is_abandoned(self) -> bool:
        """Whether the process that this site must not outlive has ended."""
        return self._owner is not None and bool(select.select([self._owner], [], [], 0)[0])

    def end(self) -> None:
        """SIGKILL pid 1 of each host: the kernel ends all else in its namespaces."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name, pid in self._pids.items():
            if name != "supervisor":
                with suppress(ProcessLookupError):  # it may be the one that ended by itself
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            try:
                process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:  # told to end before its child was known
                process.kill()  # which kills the child: --kill-child
                process.wait()

    def _record(self) -> None:
        record_pids(self._site.state, self._pids)

    def _spawn(self, namespaces: list[str], argv: list[str]) -> int:
        """Run argv as the first process of new namespaces; it dies with this process."""
        unshare = ["unshare", *namespaces, "--fork", "--kill-child=SIGKILL", *argv]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare], stdin=subprocess.DEVNULL
        )
        self._processes.append(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + _FORK_S
        while process.poll() is None and time.monotonic() < end:
            if found := children.read_text(encoding="ascii").split():
                return int(found[0])
            self._pause(0.01)
        raise LabError(f"unshare {' '.join(namespaces)} started no process")

    def _start_lan(self) -> None:
        self._pids["lan"] = self._spawn(["--net"], ["sleep", "infinity"])
        bits = LAN.prefixlen
        for command in (
            "link set lo up",
            "link add vmbr0 type bridge",
            f"addr add {GATEWAY}/{bits} dev vmbr0",
            "link set vmbr0 up",
        ):
            _ip(self._pids["lan"], command)

    def _connect(self, number: int, name: str) -> None:
        pid, lan = self._pids[name], self._pids["lan"]
        _ip(lan, f"link add v{number} type veth peer name eth0 netns {pid}")
        _ip(lan, f"link set v{number} up master vmbr0")
        _ip(pid, f"addr add {self._site.spec.hosts[name].ip}/{LAN.prefixlen} dev eth0")
        _ip(pid, "link set eth0 up")
        listener = socket.socket(fileno=self._orders.listeners[name])
        Forwarder(listener, pid, Line(self._site.shared(name) / "faults.json")).start()

    def _wait_for_hosts(self) -> None:
        waiting = [self._site.shared(name) / "ready" for name in self._site.spec.hosts]
        while waiting:
            if any(p.poll() is not None for p in self._processes):
                raise LabError("a host ended while it started")
            waiting = [path for path in waiting if not path.exists()]
            self._pause(0.01)


def set_link(site: SiteState, host: str, *, up: bool) -> None:
    """Plug or unplug a host's cable to the LAN."""
    number = list(site.spec.hosts).index(host)
    _ip(site.pid_of("lan"), f"link set v{number} {'up' if up else 'down'}")


def _ip(pid: int, command: str) -> None:
    argv = ["nsenter", "-t", str(pid), "-n", "ip", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"ip {command}: {done.stderr.strip()}")


def main() -> int:
    """Entry point of the detached process."""
    site = SiteState(Path(sys.argv[1]))
    supervisor = Supervisor(site, Orders(**json.loads(sys.argv[2])))
    signal.signal(signal.SIGTERM, lambda *_: supervisor.tell_to_end())
    try:
        supervisor.start()
        supervisor.watch()
    except (LabError, BrokenPipeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        supervisor.end()
        if supervisor.is_abandoned():  # nobody is left to call `down`
            clear_away(site.state, time.monotonic() + _CLEAR_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
