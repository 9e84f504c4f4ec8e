"""Races of compiling threads, made certain: each thread is held where the race would happen.

Where versions of torch differ, the difference is shown without the gate, and none with it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.config
import torch.fx._symbolic_trace
import torch.fx.traceback
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock
from torch.fx import GraphModule

from trainer.compile_gate import CompileGate, GateSettings

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_PATIENCE_S = 20.0  # of a test that fails; one that passes waits for nothing


@contextmanager
def _gate(backend: Any, **settings: bool) -> Iterator[CompileGate]:
    torch._dynamo.reset()
    gate = CompileGate(GateSettings(backend=backend, **settings))
    try:
        yield gate
    finally:
        gate.close()
        torch._dynamo.reset()


def _until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a state that another thread is on its way to."""
    pause = threading.Event()
    for _ in range(int(_PATIENCE_S / 0.005)):
        if holds():
            return
        pause.wait(0.005)
    raise AssertionError(f"never: {what}")


def _join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), thread.name


class FlagAndBlock:
    """A backend that raises the FX tracing flag for size 5, and waits there to be let go."""

    def __init__(self) -> None:
        self.compiling, self.go_on = threading.Event(), threading.Event()

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if inputs[0].numel() == 5:
            _set_flag(up=True)
            self.compiling.set()
            assert self.go_on.wait(_PATIENCE_S)
            _set_flag(up=False)
        return graph.forward


def _set_flag(*, up: bool) -> None:
    """Set the flag as ``Tracer.trace`` does: of the process, of the thread from torch 2.14 on."""
    module = torch.fx._symbolic_trace
    if hasattr(module, "_is_fx_tracing_flag"):
        module._is_fx_tracing_flag = up


def _step_while_another_compiles(gate: CompileGate, backend: FlagAndBlock) -> list[object]:
    """Return what a warm step gives that starts in the middle of another thread's compile."""
    step = gate.wrap(lambda x: x + 1)
    found: list[object] = []

    def of_size(size: int) -> None:
        gate.run(size, lambda: step(torch.ones(size)))

    def read() -> None:
        try:
            of_size(3)
            found.append("passed")
        except RuntimeError as error:
            found.append(error)

    writer, reader = gate.spawn(lambda: of_size(5), "writer"), gate.spawn(read, "reader")
    of_size(3)
    try:
        writer.start()
        assert backend.compiling.wait(_PATIENCE_S)
        reader.start()
        _until(lambda: bool(found) or gate.stats.num_waiting == 1, "the reader passes or waits")
        found.insert(0, "waited" if not found else "did not wait")
    finally:
        backend.go_on.set()
        _join(writer, reader)
    return found


def test_warm_step_waits_while_another_thread_compiles_and_then_passes() -> None:
    backend = FlagAndBlock()
    with _gate(backend) as gate:
        assert _step_while_another_compiles(gate, backend) == ["waited", "passed"]
        assert gate.stats.num_unexpected == 0


def test_without_the_gate_a_warm_step_meets_the_flag_of_another_threads_compile() -> None:
    backend = FlagAndBlock()
    with _gate(backend, gate=False) as gate:
        waited, came = _step_while_another_compiles(gate, backend)
    assert waited == "did not wait"
    if TORCH < (2, 13):  # later ones look whether somebody compiles, or have a flag a thread
        assert "FX to symbolically trace" in str(came)
    else:
        assert came == "passed"


def test_settings_reach_a_spawned_thread_though_a_plain_one_may_not_see_them() -> None:
    seen: dict[str, tuple[int, bool]] = {}

    def look() -> None:
        config = torch._dynamo.config
        name = threading.current_thread().name
        seen[name] = (config.recompile_limit, config.force_compile_during_fx_trace)

    with _gate("eager", force_during_fx_trace=True) as gate:
        threads = (threading.Thread(target=look, name="plain"), gate.spawn(look, "spawned"))
        for thread in threads:
            thread.start()
        _join(*threads)
    with _gate("eager"):
        pass  # what a test sets, it sets back
    assert seen["spawned"] == (1024, True)
    assert seen["plain"] == ((1024, True) if TORCH < (2, 12) else (8, False))


def test_backend_that_raises_leaves_the_key_unseen_and_others_go_on() -> None:
    calls: list[int] = []

    def fails_once(graph: GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no such kernel")
        return graph.forward

    with _gate(fails_once) as gate:
        double = gate.wrap(lambda x: x * 2)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such kernel"):
            gate.run("key", lambda: double(torch.ones(3)))
        done: list[float] = []

        def step() -> None:
            done.append(gate.run("key", lambda: double(torch.ones(3)))[0].item())

        threads = [gate.spawn(step, f"t{i}") for i in range(3)]
        for thread in threads:
            thread.start()
        _join(*threads)
    assert done == [2.0, 2.0, 2.0]
    assert len(calls) == 2


def test_interrupt_in_the_middle_of_a_compile_frees_the_gate_and_torchs_own_lock() -> None:
    calls: list[int] = []

    def interrupted_once(graph: GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return graph.forward

    with _gate(interrupted_once) as gate:
        double = gate.wrap(lambda x: x * 2)
        with pytest.raises(KeyboardInterrupt):
            gate.run("key", lambda: double(torch.ones(3)))
        assert compile_lock.acquire(blocking=False)
        compile_lock.release()
        done: list[float] = []
        other = gate.spawn(
            lambda: done.append(gate.run("key", lambda: double(torch.ones(3)))[0].item()), "other"
        )
        other.start()
        _join(other)
    assert done == [2.0]
    assert len(calls) == 2


def test_step_inside_a_step_does_not_wait_for_a_compile_that_waits_for_it() -> None:
    with _gate("eager") as gate:
        with gate.step("warm"):
            pass
        order: list[str] = []

        def compiles() -> None:
            with gate.step("new"):
                order.append("new")

        writer = gate.spawn(compiles, "writer")
        with gate.step("warm"):
            writer.start()
            _until(lambda: gate.stats.num_waiting == 1, "the writer waits")
            with gate.step("warm"), gate.step("of another shape"):
                order.append("inner")
        _join(writer)
    assert order == ["inner", "new"]


def test_compile_that_waits_goes_before_steps_that_came_after_it() -> None:
    with _gate("eager") as gate:
        with gate.step("warm"):
            pass
        order: list[str] = []

        def take(key: str) -> None:
            with gate.step(key):
                order.append(key)

        writer = gate.spawn(lambda: take("new"), "writer")
        reader = gate.spawn(lambda: take("warm"), "reader")
        with gate.step("warm"):
            writer.start()
            _until(lambda: gate.stats.num_waiting == 1, "the writer waits")
            reader.start()
            _until(lambda: gate.stats.num_waiting == 2, "the reader waits behind it")
        _join(writer, reader)
    assert order == ["new", "warm"]


def test_four_threads_of_masks_leave_no_trace_annotation_behind() -> None:
    errors: list[BaseException] = []

    def causal(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    with _gate("eager") as gate:

        def build() -> None:
            try:
                for _ in range(20):
                    with gate.mask():
                        flex.create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=32)
            except BaseException as error:  # noqa: BLE001 - any error is the test's failure
                errors.append(error)

        threads = [gate.spawn(build, f"mask{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        _join(*threads)
    assert errors == []
    assert "custom" not in torch.fx.traceback.current_meta
