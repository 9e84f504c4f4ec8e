"""Progress of long work on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

_BAR_WIDTH = 24
_TERMINAL_S, _LOG_S = 0.2, 5.0  # seconds between two lines


class Progress:
    """Counts towards ``total``; ``advance`` prints when it is time to."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._terminal = sys.stderr.isatty()
        self._began = self._told = time.monotonic()
        self._skipped = 0

    def skip(self, count: int) -> None:
        """Count what an earlier run has done; it says nothing about the speed."""
        self._done += count
        self._skipped += count

    def advance(self, count: int, note: str = "") -> None:
        """Count what was done; ``note`` is shown behind."""
        self._done += count
        now = time.monotonic()
        finished = self._done >= self._total
        if finished or now - self._told >= (_TERMINAL_S if self._terminal else _LOG_S):
            self._told = now
            self._print(now - self._began, note, finished=finished)

    def _print(self, elapsed_s: float, note: str, *, finished: bool) -> None:
        share = self._done / self._total if self._total else 1.0
        per_s = (self._done - self._skipped) / max(elapsed_s, 1e-9)
        left_s = (self._total - self._done) / per_s if per_s > 0 else 0.0
        time_told = f"{elapsed_s:.1f} s" if finished else f"eta {left_s:.0f} s"
        text = (
            f"{self._label}: {self._done:,}/{self._total:,} {self._unit}  {share:.0%}"
            f"  {per_s:,.0f}/s  {time_told}  {note}"
        ).rstrip()
        if self._terminal:
            bar = "#" * round(share * _BAR_WIDTH)
            text = f"\r[{bar:<{_BAR_WIDTH}}] {text}\x1b[K"
        sys.stderr.write(text + ("\n" if finished or not self._terminal else ""))
        sys.stderr.flush()
