"""The compile gate against real torch.compile (backends eager and aot_eager), real threads."""

import functools
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._dynamo.config
import torch._functorch.config
import torch.nn.attention.flex_attention as flex
from torch._dynamo.callback import on_compile_start
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import FailOnRecompileLimitHit

from trainer.compile_gate import CompileEvent, CompileGate, GateSettings
from trainer.errors import CompileGateError


@pytest.fixture
def events() -> list[CompileEvent]:
    return []


@pytest.fixture
def gate(events: list[CompileEvent]) -> Iterator[CompileGate]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        made = CompileGate(GateSettings(backend="aot_eager"), on_event=events.append)
        yield made
        made.close()
    torch._dynamo.reset()


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_unexpected_shape_on_the_shared_side_is_refused_and_run_again_alone(
    gate: CompileGate,
) -> None:
    double = gate.wrap(lambda x: x * 2)
    gate.run("key", lambda: double(torch.ones(3)))
    calls: list[int] = []

    def other_shape() -> torch.Tensor:
        calls.append(gate.stats.num_exclusive)
        return double(torch.ones(5))

    assert gate.run("key", other_shape).tolist() == [2.0] * 5
    assert calls == [2, 3]  # refused on the shared side, then alone; wrap was the first
    assert gate.stats.num_unexpected == 1
    assert compile_lock.acquire(blocking=False)
    compile_lock.release()
    assert gate.run("key", lambda: double(torch.ones(5))).tolist() == [2.0] * 5
    assert (gate.stats.num_exclusive, gate.stats.num_graphs) == (3, 2)


def test_refused_compile_without_run_is_an_error_that_names_the_guard(gate: CompileGate) -> None:
    double = gate.wrap(lambda x: x * 2)
    with gate.step("key"):
        double(torch.ones(3))
    with gate.step("key"), pytest.raises(RuntimeError, match="expected 3, actual 5"):
        double(torch.ones(5))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_an_exclusive_step_frees_the_gate(
    gate: CompileGate, error: type[BaseException]
) -> None:
    with pytest.raises(error), gate.step("key"):
        raise error
    done = threading.Event()

    def step() -> None:
        with gate.step("key"):
            done.set()

    _run([gate.spawn(step, "other")])
    assert done.is_set()
    assert gate.stats.num_exclusive == 2  # the key was still unseen


def test_spawned_thread_has_the_gates_configuration(gate: CompileGate) -> None:
    found: list[object] = []

    def look() -> None:
        found.extend(
            [
                torch._dynamo.config.recompile_limit,
                torch._dynamo.config.accumulated_recompile_limit,
                torch._functorch.config.force_non_lazy_backward_lowering,
            ]
        )

    _run([gate.spawn(look, "worker")])
    assert found == [1024, 4096, True]


def test_thread_count_that_another_thread_set_last_compiles_nothing_anew(
    gate: CompileGate,
) -> None:
    double = gate.wrap(lambda x: x * 2)
    other = torch.get_num_threads() + 1
    setter = threading.Thread(target=torch.set_num_threads, args=(other,))
    setter.start()
    setter.join(20)
    with gate.step("key"):
        double(torch.ones(3))
    gate.seal()
    done: list[float] = []

    def worker() -> None:
        done.append(gate.run("key", lambda: double(torch.ones(3)))[0].item())

    _run([gate.spawn(worker, "worker")])
    torch.set_num_threads(torch.get_num_threads())  # new threads take this thread's number again
    assert done == [2.0]


def test_first_backward_after_seal_compiles_nothing(gate: CompileGate) -> None:
    weight = torch.ones(3, requires_grad=True)
    square = gate.wrap(lambda w, x: (w * x).square().sum())
    with gate.step("key"):
        square(weight, torch.ones(3))
    gate.seal()
    triggers: list[str] = []
    on_compile_start(lambda args: triggers.append(args.callback_trigger.name))
    with gate.step("key"):
        square(weight, torch.full((3,), 2.0)).backward()
    assert triggers == []
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0, 8.0, 8.0]


def test_new_key_after_seal_is_an_error(gate: CompileGate) -> None:
    with gate.step("key"):
        pass
    gate.seal()
    with gate.step("key"):
        pass
    with pytest.raises(CompileGateError, match="other was not warmed up"), gate.step("other"):
        pass


def test_refused_compile_after_seal_is_a_gate_error(gate: CompileGate) -> None:
    double = gate.wrap(lambda x: x * 2)
    gate.run("key", lambda: double(torch.ones(3)))
    gate.seal()
    with pytest.raises(CompileGateError, match="expected 3, actual 5"):
        gate.run("key", lambda: double(torch.ones(5)))


def test_library_that_compiles_after_seal_runs_alone_and_is_told(
    gate: CompileGate, events: list[CompileEvent]
) -> None:
    double = gate.wrap(lambda x: x * 2)
    gate.run("target", lambda: double(torch.ones(3)), library=True)
    gate.seal()
    before = gate.stats.num_exclusive
    assert gate.run("target", lambda: double(torch.ones(5)), library=True).numel() == 5
    assert gate.run("target", lambda: double(torch.ones(3)), library=True).numel() == 3
    assert gate.stats.num_exclusive == before + 1
    assert [event.sealed for event in events] == [False, True]
    assert gate.stats.num_sealed == 1


