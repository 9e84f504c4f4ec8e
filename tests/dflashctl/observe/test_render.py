"""What a person sees: tables, plain lines, the live screen; hostile text stays text."""

import io
import json

import pytest
from rich.console import Console

from dflashctl.event_stream import Ended, Heartbeat, Item, LogBytes, Notice, RunEvent
from dflashctl.render.live import LiveWatch, screen_lines, sparkline
from dflashctl.render.log import log_writer
from dflashctl.render.plain import PlainWatch, receipt, stream_line
from dflashctl.render.runs import outcome
from dflashctl.render.tables import duration, format_table, size
from dflashctl.run_view import RunView
from trainer.contract.exit_record import ExitRecord

KILLED = ExitRecord("r", "killed", None, 9, 1.0, 2.0, 120, "step_00000100", oom_kill=False)


def step(number: int, **values: object) -> RunEvent:
    head = {"v": 1, "seq": number, "t_unix_s": 1000.0, "run_id": "r", "kind": "step"}
    return RunEvent(head | {"step": number, "num_steps": 200, "loss": 2.5} | values)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.6, "1m00s"),
        (725, "12m05s"),
        (11520, "3h12m"),
        (187200, "2d04h"),
    ],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(None, "-"), (3, "3 B"), (2048, "2 KiB"), (23729733632, "22.1 GiB")]
)
def test_sizes_are_short(num_bytes: float | None, text: str) -> None:
    assert size(num_bytes) == text


def test_a_table_is_aligned_and_numbers_stand_right() -> None:
    table = format_table(("NAME", "N"), [("a", 5), ("bcdef", 1234), ("x", None)])
    assert table == "NAME      N\na         5\nbcdef  1234\nx         -\n"
    assert format_table(("A", "B"), []) == "A  B\n"


def test_a_run_killed_by_sigkill_is_said_to_have_failed_with_its_signal() -> None:
    assert outcome("killed", vars(KILLED)) == "failed: killed by signal 9 (SIGKILL)"
    assert outcome("failed", {"rc": 1, "error": "CUDA lost"}) == "failed: exit status 1 (CUDA lost)"
    out_of_memory = {"signal": 9, "oom_kill": True, "error": "the last line of the log"}
    assert outcome("killed", out_of_memory).endswith("signal 9 (SIGKILL), out of memory")
    assert outcome("finished", {"rc": 0}) == "finished"
    assert outcome("lost", None).startswith("lost: ")


def test_the_receipt_tells_how_the_run_ended_and_where_to_go_on() -> None:
    view = RunView("fresh7", "kpro6/200")
    view.update(step(118), 0.0)  # not every step is told as an event
    view.update(Ended("killed", KILLED), 0.0)
    assert receipt(view) == (
        "run fresh7 failed: killed by signal 9 (SIGKILL); step 120/200, loss 2.5000;"
        " last checkpoint step_00000100\n"
    )


def plain(items: list[tuple[Item, float]]) -> tuple[list[str], list[str]]:
    out: list[str] = []
    err: list[str] = []
    lines = PlainWatch(RunView("fresh7", "kpro6/200"), out.append, err.append)
    for item, mono_s in items:
        lines.take(item, mono_s)
    return [line[10:].split("  ")[0].strip() for line in out], err


def test_without_a_terminal_the_past_is_one_line_and_steps_come_every_ten_seconds() -> None:
    past: list[tuple[Item, float]] = [(step(n), 0.0) for n in range(1, 51)]
    beat = Heartbeat(1000.0, "alive")
    present: list[tuple[Item, float]] = [
        *[(beat, 0.1), (step(51), 1.0), (step(52), 9.0), (step(53), 10.2), (step(54), 11.0)],
        (Ended("finished", None), 12.0),
    ]
    said, _ = plain([*past, *present])
    assert said == ["step 50/200", "step 53/200", "step 54/200"]


