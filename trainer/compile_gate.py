"""The gate that every compile of the trainer passes: one thread compiles while nobody else steps.

torch.compile keeps process-wide state (the FX tracing flag, patched ``nn.Module`` methods, the
stance), so a compile in one thread breaks or hangs a step in another. A step whose key was seen
before takes the shared side; a new key takes the exclusive side, where alone a compile may happen.
Outside the exclusive side the stance is fail_on_recompile, so a key that says too little is a loud
error and never a race. With compile off there is nothing to guard and the gate only counts.
"""

import contextlib
import contextvars
import os
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from trainer.errors import CompileGateError

P = ParamSpec("P")
R = TypeVar("R")

_STANCE_MARK = "fail_on_recompile"
_DENSE_FLEX = "flex_attention called without torch.compile"
_WAIT_S = 1.0  # a wait is cut in pieces so that a signal and a failure are seen
_MAX_REASONS = 8


@dataclass(frozen=True)
class GateSettings:
    """How the gate behaves.

    compile: False makes ``wrap`` return its argument. gate: False takes no lock (an experiment).
    backend: of torch.compile. recompile_limit: graphs of one code object, all threads together;
    devices x shapes x 4 is enough. watchdog_s: age of a compile that is reported with every
    thread's stack, and again each time it has passed. limit_s: age that ends the run.
    """

    compile: bool = True
    gate: bool = True
    backend: str | Callable[..., Any] = "inductor"
    recompile_limit: int = 1024
    watchdog_s: float = 120.0
    limit_s: float = 1800.0


@dataclass(frozen=True)
class CompileEvent:
    """One compile, or several of one step: who, for which key, how long and why."""

    thread: str
    key: str
    seconds: float
    num_graphs: int
    reasons: tuple[str, ...]
    expected: bool  # False: it happened outside the exclusive side


@dataclass
class GateStats:
    """Counts since the start; ``by_key`` holds the seconds of each exclusive step."""

    num_shared: int = 0
    num_exclusive: int = 0
    num_graphs: int = 0
    num_unexpected: int = 0
    exclusive_s: float = 0.0
    wait_s: float = 0.0
    by_key: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Holder:
    thread: str
    key: str
    since: float


