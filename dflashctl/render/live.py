"""The live view of a run: one screen, redrawn at most four times a second, never taller than it.

``screen_lines`` makes the picture of a RunView as lines of text; ``LiveWatch`` keeps it on the
alternate screen of a terminal. Text from the run is shown as it is, never read as markup.
"""

import threading
import time
from typing import TYPE_CHECKING, Any

from dflashctl.event_stream import Item
from dflashctl.render.failure import safe_text
from dflashctl.render.runs import evaluation_text, ktok, progress
from dflashctl.render.tables import duration, figure, size
from dflashctl.run_view import RunView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

REFRESH_PER_S = 4
_BLOCKS = "▁▂▃▄▅▆▇█"

Line = tuple[str, str]  # text and style


def screen_lines(view: RunView, mono_s: float, width: int, height: int) -> list[Line]:
    """Return the picture as at most ``height`` lines; the log takes what the figures leave."""
    told = [
        *_head(view, width),
        *_figures(view, mono_s, width),
        *_memory(view, width),
        *[(f"! {alert.text}", "bold red") for alert in view.alerts(mono_s)],
        *[(f"experiment: {name}", "yellow") for name in view.experiments],
        *[(f"warning: {text}", "yellow") for text in view.warnings],
        *[(text, "dim") for text in view.notes],
    ]
    # Words of the trainer and of the links; the log's lines are clean already.
    fixed = [(safe_text(text.replace("\n", " ")), style) for text, style in told][:height]
    room = height - len(fixed) - 1
    if room < 1:
        return fixed
    title = " log ".center(width, "─")
    return [*fixed, (title, "dim"), *[(line, "") for line in view.log_tail[-room:]]]


def sparkline(values: list[float], width: int) -> str:
    """Return the last ``width`` values as block characters between their least and greatest."""
    shown = values[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def _head(view: RunView, width: int) -> list[Line]:
    state = view.ended.state if view.ended else view.link or view.process or "connecting"
    where = f"{view.tag} on {view.place}"
    phase = view.phase or ("train" if view.step else "starting")
    step, total = view.step.get("step"), view.step.get("num_steps")
    lines = [(f"{where}   {state}   phase {phase}", "bold")]
    if view.step:
        eta = duration(view.step.get("eta_s"))
        lines.append((f"step {progress(view.step)}   ETA {eta}", ""))
    if isinstance(step, int) and isinstance(total, int) and total > 0:
        done = min(1.0, step / total)
        share = f" {100 * done:5.1f} %"
        num_cells = max(1, width - len(share))
        full = int(done * num_cells)
        lines.append(("█" * full + "░" * (num_cells - full) + share, "green"))
    return lines


def _figures(view: RunView, mono_s: float, width: int) -> list[Line]:
    def of(key: str, pattern: str) -> str:
        return figure(view.step.get(key), pattern)

    age_s = view.age_s(mono_s)
    loss = (
        f"loss {of('loss', '.4f')}   lr {of('lr', '.2e')}   grad norm {of('grad_norm', '.3f')}   "
    )
    speed = f"{ktok(view.step)} Ktok/s   {of('anchors_per_s', '.0f')} anchors/s"
    pace = f"{of('step_s', '.3f')} s/step   epoch {of('epoch', '.3g')}"
    target, drafter = of("target_wait_s", ".3f"), of("drafter_wait_s", ".3f")
    waiting = view.step.get("q_hs_bytes")
    held = f" ({size(waiting)})" if isinstance(waiting, int) else ""
    expected = f"{of('expected_accepted', '.3f')} (teacher-forced estimate)"
    compiles = f"compiles {view.num_compiles} ({duration(view.compile_s)})"
    last = f"last event {duration(age_s)}{' ago' if age_s is not None else ''}"
    running = [
        (loss + sparkline(list(view.losses), max(0, min(40, width - len(loss)))), ""),
        (f"slot accuracy {of('slot_accuracy', '.3f')}   expected accepted {expected}", ""),
        (f"{speed}   {pace}", ""),
        (f"q_hs {of('q_hs', '.3g')}{held}   waits: target {target} s, drafter {drafter} s", ""),
    ]
    notes = (f"{compiles}   checkpoint {view.checkpoint.get('step', '-')}   {last}", "")
    return [*(running if view.step else []), notes, *_evaluation(view.evaluation)]


def _evaluation(event: dict[str, Any]) -> list[Line]:
    return [(evaluation_text(event), "cyan")] if event.get("acceptance_length") is not None else []


def _memory(view: RunView, width: int) -> list[Line]:
    """Return the devices, as many on a line as fit."""
    cells = [
        f"{device.name if len(device.name) > 2 else 'GPU ' + device.name}"
        f" {size(device.memory_bytes)} (peak {size(device.peak_bytes)})"
        for device in view.devices
    ]
    if not cells:
        return []
    cell_width = max(map(len, cells)) + 3
    num_columns = max(1, width // cell_width)
    rows = [cells[i : i + num_columns] for i in range(0, len(cells), num_columns)]
    return [("".join(cell.ljust(cell_width) for cell in row).rstrip(), "magenta") for row in rows]


class LiveWatch:
    """Shows a RunView on the alternate screen while entered; leaves the terminal as it was."""

    def __init__(self, view: RunView, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._view = view
        self._lock = threading.Lock()
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=self.picture,
            console=self._console,
            screen=True,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def take(self, item: Item, mono_s: float) -> None:
        """Take one item of the stream."""
        with self._lock:
            self._view.update(item, mono_s)

    def picture(self) -> "Text":
        """Return the whole screen."""
        from rich.text import Text

        width, height = self._console.size
        with self._lock:
            lines = screen_lines(self._view, time.monotonic(), width, height - 1)
        screen = Text(no_wrap=True, overflow="ellipsis", end="")
        for index, (text, style) in enumerate(lines):
            line = Text(text, style=style)
            line.truncate(width, overflow="ellipsis")
            screen.append_text(line)
            if index < len(lines) - 1:
                screen.append("\n")
        return screen

    def __enter__(self) -> "LiveWatch":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
