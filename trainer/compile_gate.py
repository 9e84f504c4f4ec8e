"""The gate that every compile of the trainer passes: one thread compiles while nobody else steps.

torch.compile keeps process-wide state (the FX tracing flag, patched ``nn.Module`` methods, the
stance), so a compile in one thread breaks or hangs a step in another. A step whose key was seen
before takes the shared side; a new key takes the exclusive side, where alone a compile may happen.
Outside the exclusive side the stance is fail_on_recompile, so a key that says too little is a loud
error and never a race. With compile off there is nothing to guard and the gate only counts.
A step that should have compiled something and did not runs uncompiled: an error too.
"""

import contextlib
import contextvars
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from trainer import torch_compiler
from trainer.errors import CompileGateError
from trainer.stacks import end_process, stacks
from trainer.torch_compiler import Counted

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
    allow_fallback: a step that runs uncompiled is a warning and no error. force_during_fx_trace,
    error_on_nested_fx_trace, caching_precompile: torch's settings of these names.
    """

    compile: bool = True
    gate: bool = True
    backend: str | Callable[..., Any] = "inductor"
    recompile_limit: int = 1024
    watchdog_s: float = 120.0
    limit_s: float = 1800.0
    allow_fallback: bool = False
    force_during_fx_trace: bool = False
    error_on_nested_fx_trace: bool = True
    caching_precompile: bool = False

    def of_torch(self) -> dict[str, Any]:
        """Return the compiler's settings that every thread must have."""
        return {
            "_dynamo.config.recompile_limit": self.recompile_limit,
            "_dynamo.config.accumulated_recompile_limit": self.recompile_limit * 4,
            # Lowered with the forward, a backward is compiled under the gate and in its thread.
            "_functorch.config.force_non_lazy_backward_lowering": True,
            "_dynamo.config.force_compile_during_fx_trace": self.force_during_fx_trace,
            "_dynamo.config.error_on_nested_fx_trace": self.error_on_nested_fx_trace,
            "_dynamo.config.caching_precompile": self.caching_precompile,
        }


@dataclass(frozen=True)
class CompileEvent:
    """One compile, or several of one step: who, for which key, how long and why.

    expected: False when it happened outside the exclusive side. sealed: after the warm-up. cache:
    what the caches on disk gave, by ``fx_hit``, ``aot_miss`` and so on, where not 0. fallback: the
    step should have compiled and did not.
    """

    thread: str
    device: str
    key: str
    seconds: float
    num_graphs: int
    reasons: tuple[str, ...]
    expected: bool = True
    sealed: bool = False
    cache: Mapping[str, int] = field(default_factory=dict)
    fallback: bool = False

    @property
    def cache_hit(self) -> bool:
        """Say whether nothing had to be made: the caches had all of it."""
        return bool(self.cache) and all(name.endswith("hit") for name in self.cache)