class CompileGate:
    """One per process; see the module's text.

    ``on_event`` gets each CompileEvent, in the thread that compiled. ``report`` gets the watchdog's
    text. ``on_limit`` gets the error when a compile has lasted ``limit_s``: by then every waiter
    has been woken with it, but the thread that compiles cannot be; left alone, the process ends.
    """

    def __init__(
        self,
        settings: GateSettings,
        *,
        on_event: Callable[[CompileEvent], None] = lambda _event: None,
        report: Callable[[str], object] = sys.stderr.write,
        on_limit: Callable[[CompileGateError], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_event, self._report = on_event, report
        self._on_limit = on_limit or end_process
        self._condition = threading.Condition(threading.Lock())
        self._readers, self._waiting = 0, 0
        self._holder: _Holder | None = None
        self._seen: set[Hashable] = set()
        self._sealed = False
        self._failure: CompileGateError | None = None
        self._depth = threading.local()
        self._mask_lock = threading.RLock()
        self._strays: deque[str] = deque()
        self._closed = threading.Event()
        self.stats = GateStats()
        self._guards = settings.compile and settings.gate
        self._num_threads = torch.get_num_threads()
        if settings.compile:
            self._configure()
            # Dense attention in place of the kernel costs minutes and memory without a word.
            warnings.filterwarnings("error", message=f".*{_DENSE_FLEX}.*")
        if self._guards:
            self._set_stance(_STANCE_MARK)
            watchdog = threading.Thread(target=self._watch, name="gate-watchdog", daemon=True)
            watchdog.start()

    def wrap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` compiled for static shapes; a graph break is an error, never eager."""
        if not self._settings.compile:
            return fn
        with self.trace():
            compiled: Callable[P, R] = torch.compile(
                fn, backend=self._settings.backend, fullgraph=True, dynamic=False
            )
        return compiled

    @contextlib.contextmanager
    def step(self, key: Hashable) -> Iterator[None]:
        """Hold the gate around one forward and backward.

        ``key`` names all that decides what gets compiled: device, shapes, dtypes, grad mode. A new
        key takes the exclusive side and counts as seen once the body has returned. A step inside a
        step of the same thread passes through. Never hold it across a queue wait.

        Raises: CompileGateError for a new key after ``seal``, or when a compile never ended.
        """
        if not self._guards or self._nested():
            self._count_unguarded(key)
            yield
            return
        with self._hold(key, seen=self._is_seen(key), sealed=self._sealed):
            yield

    def run(self, key: Hashable, fn: Callable[[], R], *, library: bool = False) -> R:
        """Run one step; if its key said too little and a compile was refused, run it once more.

        ``fn`` must be restartable: it draws from generators of its own, and what it accumulates it
        accumulates after the last compiled forward. The second run holds the exclusive side.
        ``library``: what compiles is not ours, so nobody knows its shapes: allowed after ``seal``.

        Raises: CompileGateError when sealed and a compile was refused.
        """
        try:
            with self.step(key):
                return fn()
        except RuntimeError as error:
            if not _is_refused_compile(error):
                raise
            if self._nested() or (self._sealed and not library):
                raise CompileGateError(f"step {key}: {error}") from error
            with self._condition:
                self.stats.num_unexpected += 1
        with self._hold(key, seen=lambda: False, sealed=False):
            return fn()

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Hold the exclusive side for FX tracing, export, make_fx or torch.compile itself.

        Raises: CompileGateError inside a step of this thread that shares the gate (a deadlock).
        """
        if not self._guards or self._nested() == "exclusive":
            yield
            return
        if self._nested():
            raise CompileGateError("trace() inside a step would wait for itself; trace before it")
        with self._hold(None, seen=lambda: False, sealed=False):
            yield

    @contextlib.contextmanager
    def mask(self) -> Iterator[None]:
        """Hold the mutex of block masks: building one edits a process-wide dictionary."""
        with self._mask_lock:
            yield

    def seal(self) -> None:
        """End the warm-up: from now on a new key is an error."""
        self._sealed = True

    def close(self) -> None:
        """Put the stance back and end the watchdog; the gate is not used afterwards."""
        self._closed.set()
        if self._guards:
            self._set_stance("default")
            handler = _callbacks().callback_handler
            if self._notice in handler.start_callbacks:
                handler.remove_start_callback(self._notice)

    def spawn(self, fn: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted daemon thread that runs ``fn`` with this gate's configuration.

        A new thread does not inherit compiler settings from torch 2.13 on: it starts in a copy of
        the caller's context, and sets and checks them again.
        """
        context = contextvars.copy_context()

        def body() -> None:
            if self._settings.compile:
                self._configure()
            fn()

        return threading.Thread(target=context.run, args=(body,), name=name, daemon=True)

    def _nested(self) -> str:
        """Return which side this thread holds: "", "shared" or "exclusive"."""
        side: str = getattr(self._depth, "side", "")
        return side

    def _count_unguarded(self, key: Hashable) -> None:
        with self._condition:
            if not self._guards:
                self.stats.num_shared += 1
                self._seen.add(key)

    @contextlib.contextmanager
    def _hold(self, key: Hashable, *, seen: Callable[[], bool], sealed: bool) -> Iterator[None]:
        """Hold the side that ``seen`` says: it is asked again after each wait."""
        if self._enter(key, seen, sealed=sealed):
            with self._exclusively(key):
                yield
        else:
            with self._sharing():
                yield

    def _is_seen(self, key: Hashable) -> Callable[[], bool]:
        return lambda: key in self._seen

    def _enter(self, key: Hashable, seen: Callable[[], bool], *, sealed: bool) -> bool:
        """Wait for a side and take it; True for the exclusive one."""
        began = time.monotonic()
        with self._condition:
            waits_alone = False
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    alone = not seen()
                    if alone and sealed:
                        raise CompileGateError(
                            f"step {key} was not warmed up; its shape is not one of the plan's"
                        )
                    self._waiting += alone - waits_alone
                    waits_alone = alone
                    if self._holder is None and not (self._readers if alone else self._waiting):
                        break
                    self._condition.wait(_WAIT_S)
                if alone:
                    thread = threading.current_thread().name
                    self._holder = _Holder(thread, _text(key), time.monotonic())
                    self.stats.num_exclusive += 1
                else:
                    self._readers += 1
                    self.stats.num_shared += 1
            finally:
                self._waiting -= waits_alone
                self.stats.wait_s += time.monotonic() - began
                self._condition.notify_all()
        return alone

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        self._depth.side = "shared"
        try:
            yield
        finally:
            self._depth.side = ""
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()
            while self._strays:
                self._tell(self._strays.popleft(), 0.0, 1, expected=False)

    @contextlib.contextmanager
    def _exclusively(self, key: Hashable) -> Iterator[None]:
        """Run the body while this thread holds the exclusive side; ``None`` stands for a trace."""
        self._depth.side = "exclusive"
        began, graphs, done = time.monotonic(), _num_graphs(), False
        name = _text(key)
        try:
            self._listen()
            self._set_stance("default")
            yield
            done = True
        finally:
            self._set_stance(_STANCE_MARK)
            self._depth.side = ""
            seconds, num_graphs = time.monotonic() - began, _num_graphs() - graphs
            with self._condition:
                self._holder = None
                if done and key is not None:
                    self._seen.add(key)
                self.stats.exclusive_s += seconds
                self.stats.num_graphs += num_graphs
                self.stats.by_key[name] = self.stats.by_key.get(name, 0.0) + seconds
                self._condition.notify_all()
            if num_graphs:
                self._tell(name, seconds, num_graphs, expected=True)

    def _listen(self) -> None:
        """Notice compiles outside the exclusive side; torch._dynamo.reset() forgets listeners."""
        handler = _callbacks().callback_handler
        if self._notice not in handler.start_callbacks:
            handler.register_start_callback(self._notice)

    def _notice(self, args: Any) -> None:
        # Called with torch's compile lock held: waiting for the gate here could wait for ever.
        if self._holder is None:
            self._strays.append(f"{args.callback_trigger.name} outside the exclusive side")

    def _tell(self, key: str, seconds: float, num_graphs: int, *, expected: bool) -> None:
        if not expected:
            with self._condition:
                self.stats.num_unexpected += 1
        reasons = tuple(_recent_reasons(num_graphs)[:_MAX_REASONS])
        thread = threading.current_thread().name
        self._on_event(CompileEvent(thread, key, seconds, num_graphs, reasons, expected))

    def _configure(self) -> None:
        """Set the compiler's configuration in this thread and make sure that it holds."""
        # A guard of every graph; a new thread takes the number that any thread set last.
        torch.set_num_threads(self._num_threads)
        limit = self._settings.recompile_limit
        dynamo, functorch = _dynamo_config(), _functorch_config()
        for config, name, value in (
            (dynamo, "recompile_limit", limit),
            (dynamo, "accumulated_recompile_limit", limit * 4),
            # Lowered with the forward, a backward is compiled under the gate and in its thread.
            (functorch, "force_non_lazy_backward_lowering", True),
        ):
            setattr(config, name, value)
            if getattr(config, name) != value:
                raise CompileGateError(f"torch does not keep the setting {name} = {value}")

    @staticmethod
    def _set_stance(stance: str) -> None:
        torch.compiler.set_stance(stance)

    def _watch(self) -> None:
        """Report a compile that lasts, and end the run when it lasts too long."""
        settings, reported = self._settings, 0.0
        pause = max(0.01, min(1.0, settings.watchdog_s / 4, settings.limit_s / 4))
        while not self._closed.wait(pause):
            holder = self._holder
            age = time.monotonic() - holder.since if holder else 0.0
            if holder is None or age < settings.watchdog_s:
                reported = 0.0
                continue
            what = f"{holder.thread} has compiled {holder.key} for {age:.0f} s"
            if age >= settings.limit_s:
                self._report(f"{what}, the limit\n{stacks()}")
                self._fail(CompileGateError(f"{what}: longer than compile.limit_s"))
                return
            if age - reported >= settings.watchdog_s:
                reported = age
                self._report(f"{what}\n{stacks()}")

    def _fail(self, error: CompileGateError) -> None:
        with self._condition:
            self._failure = error
            self._condition.notify_all()
        self._on_limit(error)


def stacks() -> str:
    """Return the stack of every Python thread, for the log of a run that hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"--- thread {names.get(ident, ident)}\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def end_process(error: BaseException) -> None:
    """End the process with this error: a thread inside a compiler cannot be woken or joined."""
    sys.stderr.write(f"error: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _is_refused_compile(error: BaseException) -> bool:
    return _STANCE_MARK in str(error)


def _dynamo_config() -> ModuleType:
    import torch._dynamo.config as config  # noqa: PLC0415 - seconds to import, only with compile on

    return config


def _functorch_config() -> ModuleType:
    import torch._functorch.config as config  # noqa: PLC0415 - as above

    return config


def _callbacks() -> ModuleType:
    import torch._dynamo.callback as callback  # noqa: PLC0415 - as above

    return callback


def _dynamo_utils() -> ModuleType:
    import torch._dynamo.utils as dynamo_utils  # noqa: PLC0415 - as above

    return dynamo_utils


def _num_graphs() -> int:
    return int(_dynamo_utils().counters["stats"].get("unique_graphs", 0))


def _recent_reasons(num_graphs: int) -> list[str]:
    """Return why the last compiles happened; torch gives a reason for recompiles only."""
    metrics = _dynamo_utils().get_compilation_metrics()[-num_graphs:]
    return [str(m.recompile_reason) for m in metrics if getattr(m, "recompile_reason", None)]


def _text(key: Hashable) -> str:
    return "trace" if key is None else str(key)
