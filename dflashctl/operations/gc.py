"""runs gc: plan what nothing needs any more in the chosen containers; remove exactly that."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dflashctl.errors import DflashctlError
from dflashctl.inventory import Host, Place, by_host
from dflashctl.program import Program, run_program
from dflashctl.run_status import MAX_HOSTS_AT_ONCE, Connect, PlaceFailure
from dflashctl.transport.parallel import at_once

_DEADLINE_S = 3600.0  # a plan reads the checkpoints that stay; a removal may free many gigabytes

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class GcRequest:
    """What to look for.

    release: digest that this laptop would deploy. keep: complete checkpoints of an ended run that
    stay besides the best; None keeps all.
    """

    release: str
    keep: int | None = None


@dataclass(frozen=True)
class GcPlan:
    """What may go from a place, and what stays although it was looked at, each with the reason.

    An item: path (below the workspace), kind (release, scratch, staging, checkpoint, trash),
    num_bytes, why, and for the removal state and lock.
    """

    place: str
    workspace: str
    items: tuple[dict[str, Any], ...]
    kept: tuple[dict[str, Any], ...]
    free_bytes: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(item["num_bytes"] for item in self.items)


@dataclass(frozen=True)
class GcOutcome:
    """What was removed from a place, and what was planned and left, with the reason."""

    place: str
    removed: tuple[dict[str, Any], ...]
    left: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    free_bytes: int | None


@dataclass(frozen=True)
class GcResult:
    """The plans, what came of them (none of a dry run), and the places that failed."""

    plans: tuple[GcPlan, ...]
    outcomes: tuple[GcOutcome, ...]
    failures: tuple[PlaceFailure, ...]


def plan(places: Sequence[Place], connect: Connect, request: GcRequest) -> GcResult:
    """Ask every container what may go; one round trip each, nothing is changed."""

    def ask(place: Place) -> GcPlan:
        answer = _run(place, connect, request, "plan")
        workspace = place.container.workspace
        items, kept = tuple(answer["items"]), tuple(answer["kept"])
        return GcPlan(place.container.label, workspace, items, kept, answer["free_bytes"])

    plans, failures = _each(places, ask)
    return GcResult(tuple(plans), (), tuple(failures))


def remove(
    places: Sequence[Place], connect: Connect, request: GcRequest, planned: GcResult
) -> GcResult:
    """Remove what was planned and is still as it was; one round trip a container with items.

    What could not be deleted makes its container a failure, beside its outcome.
    """
    plans = {one.place: one for one in planned.plans if one.items}

    def ask(place: Place) -> GcOutcome:
        label = place.container.label
        answer = _run(place, connect, request, "remove", plans[label].items)
        removed, left, failed = (tuple(answer[name]) for name in ("removed", "left", "failed"))
        return GcOutcome(label, removed, left, failed, answer["free_bytes"])

    asked = [place for place in places if place.container.label in plans]
    outcomes, failures = _each(asked, ask)
    failures += [_undeleted(outcome) for outcome in outcomes if outcome.failed]
    every = (*planned.failures, *failures)
    return replace(planned, outcomes=tuple(outcomes), failures=every)


def _undeleted(outcome: GcOutcome) -> PlaceFailure:
    first, count = outcome.failed[0], len(outcome.failed)
    error = DflashctlError(
        f"{count} of the planned paths could not be deleted: {first['path']}: {first['why']}",
        hint="mend that there, then type the same again",
        code="not-deleted",
    )
    return PlaceFailure.of(outcome.place, error)


def _run(
    place: Place,
    connect: Connect,
    request: GcRequest,
    action: str,
    items: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    container = place.container
    arguments = {
        "action": action,
        "workspace": container.workspace,
        "release": request.release,
        "keep": request.keep,
    }
    # On standard input: as an argument the paths would look like those of a process that uses them.
    payload = [json.dumps(list(items)).encode()]
    program = Program("gc", arguments, payload, _DEADLINE_S, container.python)
    transport = connect(place)
    try:
        return run_program(transport, program)
    finally:
        transport.close()


def _each(
    places: Sequence[Place], ask: Callable[[Place], Answer]
) -> tuple[list[Answer], list[PlaceFailure]]:
    """Ask hosts at once, the containers of a host one after another."""

    def ask_host(one: tuple[Host, list[Place]]) -> list[Answer | PlaceFailure]:
        answers: list[Answer | PlaceFailure] = []
        for place in one[1]:
            try:
                answers.append(ask(place))
            except DflashctlError as error:
                answers.append(PlaceFailure.of(place.container.label, error))
        return answers

    told = at_once(ask_host, by_host(places), MAX_HOSTS_AT_ONCE, "gc")
    found = [one for answers in told for one in answers]
    failures = [one for one in found if isinstance(one, PlaceFailure)]
    return [one for one in found if not isinstance(one, PlaceFailure)], failures
