"""gpus: every GPU of the selected hosts, asked in parallel, one thread and connection a host."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflashctl.command import pct_exec
from dflashctl.errors import DflashctlError, ExitCode
from dflashctl.gpu_roles import CPU, lost_inside, unexpected
from dflashctl.gpus import GpuState, Probe, View, probe
from dflashctl.inventory import Container, Host, Place, by_host
from dflashctl.run_status import MAX_HOSTS_AT_ONCE
from dflashctl.transport import connect, connect_host
from dflashctl.transport.base import Transport
from dflashctl.transport.parallel import at_once

_LIST = ("timeout", "-k", "2", "10", "nvidia-smi", "-L")


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
    state: str = "unknown"  # of a host that gave no rows: unknown or wedged


@dataclass(frozen=True)
class _Trouble:
    """What is wrong with a host's GPUs, the worst first when sorted by ``rank``."""

    rank: int
    text: str
    hint: str
    exit_code: ExitCode


def look_at_gpus(
    places: Sequence[Place], *, accept_new: bool = False, inside: bool = True
) -> list[HostGpus]:
    """Ask every host of ``places`` once; a host that fails gives a row with its error.

    inside: have the node ask its containers as well, whether they see their GPUs.
    """

    def ask(one: tuple[Host, list[Place]]) -> HostGpus:
        host, of_host = one
        containers = [place.container for place in of_host]
        return _ask(host, containers, accept_new=accept_new, inside=inside)

    return at_once(ask, by_host(places), MAX_HOSTS_AT_ONCE, "gpus")


def _ask(host: Host, containers: list[Container], *, accept_new: bool, inside: bool) -> HostGpus:
    try:
        answer, seen_from = _probe_host(host, containers, accept_new=accept_new, inside=inside)
    except DflashctlError as error:
        return HostGpus(host.name, (), error.message, error.hint, int(error.exit_code))
    rows = _rows(answer, containers)
    if not answer.installed and all(_needs_no_gpu(container) for container in containers):
        return HostGpus(host.name, (), seen_from=seen_from)
    troubles = sorted(_troubles(answer, host, containers, rows), key=lambda trouble: trouble.rank)
    if not troubles:
        return HostGpus(host.name, rows, seen_from=seen_from)
    text = "; ".join(dict.fromkeys(trouble.text for trouble in troubles))
    first = troubles[0]
    state = "wedged" if answer.wedged else "unknown"
    return HostGpus(host.name, rows, text, first.hint, int(first.exit_code), seen_from, state)


def _probe_host(
    host: Host, containers: list[Container], *, accept_new: bool, inside: bool
) -> tuple[Probe, str]:
    """Ask the node; where it has no nvidia-smi, the first container that has one."""
    transport = connect_host(host, accept_new=accept_new)
    try:
        answer = probe(transport, inside=_views(transport, host, containers) if inside else None)
    finally:
        transport.close()
    if answer.installed:
        return answer, "node"
    for container in containers:
        if container.vmid is None:
            continue
        within = connect(Place(host, container), accept_new=accept_new)
        try:
            seen = probe(within, from_node=False)
        finally:
            within.close()
        if seen.installed:
            return seen, container.label
    return answer, "node"


def _views(node: Transport, host: Host, containers: list[Container]) -> dict[int, list[str]]:
    """Return the node's commands that list the GPUs as its containers see them."""
    sudo = host.become == "sudo" or (host.become == "auto" and node.user != "root")
    return {
        container.vmid: pct_exec(container.vmid, _LIST, "sudo" if sudo else "none")
        for container in containers
        if container.vmid is not None and not _needs_no_gpu(container)
    }


def _rows(answer: Probe, containers: list[Container]) -> tuple[GpuRow, ...]:
    """Return the cards with their roles, and the lost ones that only hosts.yaml knows."""
    rows = [GpuRow(gpu, _roles(gpu, containers)) for gpu in answer.gpus]
    if answer.gpus and answer.problem and not answer.wedged:
        for role in _missing(answer, containers):
            index = int(role) if role.isdigit() else None
            uuid = "" if role.isdigit() else role
            gpu = GpuState(index, uuid, "", None, None, None, "failed", answer.problem)
            rows.append(GpuRow(gpu, _roles(gpu, containers)))
    return tuple(rows)


