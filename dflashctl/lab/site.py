"""The lab's public interface: bring a look-alike site up, use it, break it, take it down.

lab = Lab(Path(".lab"))
lab.up(default_site())
subprocess.run(["ssh", "-F", lab.ssh_config, "kpro6", "pct", "list"])
lab.fault("kpro6", "latency", "0.6,1.0")
lab.down()
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import LabError
from dflashctl.lab.claim import (
    MARKER,
    clear_away,
    create,
    in_use,
    refuse_foreign_directory,
    take,
)
from dflashctl.lab.faults import active_faults, set_fault
from dflashctl.lab.gpu_state import fresh_gpu_state
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.requirements import SEARCH_PATH, missing_requirements
from dflashctl.lab.spec import HostSpec, SiteSpec
from dflashctl.lab.state import (
    MAX_STATE_BYTES,
    SUPERVISOR,
    SiteState,
    live_pids,
    recorded_pids,
    wait_for_sshd,
    write_json,
)

_START_S = 60.0
_END_S = 30.0
_LET_GO_S = 20.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class HostStatus:
    """One host of a lab that is up. `containers` maps VMID to "running" or "stopped"."""

    name: str
    port: int
    ip: str
    pid: int
    faults: Mapping[str, str]
    containers: Mapping[int, str]


@dataclass(frozen=True)
class SiteStatus:
    """Whether a lab is up, and its hosts if it is."""

    up: bool
    hosts: tuple[HostStatus, ...] = ()


class Lab:
    """A look-alike site whose files are all in one state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        self.key = self.state / "key"
        self.known_hosts = self.state / "known_hosts"
        self.ssh_config = self.state / "ssh_config"
        self.lan_ssh_config = self.state / "ssh_config.lan"

    @staticmethod
    def missing_requirements() -> list[str]:
        """Why a lab cannot run on this machine; empty when it can."""
        return missing_requirements()

    @staticmethod
    def python_paths(executable: str) -> list[str]:
        """Paths to expose so that the Python `executable` runs in a container."""
        return python_paths(executable)

    def up(self, spec: SiteSpec, *, owner: int | None = None) -> None:
        """Start a site and return when every host answers on its port.

        `owner` is a process whose end also ends the site.
        Raises: LabError when something is missing or in the way, or a host does not start.
        """
        self._refuse_to_start(spec)
        with ExitStack() as stack:
            listeners = {
                name: stack.enter_context(_listen(name, host.port))
                for name, host in spec.hosts.items()
            }
            self._clear_leftovers()
            claim = stack.enter_context(create(self.state))
            ports = {name: s.getsockname()[1] for name, s in listeners.items()}
            self._write_state(spec, ports, claim.fd)
            descriptors = {name: s.fileno() for name, s in listeners.items()}
            started = self._start_supervisor(descriptors, claim.fd, owner)
            reason = "" if started else self._log()  # a `down` may clear the directory away next
        if not started:
            self.down()
            raise LabError(f"the lab did not start:\n{reason}")
        for name, port in ports.items():
            wait_for_sshd(name, port)

    def down(self) -> None:
        """End the site and remove everything of it; fine when there is none.

        Raises: LabError when the directory is not a lab's, or a process does not end.
        """
        refuse_foreign_directory(self.state)
        end = time.monotonic() + _END_S
        claim = None
        while self.state.exists() and (claim := take(self.state)) is None:
            # Held by the supervisor, or by an `up` that has not started it yet.
            supervisor = live_pids(self.state).get("supervisor")
            if supervisor is not None:
                with suppress(ProcessLookupError):
                    os.kill(supervisor, signal.SIGTERM)
            if time.monotonic() > end:
                raise LabError(
                    f"a process that uses {self.state} does not end",
                    hint=f"fuser -v {self.state / MARKER}",
                )
            time.sleep(0.02)
        if claim is not None:
            with claim:
                clear_away(self.state, end)

    def status(self) -> SiteStatus:
        """What runs now."""
        if not live_pids(self.state):
            return SiteStatus(up=False)
        try:
            site = SiteState(self.state)
            return SiteStatus(up=True, hosts=tuple(_host_status(site, h) for h in site.spec.hosts))
        except LabError:  # it ended meanwhile
            return SiteStatus(up=False)

    def fault(self, host: str, name: str, value: str = "") -> None:
        """Switch a fault on ("off": off); "none" switches off all of the host's.

        Raises: LabError for an unknown host, fault, value or container.
        """
        set_fault(SiteState(self.state), host, name, value)

    def restore(self) -> None:
        """Every host without faults, every container as after ``up``, but for its files.

        Containers run or are stopped as the site says, and no process is left in them but pid 1.
        """
        site = SiteState(self.state)
        for name, host in site.spec.hosts.items():
            set_fault(site, name, "none", "")
            for vmid, container in host.containers.items():
                if site.is_running(name, vmid) != container.onboot:
                    verb = "start" if container.onboot else "stop"
                    site.in_host(name, ["pct", verb, str(vmid)])
                elif container.onboot:
                    # kill(2): -1 is every process of the namespace but pid 1 and the caller.
                    site.in_container(name, vmid, "kill -KILL -1")

    def in_host(
        self, host: str, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program on a host as root, without ssh; the exit status is not judged."""
        return SiteState(self.state).in_host(host, argv, stdin=stdin, timeout_s=timeout_s)

    def in_container(
        self, host: str, vmid: int, script: str, *, stdin: bytes = b"", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a /bin/sh script in a container as root, without ssh and pct."""
        site = SiteState(self.state)
        return site.in_container(host, vmid, script, stdin=stdin, timeout_s=timeout_s)

    def lan_command(self, argv: Sequence[str]) -> list[str]:
        """The argv that runs `argv` on the lab's LAN, where hosts have their own addresses."""
        return ["nsenter", "-t", str(SiteState(self.state).pid_of("lan")), "-n", *argv]

    def pct_calls(self, host: str) -> list[str]:
        """Every call of the host's pct so far: "TIME COMMAND VMID", the oldest first."""
        log = SiteState(self.state).shared(host) / "pct_calls.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def hosts_yaml(
        self,
        *,
        python: str = "/usr/bin/python3",
        cpu: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """The text of a hosts.yaml for dflashctl that points at this lab.

        With `cpu` the roles are threads on the CPU; otherwise five eighths of a host's GPUs are
        for the target and the rest for the drafter. `env` goes to every container.
        """
        site = SiteState(self.state)
        # Threads of OpenMP that spin while they wait take a small machine's cores from the others.
        variables = ({"OMP_WAIT_POLICY": "PASSIVE"} if cpu else {}) | dict(env or {})
        lines = ["version: 1", "hosts:"]
        for name, host in site.spec.hosts.items():
            lines += [
                f"  {name}:",
                "    address: root@127.0.0.1",
                f"    port: {site.ports[name]}",
                f"    identity_file: {json.dumps(str(self.key))}",
                f"    ssh_config: {json.dumps(str(self.ssh_config))}",
                f"    known_hosts: {json.dumps(str(self.known_hosts))}",
                "    containers:",
            ]
            for vmid in host.containers:
                lines += [f"      {vmid}:", "        workspace: /workspace"]
                lines += [f"        python: {json.dumps(python)}"]
                lines += [f"        gpus: {_roles(host, cpu=cpu)}"]
                if variables:
                    lines += ["        env:"]
                    lines += [f"          {k}: {json.dumps(v)}" for k, v in variables.items()]
        return "\n".join(lines) + "\n"

    def _refuse_to_start(self, spec: SiteSpec) -> None:
        missing = missing_requirements()
        if missing:
            raise LabError("this machine cannot run a lab: " + "; ".join(missing))
        size = len(os.fsencode(self.state))
        if size > MAX_STATE_BYTES:
            raise LabError(
                f"{self.state} has {size} bytes, and {MAX_STATE_BYTES} is the most, for the "
                "unix sockets in it",
                hint="dflashctl lab up --state SHORTER",
            )
        if live_pids(self.state):
            raise LabError(
                f"the lab in {self.state} is already up",
                hint=f"dflashctl lab down --state {self.state}",
            )
        refuse_foreign_directory(self.state)
        for path in _sources(spec):
            if not Path(path).exists():
                raise LabError(f"{path} does not exist and cannot be shown in a container")

    def _clear_leftovers(self) -> None:
        if not self.state.exists():
            return
        # A killed site lets go a moment after the processes that it has recorded are gone.
        deadline_s = time.monotonic() + _LET_GO_S
        while (claim := take(self.state)) is None and time.monotonic() < deadline_s:
            if not self.state.exists():
                return
            if recorded_pids(self.state):
                break
            time.sleep(0.05)
        if claim is None:
            raise in_use(self.state)
        with claim:
            clear_away(self.state, time.monotonic() + _END_S)

    def _write_state(self, spec: SiteSpec, ports: Mapping[str, int], claim: int) -> None:
        _make_key(self.key, "laptop", claim)
        known = []
        for name, host in spec.hosts.items():
            directory = self.state / name
            (directory / "mnt").mkdir(parents=True)
            (directory / "shared").mkdir()
            _make_key(directory / "host_key", name, claim)
            public = (directory / "host_key.pub").read_text(encoding="ascii").split()[:2]
            known.append(f"[127.0.0.1]:{ports[name]},{host.ip} {' '.join(public)}\n")
            write_json(directory / "shared/gpu.json", fresh_gpu_state(host.gpus))
            write_json(directory / "shared/faults.json", {})
        self.known_hosts.write_text("".join(known), encoding="ascii")
        self.ssh_config.write_text(self._ssh_config(spec, ports), encoding="utf-8")
        self.lan_ssh_config.write_text(self._lan_ssh_config(spec), encoding="utf-8")
        SiteState.record(self.state, spec, ports, f"pve-lab-{os.getpid()}-{time.time_ns():x}")

    def _ssh_config(self, spec: SiteSpec, ports: Mapping[str, int]) -> str:
        first, *others = spec.hosts
        blocks = [
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n" for name, port in ports.items()
        ]
        # The first host by its address on the LAN, through another one.
        blocks += [
            f"Host {first}-via-{name}\n  HostName {spec.hosts[first].ip}\n  ProxyJump {name}\n"
            for name in others
        ]
        return "".join(blocks) + self._ssh_options()

    def _lan_ssh_config(self, spec: SiteSpec) -> str:
        blocks = [f"Host {n} {h.ip}\n  HostName {h.ip}\n" for n, h in spec.hosts.items()]
        return "".join(blocks) + self._ssh_options()

    def _ssh_options(self) -> str:
        return f"""Host *
  User root
  IdentityFile "{str(self.key).replace("%", "%%")}"
  IdentitiesOnly yes
  UserKnownHostsFile "{str(self.known_hosts).replace("%", "%%")}"
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  SendEnv LANG LC_*
"""

    def _start_supervisor(
        self, listeners: Mapping[str, int], claim: int, owner: int | None
    ) -> bool:
        """Start it detached; whether it says that all hosts run."""
        ready, ready_inside = os.pipe()
        orders = {"listeners": listeners, "ready": ready_inside, "claim": claim, "owner": owner}
        python = [sys.executable, "-P", "-m", SUPERVISOR, str(self.state), json.dumps(orders)]
        environment = {**os.environ, "PYTHONPATH": str(_PACKAGE_ROOT)}
        environment["PATH"] = f"{environment.get('PATH', '')}:{SEARCH_PATH}"
        with (self.state / "lab.log").open("wb") as log:
            # setsid --fork: the site outlives this process and is nobody's child to wait for.
            subprocess.run(
                ["setsid", "--fork", *python],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                pass_fds=[ready_inside, claim, *listeners.values()],
                check=True,
            )
        os.close(ready_inside)
        try:
            # End of file without a word: the supervisor has ended.
            return bool(select.select([ready], [], [], _START_S)[0] and os.read(ready, 16))
        finally:
            os.close(ready)

    def _log(self) -> str:
        """What the supervisor and the hosts said, and LXC's errors."""
        lines = (self.state / "lab.log").read_text("utf-8", "replace").splitlines()
        for log in sorted(self.state.glob("*/shared/lxc-*.log")):
            lines += [s for s in log.read_text("utf-8", "replace").splitlines() if " ERROR " in s]
        return "\n".join(lines)


def _host_status(site: SiteState, name: str) -> HostStatus:
    host = site.spec.hosts[name]
    containers = {
        vmid: "running" if site.is_running(name, vmid) else "stopped" for vmid in host.containers
    }
    return HostStatus(
        name=name,
        port=site.ports[name],
        ip=host.ip,
        pid=site.pid_of(name),
        faults=active_faults(site, name),
        containers=containers,
    )


def _sources(spec: SiteSpec) -> list[str]:
    containers = [c for host in spec.hosts.values() for c in host.containers.values()]
    exposed = [path for c in containers for path in c.expose]
    return [
        *spec.expose,
        *exposed,
        *(m.source for c in containers for m in c.mount_points().values()),
    ]


def _listen(name: str, port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=64)
    except OSError as error:
        raise LabError(
            f"port {port} of 127.0.0.1: {error.strerror}",
            place=name,
            hint="port 0 takes any free one",
        ) from None


def _make_key(path: Path, comment: str, claim: int) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    # It shares the claim: were this process killed, nobody clears the directory under its hands.
    subprocess.run(command, check=True, pass_fds=[claim])


def _roles(host: HostSpec, *, cpu: bool) -> str:
    if cpu or not host.gpus:
        return "{target: [cpu], drafter: [cpu]}"
    target = max(1, host.gpus * 5 // 8)
    return f"{{target: {list(range(target))}, drafter: {list(range(target, host.gpus))}}}"
