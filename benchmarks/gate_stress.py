"""Starts of three threads that compile changing shapes: through the gate, without, with a lock.

    python -m benchmarks.gate_stress [--gate] [--without-gate] [--first-call-lock]
        [--starts 200] [--seconds 480] [--limit 120]

Each start is a process of its own with torch on the CPU. Its threads stand for GPUs: each has its
own batch size, so nothing that one compiled serves another. A step builds a block mask, runs flex
attention (backend aot_eager) and a piece of a draft forward and backward, and is compared with
dense attention. Counted are starts that crash, hang, raise, give wrong numbers, or run a step
silently without what was compiled. Prints a table, then one JSON line; status 1 when the gate let
anything through, or when a way without it failed nothing (then the test saw nothing).
"""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compile_gate import CompileGate, GateSettings
from trainer.model.attention import SdpaAttention
from trainer.model.masks import BlockLayout, MaskRule, block_mask, dense_mask

WAYS = {
    "gate": "CompileGate",
    "without-gate": "no gate",
    "first-call-lock": "lock on a thread's first step",
}
_ROOT = Path(__file__).parents[1]
_HEADS, _KEY_HEADS, _HEAD_DIM, _BLOCK = 4, 2, 16, 8
_INNER = 96
_TOLERANCE = 1e-4
_RECOMPILE_LIMIT = 1024
_KINDS = ("crashed", "hung", "raised", "silent", "wrong")

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
Step = tuple[Tensor, Tensor, Tensor]  # attention [R, Q, H * d], loss, gradient of the first weight
R = TypeVar("R")


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

    def __init__(self) -> None:
        self._ran = threading.local()
        self._inner = lookup_backend("aot_eager")

    def backend(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile by aot_eager; each run is counted as one of attention or of the piece."""
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
    return (hidden + out).square().mean()


class Case:
    """The inputs of one (thread, shape), and what a step on them must give."""

    def __init__(self, thread: int, shape: int) -> None:
        draw = torch.Generator().manual_seed(1000 * thread + shape)
        rows, length, anchors = thread + 1, 64 * (shape + 1), 4 * (shape + 1)
        queries = anchors * _BLOCK
        sizes = ((_HEADS, queries), *((_KEY_HEADS, length + queries),) * 2)
        self.query, self.key, self.value = (
            torch.randn(rows, heads, tokens, _HEAD_DIM, generator=draw) for heads, tokens in sizes
        )
        width = _HEADS * _HEAD_DIM
        self.weights = [
            (torch.randn(*size, generator=draw) / size[0] ** 0.5).requires_grad_()
            for size in ((width, _INNER), (width, _INNER), (_INNER, width))
        ]
        picked = torch.randint(length, (rows, anchors), generator=draw).sort(-1).values
        zeros = torch.zeros(rows, length, dtype=torch.long)
        positions = torch.arange(length).expand(rows, length)
        self.layout = BlockLayout.of(picked, torch.ones_like(picked).bool(), zeros, positions)
        self.rule = MaskRule(_BLOCK)
        mask = dense_mask(self.layout, self.rule)
        self.expected = self.step(SdpaAttention().attend, piece, mask)

    def step(
        self,
        attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        compiled_piece: Callable[..., Tensor],
        mask: Tensor | BlockMask,
    ) -> Step:
        """Run forward and backward."""
        out = attend(self.query, self.key, self.value, mask).transpose(1, 2).flatten(2)
        loss = compiled_piece(out, *self.weights)
        return out, loss.detach(), torch.autograd.grad(loss, self.weights)[0]

    def is_right(self, found: Step) -> bool:
        """Say whether a step gave what dense attention gives."""
        pairs = zip(found, self.expected, strict=True)
        return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs)


@dataclass(frozen=True)
class Work:
    """What a start does: steps on a new shape are followed by ``repeats`` on seen ones."""

    threads: int = 3
    shapes: int = 4
    repeats: int = 4
    seed: int = 0

    def plan(self, thread: int) -> list[int]:
        """Return the shapes of a thread's steps, in an order of its own."""
        draw = random.Random(f"{self.seed}-{thread}")
        order = draw.sample(range(self.shapes), self.shapes)
        plan: list[int] = []
        for count, shape in enumerate(order, 1):
            plan += [shape, *draw.choices(order[:count], k=self.repeats)]
        return plan


@dataclass
class Told:
    """What one start saw; steps that failed by kind, and the first words of each error."""

    steps: int = 0
    raised: int = 0
    silent: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def take_start(way: Way, runs: CountedRuns, work: Work) -> Told:
    """Run the threads of one start to their end."""
    cases = {
        (thread, shape): Case(thread, shape)
        for thread in range(work.threads)
        for shape in range(work.shapes)
    }
    told, lock, barrier = Told(), threading.Lock(), threading.Barrier(work.threads)

    def work_through(thread: int) -> None:
        barrier.wait()
        # As each GPU's replica does: wrapped in its own thread, while others step.
        flex, compiled_piece = way.wrap(flex_attention), way.wrap(piece)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
            out: Tensor = flex(query, key, value, block_mask=mask, enable_gqa=True)
            return out

        def one(case: Case) -> Step:
            with way.mask():
                mask = block_mask(case.layout, case.rule)
            return case.step(attend, compiled_piece, mask)

        for shape in work.plan(thread):
            key, before, error, found = (thread, shape), runs.of_thread().copy(), "", None
            try:
                found = way.run(key, lambda case=cases[key]: one(case))  # type: ignore[misc]
            except Exception as caught:  # noqa: BLE001 - whatever it is, it is the result
                lines = str(caught).strip().splitlines() or [""]
                error = f"{type(caught).__name__}: {lines[0][:90]}"
            ran = runs.of_thread() - before
            with lock:
                told.steps += 1
                if found is None:
                    told.raised += 1
                    told.errors[error] += 1
                else:
                    idle = [kind for kind in ("attention", "piece") if not ran[kind]]
                    told.silent += bool(idle)
                    told.errors.update(f"{kind} ran uncompiled" for kind in idle)
                    told.wrong += not cases[key].is_right(found)

    threads = [way.spawn(lambda t=t: work_through(t), f"gpu-{t}") for t in range(work.threads)]  # type: ignore[misc]
    for one_thread in threads:
        one_thread.start()
    for one_thread in threads:
        one_thread.join()
    return told


def start_here(name: str, work: Work) -> dict[str, Any]:
    """Take one start in this process; it must have compiled nothing before."""
    torch.set_num_threads(1)
    runs, began = CountedRuns(), time.monotonic()
    if name == "gate":
        gate = CompileGate(GateSettings(backend=runs.backend))
        told = take_start(gate, runs, work)
        gate.close()
        # A compile outside the exclusive side is a hole in the gate even if nothing came of it.
        told.raised += gate.stats.num_unexpected
    else:
        kind = FirstCallLock if name == "first-call-lock" else NoGate
        told = take_start(kind(runs.backend), runs, work)
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return vars(told) | {"graphs": graphs, "seconds": round(time.monotonic() - began, 2)}


@dataclass
class Tally:
    """All starts of one way: how many failed, in which kinds, and what was said."""

    way: str
    starts: int = 0
    failed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    failed_steps: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def take(self, outcome: dict[str, Any]) -> None:
        """Add one start."""
        kinds = [kind for kind in _KINDS if outcome.get(kind)]
        self.starts += 1
        self.failed += bool(kinds)
        self.kinds.update(kinds)
        self.steps += outcome.get("steps", 0)
        self.failed_steps.update({k: outcome.get(k, 0) for k in ("raised", "silent", "wrong")})
        self.said.update(outcome["errors"])
        self.seconds += outcome["seconds"]

    def row(self) -> str:
        """Return the line of the table."""
        raised, silent = (f"{self.kinds[k]} ({self.failed_steps[k]})" for k in ("raised", "silent"))
        cells = [WAYS[self.way], self.starts, self.failed, self.kinds["crashed"]]
        cells += [self.kinds["hung"], raised, silent, self.kinds["wrong"], self.steps]
        return f"| {' | '.join(str(cell) for cell in cells)} |"


HEAD = (
    "| way | starts | failed | crashed | hung | raised (steps) | silently not compiled (steps)"
    " | wrong numbers | steps |\n|---|---|---|---|---|---|---|---|---|"
)


def start_process(name: str, work: Work, limit_s: float) -> dict[str, Any]:
    """Take one start in a fresh process; a crash and a hang are outcomes too."""
    argv = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gate_stress", "--one", name]
    argv += ["--seed", str(work.seed), "--threads", str(work.threads)]
    argv += ["--shapes", str(work.shapes), "--repeats", str(work.repeats)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            argv, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"hung": 1, "errors": {f"nothing after {limit_s:g} s": 1}, "seconds": limit_s}
    if done.returncode == 0:
        outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return outcome | {"seconds": time.monotonic() - began}
    said = (done.stderr.strip().splitlines() or [""])[-1]
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit, {said[:90]}"
    return {"crashed": 1, "errors": {how: 1}, "seconds": time.monotonic() - began}


def campaign(options: argparse.Namespace, names: list[str]) -> list[Tally]:
    """Take the starts of all ways in turn, so that what else the machine does meets all alike."""
    tallies, ends = [Tally(name) for name in names], time.monotonic() + options.seconds
    for seed, tally in itertools.product(range(options.starts), tallies):
        if time.monotonic() > ends:
            break
        work = Work(options.threads, options.shapes, options.repeats, seed)
        outcome = start_process(tally.way, work, options.limit)
        tally.take(outcome)
        sys.stderr.write(f"{tally.way} {seed}: {json.dumps(outcome)}\n")
    return tallies


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in WAYS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--starts", type=int, default=200, help="of each way")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no start after so many")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a start")
    for name in ("threads", "shapes", "repeats", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Work, name))
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Take the starts and print what they saw."""
    options = parse()
    if options.one:
        work = Work(options.threads, options.shapes, options.repeats, options.seed)
        print(json.dumps(start_here(options.one, work)))
        return 0
    chosen = [name for name in WAYS if getattr(options, name.replace("-", "_"))] or ["gate"]
    tallies = campaign(options, chosen)
    print("\n".join((HEAD, *(tally.row() for tally in tallies))))
    print(json.dumps({"torch": torch.__version__, "ways": [vars(tally) for tally in tallies]}))
    good = all(bool(tally.failed) is (tally.way != "gate") for tally in tallies)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
