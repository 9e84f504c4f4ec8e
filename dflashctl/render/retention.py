"""What ``runs gc`` shows: a table of what may go and why, then what became of it."""

import re
from typing import Any

from dflashctl.operations.gc import GcResult
from dflashctl.render.tables import format_table, size

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # shown short, as everywhere


def plan_text(result: GcResult, *, verbose: bool = False) -> str:
    """Return the table of what may go; ``verbose``: also what stays, and why."""
    rows = [
        (plan.place, size(item["num_bytes"]), item["kind"], _short(item["path"]), item["why"])
        for plan in result.plans
        for item in plan.items
    ]
    lines = [format_table(("PLACE", "SIZE", "KIND", "PATH", "WHY"), rows)] if rows else []
    for plan in result.plans:
        free = f"; {size(plan.free_bytes)} free" if plan.free_bytes is not None else ""
        count = f"{len(plan.items)} path{'' if len(plan.items) == 1 else 's'}"
        what = f"{count}, {size(plan.num_bytes)}, may go" if plan.items else "nothing to remove"
        lines.append(f"{plan.place}:{plan.workspace}  {what}{free}\n")
        if verbose:
            lines += [f"  stays: {_short(one['path'])}: {one['why']}\n" for one in plan.kept]
    return "".join(lines)


def _short(path: str) -> str:
    return _DIGEST.sub(r"\1", path)


def outcome_text(result: GcResult) -> str:
    """Return what was removed, and each path that was planned and left."""
    lines = []
    for outcome in result.outcomes:
        count, freed = len(outcome.removed), sum(one["num_bytes"] for one in outcome.removed)
        lines.append(f"{outcome.place}  removed {count} path{'' if count == 1 else 's'},")
        lines.append(f" {size(freed)}; {size(outcome.free_bytes)} free\n")
        lines += [f"  left: {_short(one['path'])}: {one['why']}\n" for one in outcome.left]
        lines += [f"  not deleted: {_short(one['path'])}: {one['why']}\n" for one in outcome.failed]
    return "".join(lines)


def gc_document(result: GcResult, *, dry_run: bool) -> dict[str, Any]:
    """Return the fields of the JSON document; what only the removal needs is left out."""
    outcomes = {outcome.place: outcome for outcome in result.outcomes}
    places = []
    for plan in result.plans:
        names = ("path", "kind", "num_bytes", "why")
        outcome = outcomes.get(plan.place)
        places.append(
            {
                "place": plan.place,
                "workspace": plan.workspace,
                "planned": [{name: item[name] for name in names} for item in plan.items],
                "kept": plan.kept,
                "removed": outcome.removed if outcome else (),
                "left": outcome.left if outcome else (),
                "failed": outcome.failed if outcome else (),
                "free_bytes": outcome.free_bytes if outcome else plan.free_bytes,
            }
        )
    failures = [vars(failure) for failure in result.failures]
    return {"dry_run": dry_run, "places": places, "failures": failures}
