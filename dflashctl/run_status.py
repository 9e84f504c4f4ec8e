"""The state of runs as their containers tell it: one round trip a container, all at once."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import DflashctlError, PartialError, UsageError
from dflashctl.inventory import Host, Place, by_host
from dflashctl.program import Program, run_program
from dflashctl.transport import enter
from dflashctl.transport.base import NO_SESSION, Transport
from dflashctl.transport.parallel import at_once
from trainer.contract.layout import check_tag

MAX_HOSTS_AT_ONCE = 8  # sshd's MaxStartups drops connections at random beyond ten
_CONTAINERS_AT_ONCE = 8  # of a host: its MaxSessions refuses the eleventh of a connection

Connect = Callable[[Place], Transport]
Reach = Callable[[Host], Transport]  # the way to a node, not opened yet

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


_Answer = list[RunStatus] | PlaceFailure


def read_statuses(
    places: Iterable[Place], reach: Reach, tags: Sequence[str] | None = None
) -> Statuses:
    """Ask every container for its runs, or for those with these tags.

    A host is one connection, over which its containers are asked at the same time; a host or a
    container that fails does not stop the others.
    """

    def ask_host(one: tuple[Host, list[Place]]) -> list[_Answer]:
        return _ask_host(*one, reach, tags)

    told = at_once(ask_host, by_host(places), MAX_HOSTS_AT_ONCE, "status")
    answers = [answer for of_host in told for answer in of_host]
    return Statuses(
        runs=tuple(run for answer in answers if isinstance(answer, list) for run in answer),
        failures=tuple(answer for answer in answers if isinstance(answer, PlaceFailure)),
    )


def _ask_host(
    host: Host, places: list[Place], reach: Reach, tags: Sequence[str] | None
) -> list[_Answer]:
    """Ask the containers of one host; when it cannot be reached, that is the answer of each."""
    try:
        node = reach(host)
        with closing(node):
            node.open()
            answers = at_once(
                lambda place: _ask(node, place, tags), places, _CONTAINERS_AT_ONCE, "status-in"
            )
            return [
                _ask(node, place, tags) if _had_no_session(answer) else answer
                for place, answer in zip(places, answers, strict=True)
            ]
    except DflashctlError as error:
        return [PlaceFailure.of(place.container.label, error) for place in places]


def _ask(node: Transport, place: Place, tags: Sequence[str] | None) -> _Answer:
    container = place.container
    # `enter` would give the node, which the others share, the name of `self`
    way = node if container.vmid is None else enter(node, place)
    arguments = {"workspace": container.workspace, "tags": tags}
    try:
        way.open()
        answer = run_program(way, Program("status", arguments, python=container.python))
    except DflashctlError as error:
        return PlaceFailure.of(container.label, error)
    return [RunStatus(place=container.label, **run) for run in answer["runs"]]


def _had_no_session(answer: _Answer) -> bool:
    """Say whether the host allows fewer sessions than were asked for; it has them free again."""
    return isinstance(answer, PlaceFailure) and answer.code == NO_SESSION


def find_run(places: Sequence[Place], reach: Reach, tag: str) -> Place:
    """Return the one place that holds the run ``tag``.

    Raises: UsageError when none or several do; the failure of a place that gave no answer when
    the others do not have it.
    """
    if len(places) == 1:
        return places[0]
    found = read_statuses(places, reach, [check_tag(tag)])
    holders = [place for place in places if any(run.place == place.label for run in found.runs)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        names = ", ".join(place.label for place in holders)
        raise UsageError(f"several containers have a run {tag}: {names}", hint="say --limit")
    raise_if_any(found.failures, f"no run {tag} elsewhere, and ")
    raise UsageError(
        f"no container has a run {tag}", code="no-such-run", hint="dflashctl runs list"
    )


def find_running(places: Sequence[Place], reach: Reach) -> tuple[Place, str]:
    """Return the only run that is running. Raises: UsageError naming them when there are more."""
    found = read_statuses(places, reach)
    running = [run for run in found.runs if run.state in ("running", "starting")]
    if len(running) == 1:
        place = next(place for place in places if place.label == running[0].place)
        return place, running[0].tag
    if not running:
        raise_if_any(found.failures)
    names = ", ".join(f"{run.tag} on {run.place}" for run in running) or "none"
    raise UsageError(f"say which run: a TAG is needed (running: {names})", hint="dflashctl status")


def raise_if_any(failures: Sequence[PlaceFailure], found: str = "") -> None:
    """Raise PartialError when a container gave no answer, naming each with its reason.

    found: what the others told, in front of it.
    """
    if failures:
        reasons = "; ".join(f"{failure.place}: {failure.message}" for failure in failures)
        raise PartialError(f"{found}no answer from {reasons}", hint=failures[0].hint)
