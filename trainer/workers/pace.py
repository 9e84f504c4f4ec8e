"""What target threads need a batch: which one is much slower than the others, what is usual.

A slow one has a hot, shared or broken GPU.
"""

import statistics
import threading
from collections import defaultdict, deque

_WINDOW = 8  # batches; the median of fewer says little
_TIMES_SLOWER = 3.0


class PaceWatch:
    """What a token costs each target thread, over its last batches; any thread may call it.

    usual_s: seconds of a batch, the median of the last of all threads; None before the first.
    """

    def __init__(self) -> None:
        self.usual_s: float | None = None
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()
        self._costs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._told: set[str] = set()

    @property
    def slow(self) -> frozenset[str]:
        """The threads that were told to be slow."""
        with self._lock:
            return frozenset(self._told)

    def note(self, name: str, seconds: float, num_tokens: int) -> str | None:
        """Count a batch; returns a text once for a thread 3 times slower than the median.

        The median is that of the other threads, so that two threads can be told apart too.
        """
        with self._lock:
            self._seconds.append(seconds)
            self.usual_s = statistics.median(self._seconds)
            self._costs[name].append(seconds / max(num_tokens, 1))
            if name in self._told or len(self._costs[name]) < _WINDOW:
                return None
            others = [
                statistics.median(costs)
                for other, costs in self._costs.items()
                if other != name and len(costs) == _WINDOW
            ]
            own = statistics.median(self._costs[name])
            if not others or own <= _TIMES_SLOWER * statistics.median(others):
                return None
            self._told.add(name)
        times = own / max(statistics.median(others), 1e-12)
        return (
            f"{name} needs {own * 1e6:.1f} us a token, {times:.1f} times the median of the other"
            " target threads; look at its GPU (clocks, heat, another process) with nvidia-smi"
        )