def test_second_run_is_alone_even_when_another_thread_made_the_key_seen(
    gate: CompileGate,
) -> None:
    double = gate.wrap(lambda x: x * 2)
    gate.run("key", lambda: double(torch.ones(3)))
    done: list[int] = []

    def many(sizes: range) -> None:
        steps = [functools.partial(double, torch.ones(size)) for size in sizes]
        done.extend(gate.run("key", step).numel() for step in steps)

    _run(
        [gate.spawn(lambda: many(range(4, 12)), "a"), gate.spawn(lambda: many(range(12, 20)), "b")]
    )
    assert sorted(done) == list(range(4, 20))
    assert gate.stats.num_unexpected == 16


def test_step_inside_a_step_passes_through_but_a_trace_is_refused(gate: CompileGate) -> None:
    with gate.step("a"), gate.step("b"), gate.trace():
        pass
    assert gate.stats.num_exclusive == 1
    with gate.step("a"), gate.step("b"):
        assert gate.stats.num_shared == 1
        with pytest.raises(CompileGateError, match="trace before it"), gate.trace():
            pass


def test_compile_event_names_thread_key_and_reason(
    gate: CompileGate, events: list[CompileEvent]
) -> None:
    double = gate.wrap(lambda x: x * 2)

    def both() -> None:
        for size in (3, 5):
            with gate.step(("cpu", size)):
                double(torch.ones(size))

    _run([gate.spawn(both, "drafter-0")])
    first, second = events
    assert (first.thread, first.key, first.num_graphs) == ("drafter-0", "('cpu', 3)", 1)
    assert (first.device, first.expected, first.sealed, first.fallback) == (
        "cpu",
        True,
        False,
        False,
    )
    assert first.reasons == ()
    assert "expected 3, actual 5" in second.reasons[0]


@pytest.mark.parametrize("forgotten", [False, True])
def test_compile_outside_the_exclusive_side_is_reported_as_unexpected(
    gate: CompileGate, events: list[CompileEvent], forgotten: bool
) -> None:
    weight = torch.ones(3, requires_grad=True)
    square = gate.wrap(lambda w: w.square().sum())
    with gate.step("key"):  # the listener is there from the first exclusive step on
        pass
    if forgotten:
        torch._dynamo.reset()  # drops every listener; the next exclusive step brings it back
    torch._functorch.config.force_non_lazy_backward_lowering = False
    try:
        with gate.step("forward alone"):
            loss = square(weight)
        with gate.step("key"):
            loss.backward()
    finally:
        torch._functorch.config.force_non_lazy_backward_lowering = True
    assert [e.key for e in events if not e.expected] == ["LAZY_BACKWARD outside the exclusive side"]


def test_compile_that_lasts_is_reported_with_stacks_and_ends_the_run() -> None:
    reports: list[str] = []
    limits: list[CompileGateError] = []
    inside, release, ended = threading.Event(), threading.Event(), threading.Event()

    def on_limit(error: CompileGateError) -> None:
        limits.append(error)
        ended.set()

    with warnings.catch_warnings():
        gate = CompileGate(
            GateSettings(backend="eager", watchdog_s=0.1, limit_s=0.5),
            report=reports.append,
            on_limit=on_limit,
        )
    caught: list[str] = []

    def hang_in_a_compile() -> None:
        with gate.step("stuck"):
            inside.set()
            release.wait(60)

    def wait_for_the_gate() -> None:
        try:
            with gate.step("next"):
                pass
        except CompileGateError as error:
            caught.append(str(error))

    stuck, waiter = gate.spawn(hang_in_a_compile, "stuck-one"), gate.spawn(wait_for_the_gate, "w")
    stuck.start()
    assert inside.wait(20)
    waiter.start()
    waiter.join(20)
    assert ended.wait(20)
    release.set()
    stuck.join(20)
    gate.close()
    assert re.match(r"stuck-one has compiled stuck for \d+ s", reports[0])
    assert "hang_in_a_compile" in reports[0]
    assert "longer than compile.limit_s" in caught[0]
    assert len(limits) == 1


def test_gate_without_compile_takes_no_lock_and_wraps_nothing() -> None:
    gate = CompileGate(GateSettings(compile=False))

    def plain(x: int) -> int:
        return x + 1

    assert gate.wrap(plain) is plain
    with gate.step("a"):
        done = threading.Event()

        def other() -> None:
            with gate.step("b"):
                done.set()

        _run([gate.spawn(other, "other")])
        assert done.is_set()
    gate.close()


def test_compile_with_the_gate_off_is_told_as_one_outside_of_it() -> None:
    events: list[CompileEvent] = []
    torch._dynamo.reset()
    gate = CompileGate(GateSettings(backend="eager", gate=False), on_event=events.append)
    try:
        double = gate.wrap(lambda x: x * 2)
        for size in (3, 3, 5):
            assert gate.run(size, functools.partial(double, torch.ones(size))).numel() == size
        assert [(e.key, e.num_graphs, e.expected) for e in events] == [
            ("3", 1, False),
            ("5", 1, False),
        ]
    finally:
        gate.close()
        torch._dynamo.reset()


