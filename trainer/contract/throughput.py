"""Whether a run has become much slower than it was: its latest rates against its own earlier ones.

The trainer asks after each step, ``dflashctl watch`` after each step event. A kernel that fell back
to a dense form, a neighbour on the GPU, heat or a slow disk all look like this.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median, median_high

FALL_FRAC = 0.7  # of the usual rate; below it the run has fallen,
BACK_FRAC = 0.85  # and only above this one it is back
RECENT_S = 30.0  # a fall is told within twice this, where three steps take no longer
MIN_RECENT = 3  # rates; the median of them is not that of one slow step
MIN_USUAL = 20
NUM_USUAL = 200
_SHORTEST_S = 1.0  # steps shorter than this are counted together


@dataclass(frozen=True)
class Fall:
    """Tokens a second: now, and what this run usually had before."""

    now: float
    usual: float

    def __str__(self) -> str:
        share = f"{100 * self.now / self.usual:.0f} % of this run's own {self.usual / 1000:.2f}"
        return f"{self.now / 1000:.2f} Ktok/s, {share}"


class Throughput:
    """Rates of one run, by a clock of seconds that the caller chooses.

    fall: what is wrong now; None where nothing is, or too little is known.
    """

    def __init__(self) -> None:
        self.fall: Fall | None = None
        self._last: tuple[float, float] | None = None  # (clock, tokens) where the interval began
        self._pause_s = 0.0
        self._recent: deque[tuple[float, float]] = deque()  # (clock at its end, rate)
        self._usual: deque[float] = deque(maxlen=NUM_USUAL)

    def begin(self) -> None:
        """Forget where the interval began: a process starts, nothing was trained meanwhile."""
        self._last = None

    def pause(self, seconds: float) -> None:
        """Leave out seconds of the present interval: an evaluation, a checkpoint."""
        self._pause_s += seconds

    def note(self, at_s: float, tokens_total: float) -> None:
        """Take the tokens trained on since the run began, at ``at_s`` of the clock."""
        if self._last is not None:
            seconds = at_s - self._last[0] - self._pause_s
            if 0 <= seconds < _SHORTEST_S:
                return
            if seconds > 0 and tokens_total > self._last[1]:
                self._take(at_s, (tokens_total - self._last[1]) / seconds)
        self._last, self._pause_s = (at_s, tokens_total), 0.0

    def _take(self, at_s: float, rate: float) -> None:
        recent, usual = self._recent, self._usual
        recent.append((at_s, rate))
        while len(recent) > MIN_RECENT and recent[0][0] <= at_s - RECENT_S:
            _, old = recent.popleft()
            # What has fallen never becomes the usual.
            if len(usual) < MIN_USUAL or old >= FALL_FRAC * median(usual):
                usual.append(old)
        if len(usual) < MIN_USUAL or len(recent) < MIN_RECENT:
            return
        least = FALL_FRAC if self.fall is None else BACK_FRAC
        # The higher one of two in the middle: more than half of the time was slow.
        found = Fall(median_high(rate for _, rate in recent), median(usual))
        self.fall = found if found.now < least * found.usual else None
