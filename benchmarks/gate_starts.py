"""One start of the compile gate's stress: threads that step on changing shapes, in this process.

The threads stand for GPUs: each has its own batch size, so nothing that one compiled serves
another. A step builds a block mask, runs flex attention and a piece of a draft forward and
backward, and is compared with dense attention. ``take_start`` tells of each step as it ends.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compile_gate import CompileEvent, CompileGate, GateSettings
from trainer.model.masks import BlockLayout, MaskRule, block_mask, dense_mask

WAYS = {
    "gate": "CompileGate",
    "without-gate": "no gate",
    "first-call-lock": "lock on a thread's first step",
}
_HEADS, _KEY_HEADS, _BLOCK = 4, 2, 8
_INNER = 96
_RECOMPILE_LIMIT = 1024

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
Tell = Callable[[dict[str, Any]], None]
R = TypeVar("R")


@dataclass(frozen=True)
class Work:
    """What a start does: a step on a new shape is followed by ``repeats`` on seen ones."""

    threads: int = 3
    shapes: int = 3
    repeats: int = 3
    seed: int = 0
    device: str = "cpu"

    def plan(self, thread: int) -> list[int]:
        """Return the shapes of a thread's steps, in an order of its own."""
        draw = random.Random(f"{self.seed}-{thread}")
        order = draw.sample(range(self.shapes), self.shapes)
        plan: list[int] = []
        for count, shape in enumerate(order, 1):
            plan += [shape, *draw.choices(order[:count], k=self.repeats)]
        return plan

    def device_of(self, thread: int) -> torch.device:
        """Return the CPU, or the GPUs in turn."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", thread % torch.cuda.device_count())

    @property
    def backend(self) -> str:
        """aot_eager on a CPU: it traces and partitions as for a GPU and generates no kernel."""
        return "aot_eager" if self.device == "cpu" else "inductor"


class Way(Protocol):
    """What a step needs of a compile gate."""

    def wrap(self, fn: Callable[..., R]) -> Callable[..., R]:
        """Return ``fn`` compiled."""
        ...

    def run(self, key: Hashable, fn: Callable[[], R]) -> R:
        """Run one step."""
        ...

    def mask(self) -> AbstractContextManager[None]:
        """Hold what the building of a mask needs."""
        ...

    def spawn(self, fn: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted thread."""
        ...


class NoGate:
    """Plain torch.compile, as trainers call it; the limit is raised in the main thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT

    def wrap(self, fn: Callable[..., R]) -> Callable[..., R]:
        """Return ``fn`` compiled for static shapes."""
        compiled: Callable[..., R] = torch.compile(  # noqa: TID251 - what the gate is compared with
            fn, backend=self._backend, dynamic=False
        )
        return compiled

    def run(self, key: Hashable, fn: Callable[[], R]) -> R:  # noqa: ARG002 - as the gate's
        """Run one step."""
        return fn()

    def mask(self) -> AbstractContextManager[None]:
        """Hold nothing."""
        return nullcontext()

    def spawn(self, fn: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted thread."""
        return threading.Thread(target=fn, name=name, daemon=True)


class FirstCallLock(NoGate):
    """A lock around each thread's first step, compile and all."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._lock = threading.Lock()
        self._started: set[int] = set()

    def run(self, key: Hashable, fn: Callable[[], R]) -> R:  # noqa: ARG002 - as the gate's
        """Run one step; the first of a thread under the lock."""
        thread = threading.get_ident()
        if thread in self._started:
            return fn()
        with self._lock:
            done = fn()
        self._started.add(thread)
        return done


class CountedRuns:
    """Tells which compiled graphs the calling thread has run; ``backend`` is for torch.compile."""

    def __init__(self, backend: str) -> None:
        self._ran = threading.local()
        self._inner = lookup_backend(backend)

    def backend(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile; each run of what comes out is counted as one of attention or of the piece."""
        has_flex = any("flex_attention" in str(node.target) for node in graph.graph.nodes)
        kind, compiled = "attention" if has_flex else "piece", self._inner(graph, inputs)

        def run(*arguments: Any) -> Any:
            self.of_thread()[kind] += 1
            return compiled(*arguments)

        return run

    def of_thread(self) -> Counter[str]:
        """Return the counts of this thread."""
        if not hasattr(self._ran, "counts"):
            self._ran.counts = Counter()
        counts: Counter[str] = self._ran.counts
        return counts


