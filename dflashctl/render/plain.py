"""Watching without a terminal: a line for each thing that happened, steps at most every 10 s."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from dflashctl.event_stream import Ended, Heartbeat, Item, Notice, RunEvent
from dflashctl.render.document import document
from dflashctl.render.runs import evaluation_text, ktok, outcome, progress
from dflashctl.render.tables import duration, figure
from dflashctl.run_view import RunView

STEP_LINE_EVERY_S = 10.0


def step_text(step: dict[str, Any]) -> str:
    """Return the figures of a step event on one line."""

    def of(key: str, pattern: str) -> str:
        return figure(step.get(key), pattern)

    parts = [
        f"step {progress(step)}",
        f"loss {of('loss', '.4f')}",
        f"lr {of('lr', '.2e')}",
        f"grad {of('grad_norm', '.3f')}",
        f"{ktok(step)} Ktok/s",
        f"{of('anchors_per_s', '.0f')} anchors/s",
        f"q_hs {of('q_hs', '.3g')}",
        f"waits target {of('target_wait_s', '.2f')} drafter {of('drafter_wait_s', '.2f')} s",
        f"ETA {duration(step.get('eta_s'))}",
    ]
    return "  ".join(parts)


def event_text(event: dict[str, Any]) -> str:
    """Return one event in words: its kind, then its own keys."""
    if event["kind"] == "step":
        return step_text(event)
    if event["kind"] == "eval":
        return f"eval  step {event.get('step', '-')}  {evaluation_text(event)}"
    skip = ("v", "seq", "t_unix_s", "run_id", "kind")
    told = {key: value for key, value in event.items() if key not in skip and value is not None}
    if event["kind"] in told:  # a phase names itself
        told = {event["kind"]: told.pop(event["kind"])} | told
        return "  ".join(f"{key} {value}" for key, value in told.items())
    return "  ".join([event["kind"], *(f"{key} {value}" for key, value in told.items())])


def receipt(view: RunView) -> str:
    """Return the one line that stays when a run has ended."""
    ended = view.ended
    if ended is None:
        return ""
    record = None if ended.record is None else vars(ended.record)
    facts = [f"run {view.tag} {outcome(ended.state, record)}"]
    if view.step:
        loss = figure(view.step.get("loss"), ".4f")
        facts.append(f"step {progress(view.step, record)}, loss {loss}")
    if record is not None and record["last_checkpoint"]:
        facts.append(f"last checkpoint {record['last_checkpoint']}")
    return "; ".join(facts) + "\n"


class PlainWatch:
    """Writes lines for people; ``write`` takes text, ``warn`` what does not belong to the data."""

    def __init__(
        self, view: RunView, write: Callable[[str], object], warn: Callable[[str], object]
    ) -> None:
        self._view = view
        self._write = write
        self._warn = warn
        self._next_mono_s = 0.0
        self._unsaid: dict[str, Any] | None = None  # a step that was not worth a line of its own
        self._caught_up = False  # the first beat comes after all that happened before
        self._alerts: set[str] = set()

    def take(self, item: Item, mono_s: float) -> None:
        """Take one item: update the view and write what is worth a line."""
        self._view.update(item, mono_s)
        if isinstance(item, RunEvent):
            self._take_event(item.event, mono_s)
        elif isinstance(item, Notice):
            if item.kind != "strayed":  # which is an alert
                self._warn(f"{item.text}\n")
        elif isinstance(item, Ended):
            self._flush()
        elif isinstance(item, Heartbeat):
            self._caught_up = True
            self._flush_when_due(mono_s)
            self._say_alerts(mono_s)

    def _take_event(self, event: dict[str, Any], mono_s: float) -> None:
        if event["kind"] == "step":
            self._unsaid = event
            if self._caught_up:
                self._flush_when_due(mono_s)
        else:
            self._flush()
            self._line(event)

    def _flush_when_due(self, mono_s: float) -> None:
        if self._unsaid is not None and mono_s >= self._next_mono_s:
            self._next_mono_s = mono_s + STEP_LINE_EVERY_S
            self._flush()

    def _flush(self) -> None:
        if self._unsaid is not None:
            self._line(self._unsaid)
            self._unsaid = None

    def _line(self, event: dict[str, Any]) -> None:
        when = datetime.fromtimestamp(event.get("t_unix_s") or 0.0).astimezone()
        self._write(f"{when:%H:%M:%S}  {event_text(event)}\n")

    def _say_alerts(self, mono_s: float) -> None:
        """Say an alert when it begins; one that goes away may begin again."""
        now = {alert.kind: alert.text for alert in self._view.alerts(mono_s)}
        for kind, text in now.items():
            if kind not in self._alerts and kind != "link":  # the notice said it
                self._warn(f"alert: {text}\n")
        self._alerts = set(now)


def stream_line(item: Item) -> str | None:
    """Return the JSON line of an item for ``watch --json``; None for what is not worth one."""
    if isinstance(item, RunEvent):
        return document({"type": "event", "event": item.event})
    if isinstance(item, Notice):
        return document({"type": "notice", "kind": item.kind, "text": item.text})
    if isinstance(item, Ended):
        record = None if item.record is None else vars(item.record)
        good = item.state in ("finished", "stopped")
        return document({"type": "ended", "state": item.state, "exit": record}, ok=good)
    return None