def test_flex_attention_that_would_run_dense_is_an_error(gate: CompileGate) -> None:
    flex._WARNINGS_SHOWN.clear()  # it warns once in a process
    with gate.step("key"), pytest.raises(UserWarning, match=r"called without torch\.compile"):
        flex.flex_attention(*(torch.ones(1, 1, 16, 16) for _ in range(3)))


def test_flex_attention_that_has_warned_before_cannot_run_dense_in_a_warm_step(
    gate: CompileGate,
) -> None:
    flex._WARNINGS_SHOWN.add("flex_attention_performance")  # by whoever used it first
    try:
        gate.run("warm", lambda: None)
        gate.seal()
        with pytest.raises(CompileGateError, match=r"step warm: .*fail_on_recompile"):
            gate.run("warm", lambda: flex.flex_attention(*(torch.ones(1, 1, 16, 16),) * 3))
    finally:
        flex._WARNINGS_SHOWN.clear()


def test_shapes_past_the_limit_of_recompiles_are_an_error_and_not_eager() -> None:
    torch._dynamo.reset()
    gate = CompileGate(GateSettings(backend="eager", recompile_limit=2))
    try:
        double = gate.wrap(lambda x: x * 2)
        for size in (3, 4):
            assert gate.run(size, lambda size=size: double(torch.ones(size))).tolist() == [2] * size
        with pytest.raises(FailOnRecompileLimitHit, match="fullgraph=True"):
            gate.run(5, lambda: double(torch.ones(5)))
        assert gate.run(4, lambda: double(torch.ones(4))).tolist() == [2] * 4
    finally:
        gate.close()
        torch._dynamo.reset()


def test_new_step_that_compiles_nothing_is_refused_as_uncompiled(gate: CompileGate) -> None:
    double = gate.wrap(lambda x: x * 2)
    assert gate.run("compiled", lambda: double(torch.ones(3)))[0] == 2.0
    with pytest.raises(CompileGateError, match="step eager compiled nothing: it runs uncompiled"):
        gate.run("eager", lambda: torch.ones(3) * 2)
    assert gate.run("target", lambda: torch.ones(3) * 2, library=True)[0] == 2.0


def test_step_that_runs_uncompiled_is_told_where_that_is_allowed() -> None:
    reports: list[str] = []
    events: list[CompileEvent] = []
    torch._dynamo.reset()
    gate = CompileGate(
        GateSettings(backend="eager", allow_fallback=True),
        on_event=events.append,
        report=reports.append,
    )
    try:

        def breaks(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

        assert gate.run("key", functools.partial(gate.wrap(breaks), torch.ones(3)))[0] == 1.0
        assert [(e.key, e.num_graphs, e.fallback) for e in events] == [("key", 0, True)]
        assert reports == [
            "step key compiled nothing: it runs uncompiled, slow and in more memory\n"
        ]
    finally:
        gate.close()
        torch._dynamo.reset()


def test_graph_break_is_an_error_where_falling_back_is_not_allowed(gate: CompileGate) -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        gate.run("key", functools.partial(gate.wrap(breaks), torch.ones(3)))


def test_event_says_whether_the_caches_on_disk_had_everything() -> None:
    event = functools.partial(CompileEvent, "drafter-0", "cuda:0", "key", 1.0, 2, ())
    assert event(cache={"fx_hit": 2, "aot_hit": 1}).cache_hit
    assert not event(cache={"fx_hit": 2, "aot_miss": 1}).cache_hit
    assert not event(cache={"fx_bypass": 1}).cache_hit
    assert not event().cache_hit


_HANGS = """
import threading, warnings
from trainer.compile_gate import CompileGate, GateSettings
warnings.simplefilter("ignore")
gate = CompileGate(GateSettings(backend="eager", watchdog_s=0.1, limit_s=0.3))
with gate.step("warm-up"):
    threading.Event().wait()
"""


def test_compile_that_hangs_the_main_thread_ends_the_process() -> None:
    argv = [sys.executable, "-c", _HANGS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(r"error: MainThread has compiled warm-up for \d+ s: longer than", last)
    assert "--- thread MainThread" in done.stderr


COLLECTS_MEANWHILE = """
import gc, threading
from trainer.stacks import stacks

class Ring:
    pass

for threshold in range(1, 100):  # at one of them the collection falls into the call
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(10)]
    for thread in threads:
        thread.start()
    gc.disable()
    ring = Ring()
    ring.self, ring.local = ring, threading.local()  # to free it takes a lock of the interpreter
    ring.local.value = 1
    del ring
    gc.set_threshold(threshold)
    gc.enable()
    assert stacks().count("--- thread") == 11
    assert gc.isenabled()
    release.set()
    for thread in threads:
        thread.join()
"""


def test_stacks_are_told_although_garbage_is_collected_meanwhile() -> None:
    subprocess.run([sys.executable, "-c", COLLECTS_MEANWHILE], check=True)
