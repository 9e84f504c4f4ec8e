"""Tables of runs: ``status`` and ``runs list``; and how a run ended, in words."""

import signal
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from dflashctl.operations.runs import RunRow
from dflashctl.render.tables import duration, figure, format_table
from dflashctl.run_status import PlaceFailure, RunStatus

NO_RUNS = "no run is known\n"
_NEXT = {  # what to type when a run stands still before its end
    "stopped": "launch --resume",
    "killed": "launch --resume",
    "lost": "launch --resume",
    "failed": "logs -n 50",
}
NO_ANSWER = "no run was seen; not every container answered\n"


def outcome(state: str, record: dict[str, Any] | None) -> str:
    """Say how a run stands: ``finished``, ``failed: exit status 1 (the error)``."""
    if state == "lost":
        return "lost: the process is gone and left no exit.json"
    if state == "never-started":
        return "never started: no process.json"
    if record is None or state not in ("failed", "killed"):
        return state
    if state == "killed":  # "error" is only the last line of the log then
        memory = ", out of memory" if record.get("oom_kill") else ""
        return f"failed: killed by {signal_name(record.get('signal'))}{memory}"
    why = f" ({record['error']})" if record.get("error") else ""
    return f"failed: exit status {record.get('rc')}{why}"


def signal_name(number: object) -> str:
    """Return ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(int(str(number))).name})"
    except ValueError:
        return f"signal {number}"


def progress(step: dict[str, Any] | None, record: dict[str, Any] | None = None) -> str:
    """Return ``120/6500`` of a step event; of an ended run the last step that its record names."""
    last = (record or {}).get("last_step") or (step or {}).get("step")
    if last is None:
        return "-"
    total = (step or {}).get("num_steps")
    return str(last) if total is None else f"{last}/{total}"


def evaluation_text(event: dict[str, Any]) -> str:
    """Return ``acceptance length 2.310 (2.100 to 2.520), best 2.400 at step 500``."""
    parts = [f"acceptance length {_acceptance(event)}"]
    datasets = event.get("datasets") or {}
    if len(datasets) > 1:
        parts += [f"{name} {_acceptance(measured)}" for name, measured in datasets.items()]
    if event.get("ema"):
        parts.append(f"average of the weights {_acceptance(event['ema'])}")
    if event.get("best_step") is not None:
        best = figure(event.get("best_acceptance_length"), ".3f")
        parts.append(f"best {best} at step {event['best_step']}")
    return ", ".join(parts)


def _acceptance(measured: dict[str, Any]) -> str:
    length = figure(measured.get("acceptance_length"), ".3f")
    interval = measured.get("acceptance_length_interval")
    if not interval:
        return length
    low, high = (figure(edge, ".3f") for edge in interval)
    return f"{length} ({low} to {high})"


def ktok(step: dict[str, Any]) -> str:
    """Return thousands of tokens a second of a step event."""
    rate = step.get("tokens_per_s")
    return figure(rate / 1000 if isinstance(rate, int | float) else None, ".2f")


def status_table(runs: Sequence[RunStatus]) -> str:
    """Return one line a run."""
    headers = ("PLACE", "TAG", "STATE", "STEP", "LOSS", "Ktok/s", "ETA", "EVENT", "CHECKPOINT")
    rows = [(run.place, run.tag, run.state, *_figures(run), run.last_checkpoint) for run in runs]
    return format_table(headers, rows)


def status_lines(run: RunStatus) -> str:
    """Return what is known of one run, a line each."""
    record = run.exit or {}
    step = run.step or {}
    facts: list[tuple[str, object]] = [
        ("run", f"{run.tag} on {run.place}"),
        ("state", outcome(run.state, run.exit)),
        ("step", progress(run.step, run.exit)),
        ("loss", figure(step.get("loss"), ".4f")),
        ("speed", f"{ktok(step)} Ktok/s"),
        ("last event", _ago(run.last_event_age_s)),
        ("last log line", _ago(run.log_age_s)),
        ("last checkpoint", run.last_checkpoint or record.get("last_checkpoint") or "none"),
        ("release", (run.release or "-")[:12]),
    ]
    if run.state == "running":
        facts.insert(5, ("ETA", duration(step.get("eta_s"))))
    if run.evaluation and run.evaluation.get("acceptance_length") is not None:
        facts.append(("acceptance", figure(run.evaluation["acceptance_length"], ".3f")))
    if run.state in _NEXT:
        facts.append(("next", f"dflashctl {_NEXT[run.state]} {run.tag}"))
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name.ljust(width)}  {value}\n" for name, value in facts)


def runs_table(rows: Sequence[RunRow]) -> str:
    """Return the list of runs, oldest first."""
    headers = ("TAG", "PLACE", "STATE", "STEP", "CREATED", "HERE")
    table = [
        (
            row.tag,
            row.place or "-",
            row.state,
            progress(row.status.step, row.status.exit) if row.status else "-",
            _date(row.created_unix_s),
            row.here or "-",
        )
        for row in rows
    ]
    return format_table(headers, table)


def failure_lines(failures: Sequence[PlaceFailure]) -> str:
    """Return a line for each container that gave no answer, for stderr."""
    lines = []
    for failure in failures:
        lines.append(f"error[{failure.code}]: {failure.place}: {failure.message}\n")
        if failure.hint:
            lines.append(f"  hint: {failure.hint.splitlines()[0]}\n")
    return "".join(lines)


def _figures(run: RunStatus) -> tuple[str, str, str, str, str]:
    step = run.step or {}
    eta = duration(step.get("eta_s")) if run.state == "running" else "-"
    loss = figure(step.get("loss"), ".4f")
    return progress(run.step, run.exit), loss, ktok(step), eta, _ago(run.last_event_age_s)


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{duration(seconds)} ago"


def _date(unix_s: float | None) -> str:
    if unix_s is None:
        return "-"
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M")
