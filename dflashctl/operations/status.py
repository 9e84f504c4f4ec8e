"""The state of runs now: of all in the chosen containers, or of one tag."""

from collections.abc import Sequence

from dflashctl.errors import UsageError
from dflashctl.inventory import Place
from dflashctl.run_status import Reach, Statuses, read_statuses
from trainer.contract.layout import check_tag


def status(places: Sequence[Place], reach: Reach, tag: str | None = None) -> Statuses:
    """Ask the containers of ``places``; with ``tag`` only for that run.

    Raises: UsageError when every container answered and none has the run.
    """
    found = read_statuses(places, reach, None if tag is None else [check_tag(tag)])
    if tag is not None and not found.runs and not found.failures:
        looked = ", ".join(place.label for place in places)
        raise UsageError(
            f"no run {tag} in {looked}", code="no-such-run", hint="dflashctl runs list"
        )
    return found