def _missing(answer: Probe, containers: list[Container]) -> list[str]:
    """Return the GPUs of hosts.yaml that are not among the cards."""
    there = {name for gpu in answer.gpus for name in (str(gpu.index), gpu.uuid)}
    named = (role for one in containers for role in (*one.target, *one.drafter))
    return [role for role in dict.fromkeys(named) if role != CPU and role not in there]


def _troubles(
    answer: Probe, host: Host, containers: list[Container], rows: Sequence[GpuRow]
) -> list[_Trouble]:
    """Return everything that is not as it should be."""
    look = "log in to the node and run nvidia-smi"
    unknown = [row.gpu for row in rows if row.gpu.state == "unknown"]
    failed = [row.gpu for row in rows if row.gpu.state == "failed"]
    found = [
        _Trouble(0, f"GPU {gpu.index}: {gpu.reason}", look, ExitCode.UNKNOWN) for gpu in unknown
    ]
    for gpu in failed:
        name = gpu.uuid if gpu.index is None else gpu.index
        hint = "look for Xid lines in the node's dmesg; a lost card comes back with a restart"
        found.append(_Trouble(1, f"GPU {name} failed: {gpu.reason}", hint, ExitCode.MISMATCH))
    if answer.wedged or (answer.problem and not answer.mismatch and not failed):
        found.append(_Trouble(0, answer.problem, look, ExitCode.UNKNOWN))
    elif answer.mismatch:
        found.append(_Trouble(0, answer.problem, look, ExitCode.MISMATCH))
    for vmid, view in answer.views:
        if view.problem and not view.listed:
            text = f"{host.name}/{vmid}: {view.problem}"
            found.append(_Trouble(0, text, f"on the node: pct status {vmid}", ExitCode.UNKNOWN))
    if answer.gpus and not answer.wedged:
        found += _differences(answer, host, containers)
    return found


def _differences(answer: Probe, host: Host, containers: list[Container]) -> list[_Trouble]:
    """Return what differs from hosts.yaml: names, number, model; and containers without GPUs."""
    texts = []
    if not answer.problem:
        there = ", ".join(str(gpu.index) for gpu in answer.gpus)
        texts += [
            f"GPU {role} of hosts.yaml is not there (found: {there})"
            for role in _missing(answer, containers)
        ]
        if host.expect is not None:
            texts.append(unexpected(answer.gpus, host.expect))
    views = dict(answer.views)
    hint = "correct hosts.yaml, or look at the node's cards: nvidia-smi -L"
    for container in containers:
        view = None if container.vmid is None else views.get(container.vmid)
        if view is not None and view.listed:
            text = _inside(view, answer, container)
            texts.append(text)
            hint = f"pct reboot {container.vmid}" if text else hint
    return [_Trouble(2, text, hint, ExitCode.MISMATCH) for text in texts if text]


def _inside(view: View, answer: Probe, container: Container) -> str:
    """Say what is wrong with what a container sees; "" when nothing is."""
    if view.problem:
        return f"{container.label}: {lost_inside(view.problem, container.label).message}"
    by_name = {name: gpu for gpu in answer.gpus for name in (str(gpu.index), gpu.uuid)}
    for role in (*container.target, *container.drafter):
        gpu = by_name.get(role)
        if gpu is not None and gpu.uuid and gpu.state != "failed" and gpu.uuid not in view.uuids:
            return f"{container.label} does not see GPU {gpu.index} ({gpu.uuid})"
    if container.expect is None:
        return ""
    seen = [gpu for gpu in answer.gpus if gpu.uuid in view.uuids]
    text = unexpected(seen, container.expect)
    return text and f"{container.label}: {text}"


def _roles(gpu: GpuState, containers: list[Container]) -> tuple[str, ...]:
    names = {str(gpu.index), gpu.uuid}
    found = []
    for container in containers:
        for role, members in (("target", container.target), ("drafter", container.drafter)):
            if names & set(members):
                found.append(f"{container.label.rpartition('/')[2]} {role}")
    return tuple(found)


def _needs_no_gpu(container: Container) -> bool:
    return all(role == CPU for role in (*container.target, *container.drafter))
