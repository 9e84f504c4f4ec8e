"""The state of runs as their containers tell it: one round trip a container, hosts in parallel."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import DflashctlError, PartialError, UsageError
from dflashctl.inventory import Place
from dflashctl.program import Program, run_program
from dflashctl.transport.base import Transport
from trainer.contract.layout import check_tag

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

    @classmethod
    def of(cls, place: str, error: DflashctlError) -> "PlaceFailure":
        """Keep what ``error`` says."""
        return cls(place, error.code, error.message, error.hint, int(error.exit_code))


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
        return PlaceFailure.of(label, error)
    return [RunStatus(place=label, **run) for run in answer["runs"]]


def find_run(places: Sequence[Place], connect: Connect, tag: str) -> Place:
    """Return the one place that holds the run ``tag``.

    Raises: UsageError when none or several do; the failure of a place that gave no answer when
    the others do not have it.
    """
    if len(places) == 1:
        return places[0]
    found = read_statuses(places, connect, [check_tag(tag)])
    holders = [place for place in places if any(run.place == place.label for run in found.runs)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        names = ", ".join(place.label for place in holders)
        raise UsageError(f"several containers have a run {tag}: {names}", hint="say --limit")
    raise_if_any(found.failures)
    raise UsageError(
        f"no container has a run {tag}", code="no-such-run", hint="dflashctl runs list"
    )


def find_running(places: Sequence[Place], connect: Connect) -> tuple[Place, str]:
    """Return the only run that is running. Raises: UsageError naming them when there are more."""
    found = read_statuses(places, connect)
    running = [run for run in found.runs if run.state in ("running", "starting")]
    if len(running) == 1:
        place = next(place for place in places if place.label == running[0].place)
        return place, running[0].tag
    if not running:
        raise_if_any(found.failures)
    names = ", ".join(f"{run.tag} on {run.place}" for run in running) or "none"
    raise UsageError(f"say which run: a TAG is needed (running: {names})", hint="dflashctl status")


def raise_if_any(failures: Sequence[PlaceFailure]) -> None:
    """Raise PartialError when a container gave no answer, naming each with its reason."""
    if failures:
        reasons = "; ".join(f"{failure.place}: {failure.message}" for failure in failures)
        raise PartialError(f"no answer from {reasons}", hint=failures[0].hint)
