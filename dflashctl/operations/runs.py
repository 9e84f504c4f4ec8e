"""The list of runs: the laptop's records merged with what the containers hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflashctl.inventory import Place
from dflashctl.run_status import PlaceFailure, Reach, RunStatus, Statuses, read_statuses
from dflashctl.run_store import RunStore
from trainer.contract.errors import ContractError
from trainer.contract.manifest import Manifest


@dataclass(frozen=True)
class RunRow:
    """One run. state: as the container tells it; "unknown" when it was not asked or gave no
    answer, "gone" when it answered and has no such run, "unreadable" for a broken record."""

    tag: str
    place: str
    state: str
    created_unix_s: float | None
    here: str  # what the laptop has of it: "", "record", or "pulled" (its exit.json too)
    status: RunStatus | None


@dataclass(frozen=True)
class RunList:
    """Runs, oldest first, and the containers that gave no answer."""

    runs: tuple[RunRow, ...]
    failures: tuple[PlaceFailure, ...]


def list_runs(store: RunStore, places: Sequence[Place], reach: Reach | None) -> RunList:
    """Merge the records of ``store`` with the runs in ``places``; ``reach`` None asks nobody."""
    statuses = Statuses((), ()) if reach is None else read_statuses(places, reach)
    answered = set() if reach is None else {place.label for place in places}
    answered -= {failure.place for failure in statuses.failures}
    remote = {(run.place, run.tag): run for run in statuses.runs}
    rows = [
        _row_of_record(store, path.parent.name, remote, answered)
        for path in store.root.glob("*/manifest.json")
    ]
    rows += [
        RunRow(run.tag, run.place, run.state, run.created_unix_s, "", run)
        for run in remote.values()
    ]
    rows.sort(key=lambda row: (row.created_unix_s or 0.0, row.tag))
    return RunList(tuple(rows), statuses.failures)


def _row_of_record(
    store: RunStore,
    tag: str,
    remote: dict[tuple[str, str], RunStatus],
    answered: set[str],
) -> RunRow:
    """Make the row of a local record; its remote twin is taken out of ``remote``."""
    here = "pulled" if (store.root / tag / "exit.json").exists() else "record"
    try:
        manifest = Manifest.from_json((store.root / tag / "manifest.json").read_text())
    except (ContractError, OSError, UnicodeDecodeError):
        return RunRow(tag, "", "unreadable", None, here, None)
    place = manifest.place
    run = remote.get((place, tag))
    if run is not None and run.run_id == manifest.run_id:
        del remote[place, tag]
        return RunRow(tag, place, run.state, manifest.created_unix_s, here, run)
    state = "gone" if place in answered else "unknown"
    return RunRow(tag, place, state, manifest.created_unix_s, here, None)
