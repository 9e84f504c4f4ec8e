"""Hosts, their containers, and how a command line selects among them."""

import difflib
import fnmatch
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dflashctl.errors import UsageError

Backend = Literal["fabric", "openssh", "local"]
BecomeSetting = Literal["auto", "none", "sudo"]


@dataclass(frozen=True)
class Expect:
    """What GPUs a host or a container must have: how many, and a part of their names."""

    count: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class Container:
    """One container of a host, or the host itself when ``vmid`` is None.

    target, drafter: GPUs by role, each "0", "GPU-<uuid>" or "cpu", in the order written.
    """

    host_name: str
    vmid: int | None
    workspace: str = "/workspace"
    python: str = "python3"
    target: tuple[str, ...] = ()
    drafter: tuple[str, ...] = ()
    log_dir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    pip_args: tuple[str, ...] = ()
    expect: Expect | None = None

    @property
    def label(self) -> str:
        """``kpro6/200``; the host itself is ``kpro6/self``."""
        return f"{self.host_name}/{'self' if self.vmid is None else self.vmid}"


@dataclass(frozen=True)
class Host:
    """One machine: how it is reached, and its containers in the order of the file.

    address: name, name of ssh_config, or user@name; empty for the backend ``local``.
    identity_file, ssh_config, known_hosts: absolute paths.
    """

    name: str
    address: str
    port: int | None = None
    jump: str | None = None
    backend: Backend = "fabric"
    identity_file: str | None = None
    ssh_config: str | None = None
    known_hosts: str | None = None
    connect_timeout_s: float = 10.0
    become: BecomeSetting = "auto"
    groups: tuple[str, ...] = ()
    containers: tuple[Container, ...] = ()
    expect: Expect | None = None

    @property
    def ssh_line(self) -> str:
        """The ssh command, ready to type, that reaches this host by the same settings."""
        options = (
            ("-F", self.ssh_config),
            ("-o", self.known_hosts and f"UserKnownHostsFile={self.known_hosts}"),
            ("-i", self.identity_file),
            ("-J", self.jump),
            ("-p", self.port and str(self.port)),
        )
        words = [word for flag, value in options if value for word in (flag, value)]
        return shlex.join(["ssh", *words, self.address])


@dataclass(frozen=True)
class Place:
    """One container with its host: what a selection yields."""

    host: Host
    container: Container

    @property
    def label(self) -> str:
        """``kpro6/200``."""
        return self.container.label


def by_host(places: Iterable[Place]) -> list[tuple[Host, list[Place]]]:
    """Return each host once, in the order of its first place, with its places."""
    hosts: dict[str, tuple[Host, list[Place]]] = {}
    for place in places:
        hosts.setdefault(place.host.name, (place.host, []))[1].append(place)
    return list(hosts.values())


@dataclass(frozen=True)
class Inventory:
    """All hosts of one hosts.yaml, in its order."""

    path: Path
    hosts: tuple[Host, ...]

    @property
    def places(self) -> list[Place]:
        """Every container of every host."""
        return [Place(host, container) for host in self.hosts for container in host.containers]

    def select(self, limits: Sequence[str]) -> list[Place]:
        """Return the places that any of ``limits`` names, in the order of the file.

        A limit is a host, ``host/vmid``, a group, or a shell pattern of these; none means all.
        Raises: UsageError for a limit that names nothing, with the nearest names.
        """
        if not limits:
            return self.places
        chosen: set[str] = set()
        for limit in limits:
            found = [place.label for place in self.places if _matches(place, limit)]
            if not found:
                raise self._unknown(limit)
            chosen.update(found)
        return [place for place in self.places if place.label in chosen]

    def one(self, limits: Sequence[str]) -> Place:
        """Return the only place that ``limits`` select.

        Raises: UsageError naming the choices when they select several, or none.
        """
        places = self.select(limits)
        if len(places) == 1:
            return places[0]
        labels = [place.label for place in places]
        raise UsageError(
            f"this command acts on one container, and {len(places)} are selected: "
            f"{', '.join(labels)}",
            hint=f"name one: --limit {labels[0]}",
        )

    def _unknown(self, limit: str) -> UsageError:
        names: dict[str, None] = {}
        for place in self.places:
            names |= dict.fromkeys([place.host.name, place.label])
            names |= dict.fromkeys([*place.host.groups, *place.container.groups])
        near = [name for name in names if name.partition("/")[2] == limit]
        near += difflib.get_close_matches(limit, list(names), n=3, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
        return UsageError(
            f"--limit {limit!r} names no host, container or group", place=str(self.path), hint=hint
        )


def _matches(place: Place, limit: str) -> bool:
    names = [place.host.name, place.label, *place.host.groups, *place.container.groups]
    return any(fnmatch.fnmatchcase(name, limit) for name in names)
