"""gpus: every GPU of the selected hosts, asked in parallel, one thread and connection a host."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflashctl.errors import DflashctlError, ExitCode
from dflashctl.gpus import GpuState, Probe, probe
from dflashctl.inventory import Container, Host, Place
from dflashctl.run_status import MAX_HOSTS_AT_ONCE
from dflashctl.transport import connect, connect_host


@dataclass(frozen=True)
class GpuRow:
    """A card with the places that hosts.yaml gives it to ("200 target")."""

    gpu: GpuState
    roles: tuple[str, ...]


@dataclass(frozen=True)
class HostGpus:
    """One host's answer: rows, or ``error`` (with its exit code), or both when a card is lost."""

    host: str
    rows: tuple[GpuRow, ...]
    error: str = ""
    hint: str = ""
    exit_code: int = 0
    seen_from: str = "node"


def look_at_gpus(places: Sequence[Place], *, accept_new: bool = False) -> list[HostGpus]:
    """Ask every host of ``places`` once; a host that fails gives a row with its error."""
    hosts: dict[str, tuple[Host, list[Container]]] = {}
    for place in places:
        hosts.setdefault(place.host.name, (place.host, []))[1].append(place.container)
    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(len(hosts), MAX_HOSTS_AT_ONCE)) as pool:
        futures = [
            pool.submit(_ask, host, containers, accept_new=accept_new)
            for host, containers in hosts.values()
        ]
        return [future.result() for future in futures]


def _ask(host: Host, containers: list[Container], *, accept_new: bool) -> HostGpus:
    try:
        answer, seen_from = _probe_host(host, containers, accept_new=accept_new)
    except DflashctlError as error:
        return HostGpus(host.name, (), error.message, error.hint, int(error.exit_code))
    rows = tuple(GpuRow(gpu, _roles(gpu, containers)) for gpu in answer.gpus)
    if not answer.installed and all(_needs_no_gpu(container) for container in containers):
        return HostGpus(host.name, (), seen_from=seen_from)
    doubts = [f"GPU {gpu.index}: {gpu.reason}" for gpu in answer.gpus if gpu.state == "unknown"]
    doubt = answer.problem or "; ".join(doubts)
    if not doubt:
        return HostGpus(host.name, rows, seen_from=seen_from)
    hint = "log in to the node and run nvidia-smi"
    return HostGpus(host.name, rows, doubt, hint, int(ExitCode.UNKNOWN), seen_from)


def _probe_host(host: Host, containers: list[Container], *, accept_new: bool) -> tuple[Probe, str]:
    """Ask the node; where it has no nvidia-smi, the first container that has one."""
    transport = connect_host(host, accept_new=accept_new)
    try:
        answer = probe(transport)
    finally:
        transport.close()
    if answer.installed:
        return answer, "node"
    for container in containers:
        if container.vmid is None:
            continue
        inside = connect(Place(host, container), accept_new=accept_new)
        try:
            seen = probe(inside)
        finally:
            inside.close()
        if seen.installed:
            return seen, container.label
    return answer, "node"


def _roles(gpu: GpuState, containers: list[Container]) -> tuple[str, ...]:
    names = {str(gpu.index), gpu.uuid}
    found = []
    for container in containers:
        for role, members in (("target", container.target), ("drafter", container.drafter)):
            if names & set(members):
                found.append(f"{container.label.rpartition('/')[2]} {role}")
    return tuple(found)


def _needs_no_gpu(container: Container) -> bool:
    return all(role == "cpu" for role in (*container.target, *container.drafter))
