"""The state of runs as their containers tell it: one round trip a container, hosts in parallel."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import DflashctlError
from dflashctl.inventory import Place
from dflashctl.program import Program, run_program
from dflashctl.transport.base import Transport

MAX_HOSTS_AT_ONCE = 8  # sshd's MaxStartups drops connections at random beyond ten

Connect = Callable[[Place], Transport]

# What a run can be after it ended, apart from finished and stopped.
FAILED_STATES = ("failed", "killed", "lost", "never-started")


@dataclass(frozen=True)
class RunStatus:
    """One run as its container sees it; ages are seconds of the container's clock.

    state: running, starting, finished, stopped, failed, killed, lost or never-started. ``exit`` is
    exit.json, ``step`` the last step event, ``phase`` the last phase event.
    """

    place: str
    tag: str
    state: str
    run_id: str | None
    created_unix_s: float | None
    release: str | None
    exit: dict[str, Any] | None
    step: dict[str, Any] | None
    phase: dict[str, Any] | None
    last_event_age_s: float | None
    log_age_s: float | None
    last_checkpoint: str | None
    evaluation: dict[str, Any] | None

    @property
    def has_failed(self) -> bool:
        """Whether the run ended, or vanished, without having done its work."""
        return self.state in FAILED_STATES


@dataclass(frozen=True)
class PlaceFailure:
    """A container that could not be asked."""

    place: str
    code: str
    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True)
class Statuses:
    """Every run found, ordered by place and tag, and the places that gave no answer."""

    runs: tuple[RunStatus, ...]
    failures: tuple[PlaceFailure, ...]


def read_statuses(
    places: Iterable[Place], connect: Connect, tags: Sequence[str] | None = None
) -> Statuses:
    """Ask every container for its runs, or for those with these tags.

    A host is one thread and one connection after another; a host that fails does not stop the
    others.
    """
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.host.name, []).append(place)

    def ask_host(of_host: list[Place]) -> list[list[RunStatus] | PlaceFailure]:
        return [_ask(place, connect, tags) for place in of_host]

    with ThreadPoolExecutor(MAX_HOSTS_AT_ONCE, "status") as pool:
        answers = [answer for host in pool.map(ask_host, hosts.values()) for answer in host]
    return Statuses(
        runs=tuple(run for answer in answers if isinstance(answer, list) for run in answer),
        failures=tuple(answer for answer in answers if isinstance(answer, PlaceFailure)),
    )


def _ask(
    place: Place, connect: Connect, tags: Sequence[str] | None
) -> list[RunStatus] | PlaceFailure:
    label = place.container.label
    try:
        transport = connect(place)
        try:
            arguments = {"workspace": place.container.workspace, "tags": tags}
            python = place.container.python
            answer = run_program(transport, Program("status", arguments, python=python))
        finally:
            transport.close()
    except DflashctlError as error:
        code = int(error.exit_code)
        return PlaceFailure(label, error.code, error.message, error.hint, code)
    return [RunStatus(place=label, **run) for run in answer["runs"]]