def piece(hidden: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """Return a loss after a norm and a SwiGLU, as in a draft layer. Shapes: [R, Q, D] -> []."""
    normed = F.rms_norm(hidden, hidden.shape[-1:])
    out = (F.silu(normed @ gate) * (normed @ up)) @ down
    return (hidden + out).float().square().mean()


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class Case:
    """The inputs of one (thread, shape), and what a step on them must give."""

    def __init__(self, thread: int, shape: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(1000 * thread + shape)
        on_gpu = device.type == "cuda"
        self._tolerance = 3e-2 if on_gpu else 1e-4  # bfloat16, float32
        scale, head_dim = (4, 64) if on_gpu else (1, 16)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        rows, length, anchors = thread + 1, 64 * scale * (shape + 1), 4 * scale * (shape + 1)
        queries, width = anchors * _BLOCK, _HEADS * head_dim
        heads = ((_HEADS, queries), *((_KEY_HEADS, length + queries),) * 2)

        def normal(*size: int, std: float = 1.0, learnt: bool) -> Tensor:
            drawn = (std * torch.randn(*size, generator=draw)).to(device, dtype)
            return drawn.requires_grad_(learnt)

        self.inputs = [  # flex attention has no backward on a CPU
            normal(rows, count, tokens, head_dim, learnt=on_gpu) for count, tokens in heads
        ]
        self.weights = [
            normal(*size, std=size[0] ** -0.5, learnt=True)
            for size in ((width, _INNER), (width, _INNER), (_INNER, width))
        ]
        picked = torch.randint(length, (rows, anchors), generator=draw).sort(-1).values.to(device)
        zeros = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.layout = BlockLayout.of(picked, torch.ones_like(picked).bool(), zeros)
        self.rule = MaskRule(_BLOCK)
        mask = dense_mask(self.layout, self.rule)
        self.expected = self.step(_dense, piece, mask)

    def step(
        self,
        attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        compiled_piece: Callable[..., Tensor],
        mask: Tensor | BlockMask,
    ) -> list[Tensor]:
        """Run forward and backward; returns attention [R, Q, H * d], loss and gradients."""
        query, key, value = self.inputs
        out = attend(query, key, value, mask).transpose(1, 2).flatten(2)
        loss = compiled_piece(out, *self.weights)
        learnt = [tensor for tensor in (self.weights[0], query) if tensor.requires_grad]
        return [out.detach(), loss.detach(), *torch.autograd.grad(loss, learnt)]

    def is_right(self, found: list[Tensor]) -> bool:
        """Say whether a step gave what dense attention gives."""

        def distance(a: Tensor, b: Tensor) -> float:
            return float((a.float() - b.float()).norm() / b.float().norm())

        pairs = zip(found, self.expected, strict=True)
        return all(distance(a, b) <= self._tolerance for a, b in pairs)


class _Thread:
    """One thread's steps through a way; tells of each step."""

    def __init__(self, thread: int, way: Way, runs: CountedRuns, cases: dict[int, Case]) -> None:
        self._thread, self._way, self._runs, self._cases = thread, way, runs, cases
        # As each GPU's replica does: wrapped in its own thread, while others step.
        self._flex, self._piece = way.wrap(flex_attention), way.wrap(piece)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        out: Tensor = self._flex(query, key, value, block_mask=mask, enable_gqa=True)
        return out

    def step(self, shape: int) -> dict[str, Any]:
        """Take one step; returns what came of it."""
        case, before = self._cases[shape], self._runs.of_thread().copy()

        def one() -> list[Tensor]:
            with self._way.mask():
                mask = block_mask(case.layout, case.rule)
            return case.step(self._attend, self._piece, mask)

        try:
            found = self._way.run((self._thread, shape), one)
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is the result
            lines = str(caught).strip().splitlines() or [""]
            return {"raised": f"{type(caught).__name__}: {lines[0][:90]}"}
        ran = self._runs.of_thread() - before
        idle = [kind for kind in ("attention", "piece") if not ran[kind]]
        return {"silent": idle, "wrong": not case.is_right(found)}


def take_start(way: Way, runs: CountedRuns, work: Work, tell: Tell) -> None:
    """Run the threads of one start to their end."""
    cases = [
        {shape: Case(thread, shape, work.device_of(thread)) for shape in range(work.shapes)}
        for thread in range(work.threads)
    ]
    barrier, end = threading.Barrier(work.threads), threading.Barrier(work.threads)

    def steps(thread: int) -> Iterator[dict[str, Any]]:
        try:
            barrier.wait()
            stepping = _Thread(thread, way, runs, cases[thread])
        except Exception as caught:  # noqa: BLE001 - torch.compile itself may race
            yield {"raised": f"{type(caught).__name__}: {caught}"[:120]}
            return
        for shape in work.plan(thread):
            yield stepping.step(shape)

    def work_through(thread: int) -> None:
        if work.device == "cuda":
            torch.cuda.set_device(work.device_of(thread))
        for done in steps(thread):
            tell({"thread": thread} | done)
        # Where there is no GPU, torch 2.11 built for CUDA crashes in the next compile once a thread
        # that compiled has ended, even when no two ever ran at a time: so all end together.
        end.wait()

    threads = [way.spawn(lambda t=t: work_through(t), f"gpu-{t}") for t in range(work.threads)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def start_here(name: str, work: Work, tell: Tell) -> None:
    """Take one start in this process, which must have compiled nothing before."""
    torch.set_num_threads(1)
    runs, began = CountedRuns(work.backend), time.monotonic()
    if name == "gate":
        compiles: list[CompileEvent] = []
        gate = CompileGate(GateSettings(backend=runs.backend), on_event=compiles.append)
        take_start(gate, runs, work, tell)
        gate.close()
        tell({"compiles": [asdict(event) for event in compiles]})
        # A compile outside the exclusive side is a hole in the gate even if nothing came of it.
        for _ in range(gate.stats.num_unexpected):
            tell({"raised": "a compile outside the exclusive side"})
    else:
        kind = FirstCallLock if name == "first-call-lock" else NoGate
        take_start(kind(runs.backend), runs, work, tell)
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    seconds = round(time.monotonic() - began, 2)
    tell({"ended": graphs, "seconds": seconds, "modules": sorted(sys.modules)})
