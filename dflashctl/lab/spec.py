"""What a lab site consists of: hosts, containers, what of this machine they may see.

A site can be read from JSON (``load_site``); docs/lab.md shows the format.
"""

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dflashctl.errors import LabError

LAN = ipaddress.ip_network("10.1.2.0/24")
GATEWAY = "10.1.2.1"


@dataclass(frozen=True)
class MountSpec:
    """A directory or file of this machine shown in a container at another path."""

    source: str
    writable: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """One LXC container.

    `workspace` is the size of the tmpfs at /workspace, as mount(8) takes it ("64m", "6g").
    `expose` are paths of this machine, visible read-only at the same path.
    `mounts` maps a path in the container to what is seen there; a plain path is read-only.
    """

    onboot: bool = True
    hostname: str = ""
    cores: int = 16
    memory: int = 65536
    workspace: str = "64m"
    expose: tuple[str, ...] = ()
    mounts: Mapping[str, MountSpec | str] = field(default_factory=dict)

    def mount_points(self) -> dict[str, MountSpec]:
        """`mounts` in full, a parent before what lies in it."""
        return {
            path: MountSpec(what) if isinstance(what, str) else what
            for path, what in sorted(self.mounts.items())
        }


@dataclass(frozen=True)
class HostSpec:
    """One host: its address on the lab's LAN, its port on 127.0.0.1 (0: any free one), its GPUs."""

    ip: str
    port: int = 0
    gpus: int = 2
    containers: Mapping[int, ContainerSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteSpec:
    """A whole site. `base` is the containers' root file system (read-only); `expose` is for all."""

    hosts: Mapping[str, HostSpec]
    base: str = "/"
    expose: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_site(self)

    def exposed(self, host: str, vmid: int) -> tuple[str, ...]:
        """Paths that a container sees at the same place, each once."""
        return tuple(dict.fromkeys((*self.expose, *self.hosts[host].containers[vmid].expose)))


def default_site(workspace: str = "64m", expose: tuple[str, ...] = ()) -> SiteSpec:
    """kpro6 (8 GPUs, container 200 running, 201 stopped) and kpro7 (2 GPUs, container 200).

    `workspace` is the size of /workspace in kpro6's container 200; the others have 64 MiB.
    """
    kpro6 = {200: ContainerSpec(workspace=workspace), 201: ContainerSpec(onboot=False)}
    return SiteSpec(
        hosts={
            "kpro6": HostSpec(ip="10.1.2.6", gpus=8, containers=kpro6),
            "kpro7": HostSpec(ip="10.1.2.7", gpus=2, containers={200: ContainerSpec()}),
        },
        expose=expose,
    )


def dump_site(site: SiteSpec) -> dict[str, Any]:
    """A site as plain JSON data; ``parse_site`` is its inverse."""
    return asdict(site)


def load_site(path: Path) -> SiteSpec:
    """Read a site from a JSON file.

    Raises: LabError naming the file and the key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LabError(f"{path}: not JSON: {error}") from None
    return parse_site(data, str(path))


def parse_site(data: object, where: str) -> SiteSpec:
    """A site from JSON data; `where` names it in errors.

    Raises: LabError naming the key, what was found and what was expected.
    """
    top = _keys(data, where, {"hosts", "base", "expose"})
    hosts = _keys(top.get("hosts"), f"{where}: hosts", None)
    return _build(
        SiteSpec,
        where,
        hosts={name: _parse_host(h, f"{where}: hosts.{name}") for name, h in hosts.items()},
        base=top.get("base"),
        expose=_strings(top.get("expose", []), f"{where}: expose"),
    )


def _parse_host(data: object, where: str) -> HostSpec:
    found = _keys(data, where, {"ip", "port", "gpus", "containers"})
    containers = _keys(found.get("containers", {}), f"{where}.containers", None)
    parsed = {}
    for vmid, container in containers.items():
        if not vmid.isdecimal():
            raise LabError(f"{where}.containers: found {vmid!r}, expected a number such as 200")
        parsed[int(vmid)] = _parse_container(container, f"{where}.containers.{vmid}")
    return _build(
        HostSpec,
        where,
        ip=found.get("ip"),
        port=found.get("port"),
        gpus=found.get("gpus"),
        containers=parsed,
    )


def _parse_container(data: object, where: str) -> ContainerSpec:
    scalars = {"onboot", "hostname", "cores", "memory", "workspace"}
    found = _keys(data, where, {*scalars, "expose", "mounts"})
    mounts: dict[str, MountSpec | str] = {}
    for path, mount in _keys(found.get("mounts", {}), f"{where}.mounts", None).items():
        inner = f"{where}.mounts.{path}"
        if isinstance(mount, str):
            mounts[path] = mount
            continue
        keys = _keys(mount, inner, {"source", "writable"})
        mounts[path] = _build(
            MountSpec, inner, source=keys.get("source"), writable=keys.get("writable")
        )
    return _build(
        ContainerSpec,
        where,
        expose=_strings(found.get("expose", []), f"{where}.expose"),
        mounts=mounts,
        **{name: found.get(name) for name in scalars},
    )


def _keys(data: object, where: str, allowed: set[str] | None) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise LabError(f"{where}: found {data!r}, expected an object")
    unknown = sorted(set(data) - allowed) if allowed is not None else []
    if allowed is not None and unknown:
        known = ", ".join(sorted(allowed))
        raise LabError(f"{where}: unknown key {unknown[0]!r}; known are {known}")
    return data


def _strings(data: object, where: str) -> tuple[str, ...]:
    # asdict() turns a tuple into a tuple, JSON into a list: both are read.
    if not isinstance(data, list | tuple) or not all(isinstance(x, str) for x in data):
        raise LabError(f"{where}: found {data!r}, expected a list of paths")
    return tuple(data)


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("ip", "base", "hostname", "workspace", "source"), str),
    **dict.fromkeys(("port", "gpus", "cores", "memory"), int),
    **dict.fromkeys(("onboot", "writable"), bool),
}


T = TypeVar("T")


def _build(kind: type[T], where: str, **values: Any) -> T:
    """Make `kind` from the values that are there (not None), each of its expected type."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        expected = _KINDS.get(name, object)
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise LabError(f"{where}.{name}: found {value!r}, expected {expected.__name__}")
    for needed in fields(kind):  # type: ignore[arg-type]  # every `kind` is a dataclass
        optional = needed.default is not MISSING or needed.default_factory is not MISSING
        if needed.name not in given and not optional:
            raise LabError(f"{where}: the key {needed.name!r} is missing")
    return kind(**given)


def _check_site(site: SiteSpec) -> None:
    if not site.hosts:
        raise LabError("hosts: a site needs at least one host")
    taken: dict[object, str] = {}
    for name, host in site.hosts.items():
        _check_host(name, host)
        for what in (host.ip, host.port or None):
            if what is not None and taken.setdefault(what, name) != name:
                raise LabError(f"hosts.{name}: {what} is already taken by {taken[what]}")
    _check_paths("expose", site.expose)
    if not Path(site.base).is_dir():
        raise LabError(f"base: {site.base} is not a directory")


def _check_host(name: str, host: HostSpec) -> None:
    where = f"hosts.{name}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", name):
        raise LabError(f"{where}: a host name has 1 to 32 of a-z, 0-9 and -, and starts with a-z")
    try:
        inside = ipaddress.ip_address(host.ip) in LAN and host.ip != GATEWAY
    except ValueError:
        inside = False
    if not inside:
        raise LabError(f"{where}.ip: found {host.ip!r}, expected one of {LAN} except {GATEWAY}")
    if not 0 <= host.port <= 65535:
        raise LabError(f"{where}.port: found {host.port}, expected 0 (any free one) to 65535")
    if not 0 <= host.gpus <= 64:
        raise LabError(f"{where}.gpus: found {host.gpus}, expected 0 to 64")
    for vmid, container in host.containers.items():
        _check_container(f"{where}.containers.{vmid}", vmid, container)


def _check_container(where: str, vmid: int, container: ContainerSpec) -> None:
    if not 100 <= vmid <= 999_999_999:
        raise LabError(f"{where}: a VMID is a number from 100 to 999999999")
    if not re.fullmatch(r"[1-9]\d*[kmg]", container.workspace):
        found = container.workspace
        raise LabError(f"{where}.workspace: found {found!r}, expected a size such as 64m or 6g")
    if container.hostname and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", container.hostname):
        raise LabError(
            f"{where}.hostname: found {container.hostname!r}, expected letters, digits, -"
        )
    _check_paths(f"{where}.expose", container.expose)
    _check_paths(f"{where}.mounts", tuple(container.mounts))
    _check_paths(f"{where}.mounts", tuple(m.source for m in container.mount_points().values()))


def _check_paths(where: str, paths: tuple[str, ...]) -> None:
    for path in paths:
        if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
            raise LabError(f"{where}: found {path!r}, expected an absolute path without . or ..")
        if "\n" in path:  # LXC's configuration is made of lines
            raise LabError(f"{where}: {path!r} has a line break, which LXC cannot mount")
