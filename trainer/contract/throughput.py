"""Whether a run has become much slower than it was: its latest rates against its own earlier ones.

The trainer asks after each step, ``dflashctl watch`` after each step event. A kernel that fell back
to a dense form, a neighbour on the GPU, heat or a slow disk all look like this. Batches of short
and of long rows have rates of their own, so two things must have fallen: most of the latest steps,
and all of them together, below the lowest that such steps had together before.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median, median_high

FALL_FRAC = 0.7  # of the usual rate; below it the run has fallen,
BACK_FRAC = 0.85  # and only above this one it is back
RECENT_S = 30.0  # a fall is told within twice this, where three steps take no longer
MIN_RECENT = 3  # steps
MIN_USUAL = 20
NUM_USUAL = 500
_SHORTEST_S = 1.0  # steps shorter than this are counted together


@dataclass(frozen=True)
class Fall:
    """Tokens a second: now, and what this run usually had before."""

    now: float
    usual: float

    def __str__(self) -> str:
        share = f"{100 * self.now / self.usual:.0f} % of this run's own {self.usual / 1000:.2f}"
        return f"{self.now / 1000:.2f} Ktok/s, {share}"


@dataclass(frozen=True)
class _Interval:
    """A step, or several short ones. at_s: its end by the caller's clock."""

    at_s: float
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class _Rates:
    """Of one step, and of the RECENT_S that end with it."""

    at_s: float
    step: float
    together: float


class Throughput:
    """Rates of one run, by a clock of seconds that the caller chooses.

    fall: what is wrong now; None where nothing is, or too little is known.
    """

    def __init__(self) -> None:
        self.fall: Fall | None = None
        self._last: tuple[float, float] | None = None  # (clock, tokens) where the interval began
        self._pause_s = 0.0
        self._recent: deque[_Interval] = deque()
        self._pending: deque[_Rates] = deque()  # of the last RECENT_S: a fall may have begun
        self._usual: deque[_Rates] = deque(maxlen=NUM_USUAL)

    def begin(self) -> None:
        """Forget where the interval began: a process starts, nothing was trained meanwhile."""
        self._last = None

    def pause(self, seconds: float) -> None:
        """Leave out seconds of the present interval: an evaluation, a checkpoint."""
        self._pause_s += seconds

    def note(self, at_s: float, tokens_total: float) -> None:
        """Take the tokens trained on since the run began, at ``at_s`` of the clock."""
        if self._last is not None:
            if at_s < self._last[0]:  # the clock was set back: what came before has no place in it
                self._recent.clear()
                self._pending.clear()
            seconds = at_s - self._last[0] - self._pause_s
            if 0 <= seconds < _SHORTEST_S:
                return
            if seconds > 0 and tokens_total > self._last[1]:
                self._take(_Interval(at_s, tokens_total - self._last[1], seconds))
        self._last, self._pause_s = (at_s, tokens_total), 0.0

    def _take(self, interval: _Interval) -> None:
        recent = self._recent
        recent.append(interval)
        while len(recent) > MIN_RECENT and recent[0].at_s <= interval.at_s - RECENT_S:
            recent.popleft()
        if len(recent) < MIN_RECENT:
            return
        now = _Rates(interval.at_s, interval.rate, _together(recent))
        if self.fall is None:
            self._remember(now)
        if len(self._usual) < MIN_USUAL:
            return
        if self._is_low(now):
            self.fall = Fall(now.together, median(one.together for one in self._usual))
            self._pending.clear()  # what has fallen never becomes the usual
        elif self.fall is not None:
            self.fall = None
            recent.clear()

    def _remember(self, now: _Rates) -> None:
        self._pending.append(now)
        while len(self._pending) > 1 and self._pending[0].at_s <= now.at_s - RECENT_S:
            self._usual.append(self._pending.popleft())

    def _is_low(self, now: _Rates) -> bool:
        low = min(one.together for one in self._usual)
        if self.fall is not None:
            return now.together < BACK_FRAC * low
        most = median_high(one.rate for one in self._recent)
        usual = median(one.step for one in self._usual)
        return now.together < FALL_FRAC * low and most < FALL_FRAC * usual


def _together(intervals: deque[_Interval]) -> float:
    """Return the rate of all but the slowest: a hiccup is no fall."""
    slowest = min(intervals, key=lambda one: one.rate)
    others = [one for one in intervals if one is not slowest]
    return sum(one.tokens for one in others) / sum(one.seconds for one in others)
