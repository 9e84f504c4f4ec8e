"""Starts the worker threads, watches them, and ends them together.

The first error of any thread is the run's error and is told with the thread's name; all others wake
and leave. A thread that makes no progress is reported with every stack, and ends the run after the
limit, unless others can do its work. The main thread only waits here, in small pieces, so that
signals land.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainer.compile_gate import CompileGate
from trainer.errors import ChannelClosedError, WorkerError
from trainer.stacks import stacks

_POLL_S = 0.1
_LEAVE_S = 20.0
_PAUSE_S = 5.0  # between two looks: the whole process was stopped, or starved
_NO_OTHER = "no other is left to take over"

State = Literal["stuck", "back"]


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


class Patience(NamedTuple):
    """Seconds without progress after which a worker is relieved, and after which the run ends.

    It ends only where nobody can take over.
    """

    relieve_s: float
    end_s: float


@dataclass(frozen=True)
class Relief:
    """How others make good for a worker that stands still.

    who, advice: names it, and what to do about it. take_over: gives its work to others, False where
    there are none. tell: gets that it is stuck or back, in words, and the seconds it stood still.
    """

    who: str
    advice: str
    patience: Callable[[], Patience]
    take_over: Callable[[], bool]
    tell: Callable[[State, str, float], None]


@dataclass
class _Worker:
    """A thread. stuck_since: of its pulse, once told. left_out: nobody waits for its end."""

    thread: threading.Thread
    pulse: Pulse
    relief: Relief | None = None
    stuck_since: float | None = None
    left_out: bool = False


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
        self._failure: tuple[tuple[str, ...], BaseException] | None = None  # of these threads
        self._abandoned = False
        self._reported_s = 0.0
        self._looked_s = self._excused_s = time.monotonic()

    def add(self, name: str, run: Callable[[Pulse], None], relief: Relief | None = None) -> None:
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

        self._workers.append(_Worker(self._gate.spawn(body, name), pulse, relief))

    def fail(self, name: str, error: BaseException) -> None:
        """Note a failure; only the first one counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = ((name,), error)
        self._leave(name, error)

    def run_all(self) -> None:
        """Start every worker and wait for all of them but those that are left out.

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
        for worker in self._workers:
            worker.left_out = worker.left_out or worker.stuck_since is not None
        give_up = time.monotonic() + _LEAVE_S
        while self._any_alive() and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        if self._failure is None and self._any_alive():
            names = tuple(worker.thread.name for worker in self._alive())
            self._failure = (names, TimeoutError(f"did not end within {_LEAVE_S:.0f} s"))
        if self._failure is not None:
            names, error = self._failure
            who = ", ".join(names)
            raise WorkerError(f"thread {who}: {type(error).__name__}: {error}") from error

    def at_fault(self) -> set[str]:
        """Return the threads that failed first or have not ended."""
        failed = set() if self._failure is None else set(self._failure[0])
        return failed | {w.thread.name for w in self._workers if w.thread.is_alive()}

    def _any_alive(self) -> bool:
        return bool(self._alive())

    def _alive(self) -> list[_Worker]:
        return [w for w in self._workers if w.thread.is_alive() and not w.left_out]

    def _leave(self, name: str, error: BaseException | None) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._abandoned = True
        self._abandon(name, error)

    def _look(self) -> None:
        """Report a worker that stands still by itself, or all when every one waits on another."""
        self._look_for_relief()
        alive = self._alive()
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

    def _look_for_relief(self) -> None:
        """Relieve workers that stand still, and take back those that go on."""
        now = time.monotonic()
        if self._gate.is_compiling or now - self._looked_s > _PAUSE_S:
            self._excused_s = now  # they waited for the compile, or did not run at all
        self._looked_s = now
        for worker in self._workers:
            if worker.relief is not None and worker.thread.is_alive():
                self._relieve(worker, worker.relief, now)

    def _relieve(self, worker: _Worker, relief: Relief, now: float) -> None:
        pulse = worker.pulse
        if worker.stuck_since is not None and worker.stuck_since != pulse.since:
            stood_s = pulse.since - worker.stuck_since
            worker.stuck_since, worker.left_out = None, False
            relief.tell("back", f"{relief.who} goes on after {stood_s:.0f} s", stood_s)
        if pulse.waiting:  # read before ``since``, see Pulse.beat
            return
        since, (relieve_s, end_s) = pulse.since, relief.patience()
        age = now - max(since, self._excused_s)
        if age < relieve_s:
            return
        worker.left_out = worker.left_out or relief.take_over()
        text = f"{relief.who} has made no progress for {age:.0f} s ({pulse.what})"
        if worker.stuck_since is None:
            worker.stuck_since = since
            then = "the others take over" if worker.left_out else _NO_OTHER
            relief.tell("stuck", f"{text}; {then}; {relief.advice}\n{stacks()}", age)
        if age >= end_s and not worker.left_out:
            text = f"{text}; {_NO_OTHER}; {relief.advice}, then resume the run"
            self.fail(worker.thread.name, TimeoutError(text))