@dataclass
class GateStats:
    """Counts since the start; ``by_key`` holds the seconds of each exclusive step.

    num_sealed: graphs compiled after the warm-up. num_waiting: threads that wait for a side now.
    """

    num_shared: int = 0
    num_exclusive: int = 0
    num_graphs: int = 0
    num_unexpected: int = 0
    num_sealed: int = 0
    num_waiting: int = 0
    exclusive_s: float = 0.0
    wait_s: float = 0.0
    by_key: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pass:
    """What a thread wants of the gate.

    key: None stands for a trace. seen: asked again after each wait. sealed: a key that was not seen
    is an error. must_compile: so is a new key that compiles nothing.
    """

    key: Hashable
    seen: Callable[[], bool]
    sealed: bool = False
    must_compile: bool = False

    @property
    def name(self) -> str:
        """The key, for people."""
        return "trace" if self.key is None else str(self.key)


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
        self._warned: set[str] = set()
        self._failure: CompileGateError | None = None
        self._depth = threading.local()
        self._mask_lock = threading.RLock()
        self._strays: deque[str] = deque()
        self._closed = threading.Event()
        self.stats = GateStats()
        self._guards = settings.compile and settings.gate
        self._wraps = False
        self._num_threads = torch.get_num_threads()
        if settings.compile:
            self._configure()
            if not settings.allow_fallback:
                # Dense attention in place of the kernel costs minutes and memory without a word.
                warnings.filterwarnings("error", message=f".*{_DENSE_FLEX}.*")
        if self._guards:
            torch_compiler.set_stance(_STANCE_MARK)
            watchdog = threading.Thread(target=self._watch, name="gate-watchdog", daemon=True)
            watchdog.start()

    def wrap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` compiled for static shapes.

        A graph break and too many recompiles are errors, never eager, but for ``allow_fallback``.
        """
        settings = self._settings
        if not settings.compile:
            return fn
        self._wraps = True
        with self.trace():
            compiled: Callable[P, R] = torch.compile(
                fn, backend=settings.backend, fullgraph=not settings.allow_fallback, dynamic=False
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
        with self._hold(_Pass(key, self._is_seen(key), sealed=self._sealed)):
            yield

    def run(self, key: Hashable, fn: Callable[[], R], *, library: bool = False) -> R:
        """Run one step; if its key said too little and a compile was refused, run it once more.

        ``fn`` must be restartable: it draws from generators of its own, and what it accumulates it
        accumulates after the last compiled forward. The second run holds the exclusive side.
        ``library``: what compiles is not ours, so nobody knows its shapes: allowed after ``seal``.

        Raises: CompileGateError when sealed and a compile was refused, and when a new key compiled
        nothing though the gate has wrapped something: it would run uncompiled from then on.
        """
        must_compile = self._wraps and not (library or self._settings.caching_precompile)
        wanted = _Pass(key, self._is_seen(key), sealed=self._sealed, must_compile=must_compile)
        try:
            if not self._guards:
                return self._run_unguarded(wanted, fn)
            if self._nested():
                return fn()
            with self._hold(wanted):
                return fn()
        except RuntimeError as error:
            if not _is_refused_compile(error):
                raise
            if self._nested() or (self._sealed and not library):
                raise CompileGateError(f"step {key}: {error}") from error
            with self._condition:
                self.stats.num_unexpected += 1
        with self._hold(_Pass(key, lambda: False)):
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
        with self._hold(_Pass(None, lambda: False)):
            yield

    @contextlib.contextmanager
    def mask(self) -> Iterator[None]:
        """Hold the mutex of block masks: building one edits a process-wide dictionary."""
        with self._mask_lock:
            yield

    @property
    def is_compiling(self) -> bool:
        """Whether a thread holds the exclusive side, so that others may have to wait."""
        return self._holder is not None

    def seal(self) -> None:
        """End the warm-up: from now on a new key is an error."""
        self._sealed = True

    def report_fallback(self, key: Hashable, text: str) -> None:
        """Tell that a step runs uncompiled or dense, as ``text`` says.

        Raises: CompileGateError, but for ``allow_fallback``.
        """
        if not self._settings.allow_fallback:
            raise CompileGateError(f"{text}; compile.allow_fallback lets a run go on so")
        self._report(f"{text}\n")
        self._tell(str(key), 0.0, Counted(0, {}), fallback=True)

    def warn_once(self, text: str) -> None:
        """Tell of what a warm-up could not make sure of, once in a process."""
        if text not in self._warned:
            self._warned.add(text)
            self._report(f"{text}\n")

    def close(self) -> None:
        """Put the stance back and end the watchdog; the gate is not used afterwards."""
        self._closed.set()
        if self._guards:
            torch_compiler.set_stance("default")
            torch_compiler.stop_listening(self._notice)

    def spawn(self, fn: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted daemon thread that runs ``fn`` with this gate's configuration.

        A new thread does not inherit compiler settings from torch 2.12 on: it starts in a copy of
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

    def _run_unguarded(self, wanted: _Pass, fn: Callable[[], R]) -> R:
        """Run a step without a lock; what other threads compile meanwhile counts here as well."""
        self._count_unguarded(wanted.key)
        if not self._settings.compile:
            return fn()
        began, before = time.monotonic(), Counted.now()
        done = fn()
        made = Counted.now().since(before)
        if made.num_graphs:
            with self._condition:
                self.stats.num_graphs += made.num_graphs
            self._tell(wanted.name, time.monotonic() - began, made, expected=False)
        return done

    def _count_unguarded(self, key: Hashable) -> None:
        with self._condition:
            if not self._guards:
                self.stats.num_shared += 1
                self._seen.add(key)

    @contextlib.contextmanager
    def _hold(self, wanted: _Pass) -> Iterator[None]:
        """Hold the side that the pass asks for."""
        if self._enter(wanted):
            with self._exclusively(wanted):
                yield
        else:
            with self._sharing():
                yield

    def _is_seen(self, key: Hashable) -> Callable[[], bool]:
        return lambda: key in self._seen

    def _enter(self, wanted: _Pass) -> bool:
        """Wait for a side and take it; True for the exclusive one."""
        began, stats = time.monotonic(), self.stats
        with self._condition:
            waits_alone = False
            stats.num_waiting += 1
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    alone = not wanted.seen()
                    if alone and wanted.sealed:
                        name = wanted.name
                        raise CompileGateError(
                            f"step {name} was not warmed up; its shape is not one of the plan's"
                        )
                    self._waiting += alone - waits_alone
                    waits_alone = alone
                    if self._holder is None and not (self._readers if alone else self._waiting):
                        break
                    self._condition.wait(_WAIT_S)
                if alone:
                    thread = threading.current_thread().name
                    self._holder = _Holder(thread, wanted.name, time.monotonic())
                    stats.num_exclusive += 1
                else:
                    self._readers += 1
                    stats.num_shared += 1
            finally:
                self._waiting -= waits_alone
                stats.num_waiting -= 1
                stats.wait_s += time.monotonic() - began
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
            while (stray := self._next_stray()) is not None:
                self._tell(stray, 0.0, Counted(1, {}), expected=False)

    def _next_stray(self) -> str | None:
        """Take one compile outside the exclusive side; threads leave the shared side together."""
        with self._condition:
            if not self._strays:
                return None
            self.stats.num_unexpected += 1
            return self._strays.popleft()

    @contextlib.contextmanager
    def _exclusively(self, wanted: _Pass) -> Iterator[None]:
        """Run the body while this thread holds the exclusive side."""
        self._depth.side = "exclusive"
        began, before, done = time.monotonic(), Counted.now(), False
        try:
            torch_compiler.listen(self._notice)
            torch_compiler.set_stance("default")
            yield
            self._check_compiled(wanted, before)
            done = True
        finally:
            torch_compiler.set_stance(_STANCE_MARK)
            self._depth.side = ""
            made, seconds = Counted.now().since(before), time.monotonic() - began
            self._leave(wanted, made, seconds, seen=done and wanted.key is not None)
            if made.num_graphs:
                self._tell(wanted.name, seconds, made)

    def _leave(self, wanted: _Pass, made: Counted, seconds: float, *, seen: bool) -> None:
        """Let go of the exclusive side."""
        stats, name = self.stats, wanted.name
        with self._condition:
            self._holder = None
            if seen:
                self._seen.add(wanted.key)
            stats.exclusive_s += seconds
            stats.num_graphs += made.num_graphs
            stats.num_sealed += made.num_graphs if self._sealed else 0
            stats.by_key[name] = stats.by_key.get(name, 0.0) + seconds
            self._condition.notify_all()

    def _check_compiled(self, wanted: _Pass, before: Counted) -> None:
        """Refuse a step that ran uncompiled, or tell of it where that is allowed."""
        made = Counted.now().since(before)
        if made.num_graphs or not wanted.must_compile:
            return
        what = f"step {wanted.name} compiled nothing"
        self.report_fallback(wanted.name, f"{what}: it runs uncompiled, slow and in more memory")

    def _notice(self, args: Any) -> None:
        # Called with torch's compile lock held: waiting for the gate here could wait for ever.
        if self._holder is None:
            self._strays.append(f"{args.callback_trigger.name} outside the exclusive side")

    def _tell(
        self,
        key: str,
        seconds: float,
        made: Counted,
        *,
        expected: bool = True,
        fallback: bool = False,
    ) -> None:
        graphs = made.num_graphs
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        event = CompileEvent(
            thread=threading.current_thread().name,
            device=f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu",
            key=key,
            seconds=seconds,
            num_graphs=graphs,
            reasons=tuple(torch_compiler.recent_reasons(graphs)[:_MAX_REASONS]),
            expected=expected,
            sealed=self._sealed,
            cache=made.cache,
            fallback=fallback,
        )
        self._on_event(event)

    def _configure(self) -> None:
        """Set the compiler's configuration in this thread and make sure that it holds."""
        # A guard of every graph; a new thread takes the number that any thread set last.
        torch.set_num_threads(self._num_threads)
        torch_compiler.configure(self._settings.of_torch())

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


def _is_refused_compile(error: BaseException) -> bool:
    return _STANCE_MARK in str(error)