def test_an_event_that_is_no_step_is_said_at_once_after_the_step_before_it() -> None:
    other = RunEvent({"v": 1, "seq": 9, "t_unix_s": 1.0, "run_id": "r", "kind": "checkpoint"})
    said, _ = plain([(Heartbeat(1.0, "alive"), 0.0), (step(1), 0.0), (step(2), 1.0), (other, 1.0)])
    assert said == ["step 1/200", "step 2/200", "checkpoint"]


def test_alerts_and_notices_go_to_stderr_once() -> None:
    bad = step(7, loss=None)
    beat = Heartbeat(1000.0, "alive")
    _, err = plain([(bad, 0.0), (beat, 1.0), (beat, 3.0), (Notice("disconnected", "gone"), 4.0)])
    assert err == ["alert: loss was not finite in 1 step events, last at step 7\n", "gone\n"]


def test_json_lines_hold_events_notices_and_the_end_and_nothing_else() -> None:
    items: list[Item] = [
        LogBytes(b"x"),
        Heartbeat(1.0, "alive"),
        step(3),
        Notice("truncated", "the log was truncated"),
        Ended("killed", KILLED),
    ]
    lines = [json.loads(line) for item in items if (line := stream_line(item)) is not None]
    assert [(line["schema"], line["type"], line["ok"]) for line in lines] == [
        (1, "event", True),
        (1, "notice", True),
        (1, "ended", False),
    ]
    assert lines[0]["event"]["step"] == 3
    assert lines[2]["exit"]["signal"] == 9


def full_view() -> RunView:
    view = RunView("fresh7", "kpro6/200")
    memory = [1.8e10] * 8
    more = {"memory_bytes": memory, "q_hs": 3, "q_hs_bytes": 3 << 29}
    view.update(RunEvent(step(50).event | more), 0.0)
    hostile = b"INFO copying [/srv/x] [bold]b[/bold] \x1b]0;owned\x07\x1b[2J:smile:\n"
    view.update(LogBytes(hostile * 300), 0.0)
    return view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (20, 5), (10, 2), (80, 1)])
def test_the_screen_is_never_taller_than_the_terminal(width: int, height: int) -> None:
    assert len(screen_lines(full_view(), 0.0, width, height)) <= height


def test_the_screen_shows_the_figures_and_the_end_of_the_log() -> None:
    text = "\n".join(line for line, _ in screen_lines(full_view(), 0.0, 80, 24))
    for part in (
        "fresh7 on kpro6/200",
        "step 50/200",
        "25.0 %",
        "q_hs 3 (1.5 GiB)",
        "GPU 7 16.8 GiB",
    ):
        assert part in text
    assert text.endswith("INFO copying [/srv/x] [bold]b[/bold] :smile:")


def test_markup_and_escapes_of_the_log_reach_the_terminal_as_text() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, markup=False, emoji=False)
    with LiveWatch(full_view(), console) as screen:
        screen.take(LogBytes(b"the end [/]\n"), 0.0)
    shown = out.getvalue()
    assert "copying [/srv/x] [bold]b[/bold] :smile:" in shown
    assert "owned" not in shown
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1


def test_the_screen_is_left_when_watching_breaks() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    with pytest.raises(KeyboardInterrupt), LiveWatch(full_view(), console):
        raise KeyboardInterrupt
    assert out.getvalue().count("\x1b[?1049l") == 1


def test_a_sparkline_spans_from_the_least_to_the_greatest() -> None:
    assert sparkline([1.0, 2.0, 8.0], 10) == "▁▂█"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([1.0], 10) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_log_is_cleaned_on_a_terminal() -> None:
    terminal = Terminal()
    write = log_writer(terminal)
    write(b"\x1b[31mred")
    write(b"\x1b[0m\nnext\n")
    assert terminal.getvalue() == "red\nnext\n"


def test_the_log_goes_into_a_pipe_byte_for_byte() -> None:
    raw = io.BytesIO()
    pipe = io.TextIOWrapper(raw, encoding="ascii")
    log_writer(pipe)(b"\x1b[31m\xff\r\n")
    assert raw.getvalue() == b"\x1b[31m\xff\r\n"
