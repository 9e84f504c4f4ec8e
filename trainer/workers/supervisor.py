"""Starts the worker threads, watches them, and ends them together.

The first error of any thread is the run's error and is told with the thread's name; all others wake
and leave. A thread that makes no progress is reported with every stack, and ends the run after the
limit. The main thread only waits here, in small pieces, so that signals land.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.compile_gate import CompileGate
from trainer.errors import ChannelClosedError, WorkerError
from trainer.stacks import stacks

_POLL_S = 0.1
_LEAVE_S = 20.0


class Pulse:
    """What a worker does now and since when; a wait on others is no standstill of its own."""

    def __init__(self) -> None:
        self.beat("starts")

    def beat(self, what: str) -> None:
        """Say that work on ``what`` begins."""
        self._tell(what, waiting=False)

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Mark a wait on other threads."""
        self._tell(what, waiting=True)
        yield
        self.beat(f"after: {what}")

    def _tell(self, what: str, *, waiting: bool) -> None:
        # The time first: between two of these lines a long wait must not look like long work.
        self.since = time.monotonic()
        self.what = what
        self.waiting = waiting

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.since


@dataclass
class _Worker:
    thread: threading.Thread
    pulse: Pulse


@dataclass(frozen=True)
class WatchSettings:
    """Seconds without progress after which stacks are reported, and after which the run ends."""

    watchdog_s: float = 120.0
    limit_s: float = 1800.0


@dataclass
class StopRequest:
    """Asked for by a signal: ``soft`` ends after the current step, ``hard`` leaves it at once."""

    soft: threading.Event = field(default_factory=threading.Event)
    hard: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> str:
        """Ask once for a soft stop, twice for a hard one; returns which it became."""
        if self.soft.is_set():
            self.hard.set()
            return "hard"
        self.soft.set()
        return "soft"


class Supervisor:
    """Runs worker threads to their end.

    ``abandon`` is called once, when a thread failed or a hard stop was asked for: it wakes whoever
    waits on another (closes channels, breaks barriers).
    """

    def __init__(
        self,
        gate: CompileGate,
        settings: WatchSettings,
        *,
        stop: StopRequest,
        abandon: Callable[[str, BaseException | None], None],
        report: Callable[[str], object],
    ) -> None:
        self._gate, self._settings, self._stop = gate, settings, stop
        self._abandon, self._report = abandon, report
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._failure: tuple[str, BaseException] | None = None
        self._abandoned = False
        self._reported_s = 0.0

    def add(self, name: str, run: Callable[[Pulse], None]) -> None:
        """Add a worker; it starts with ``run_all``."""
        pulse = Pulse()

        def body() -> None:
            try:
                run(pulse)
            except ChannelClosedError as error:
                if not (self._abandoned or self._stop.soft.is_set()):
                    self.fail(name, error)
            except BaseException as error:  # noqa: BLE001 - every error ends the run, with its name
                self.fail(name, error)

        self._workers.append(_Worker(self._gate.spawn(body, name), pulse))

    def fail(self, name: str, error: BaseException) -> None:
        """Note a failure; only the first one counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = (name, error)
        self._leave(name, error)

    def run_all(self) -> None:
        """Start every worker and wait for all of them.

        Raises: WorkerError with the name of the thread that failed first and its error.
        """
        for worker in self._workers:
            worker.thread.start()
        while self._any_alive() and self._failure is None:
            time.sleep(_POLL_S)
            if self._stop.hard.is_set():
                self._leave("main", None)
                break
            self._look()
        give_up = time.monotonic() + _LEAVE_S
        while self._any_alive() and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        if self._failure is None and self._any_alive():
            names = ", ".join(w.thread.name for w in self._workers if w.thread.is_alive())
            self._failure = (names, TimeoutError(f"did not end within {_LEAVE_S:.0f} s"))
        if self._failure is not None:
            name, error = self._failure
            raise WorkerError(f"thread {name}: {type(error).__name__}: {error}") from error

    def _any_alive(self) -> bool:
        return any(worker.thread.is_alive() for worker in self._workers)

    def _leave(self, name: str, error: BaseException | None) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._abandoned = True
        self._abandon(name, error)

    def _look(self) -> None:
        """Report a worker that stands still by itself, or all when every one waits on another."""
        alive = [w for w in self._workers if w.thread.is_alive()]
        busy = [w for w in alive if not w.pulse.waiting]
        suspects = busy or alive
        if not suspects:
            return
        choose = max if busy else min
        worst = choose(suspects, key=lambda w: w.pulse.age_s)
        age, watchdog_s = worst.pulse.age_s, self._settings.watchdog_s
        if age < watchdog_s:
            self._reported_s = 0.0
            return
        how = "has made no progress" if busy else "waits, as all others do,"
        text = f"{worst.thread.name} {how} for {age:.0f} s ({worst.pulse.what})"
        if age >= self._settings.limit_s:
            self._report(f"{text}\n{stacks()}")
            self.fail(worst.thread.name, TimeoutError(f"{text}: longer than compile.limit_s"))
        elif age - self._reported_s >= watchdog_s:
            self._reported_s = age
            self._report(f"{text}\n{stacks()}")
