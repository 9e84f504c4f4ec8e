"""How an evaluation in training is shown: in lines, and on the live screen."""

from typing import Any

from dflashctl.event_stream import RunEvent
from dflashctl.remote.collect import RECORDS
from dflashctl.render.live import screen_lines
from dflashctl.render.plain import event_text
from dflashctl.run_view import RunView


def _measured(length: float) -> dict[str, Any]:
    interval = [length - 0.25, length + 0.25]
    return {"acceptance_length": length, "acceptance_length_interval": interval}


EVENT: dict[str, Any] = {
    "v": 1,
    "seq": 9,
    "t_unix_s": 1000.0,
    "run_id": "r",
    "kind": "eval",
    "step": 500,
    **_measured(2.5),
    "datasets": {"math": _measured(3.0), "chat": _measured(2.0)},
    "ema": _measured(2.75),
    "best_step": 400,
    "best_acceptance_length": 2.8125,
}
TEXT = (
    "acceptance length 2.500 (2.250 to 2.750), math 3.000 (2.750 to 3.250),"
    " chat 2.000 (1.750 to 2.250), average of the weights 2.750 (2.500 to 3.000),"
    " best 2.812 at step 400"
)


def test_an_evaluation_is_told_on_one_line_with_its_data_sets() -> None:
    assert event_text(EVENT) == f"eval  step 500  {TEXT}"


def test_the_live_screen_keeps_the_last_evaluation() -> None:
    view = RunView("x", "kpro6/200")
    view.update(RunEvent(EVENT), 0.0)
    assert (TEXT, "cyan") in screen_lines(view, 0.0, 200, 30)


def test_what_an_older_trainer_did_not_measure_is_left_out() -> None:
    old = {"kind": "eval", "step": 5, "acceptance_length": 1.5, "ema": None}
    assert event_text(old) == "eval  step 5  acceptance length 1.500"
    assert "acceptance length -" in event_text({"kind": "eval"})


def test_the_record_of_the_evaluations_is_pulled_with_the_other_records() -> None:
    assert all(RECORDS.match(name) for name in ("evaluations.json", "evaluation.json"))
    assert not RECORDS.match("evaluations.json.partial")
