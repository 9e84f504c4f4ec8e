"""Target and drafter together against each alone, with the trainer's own threads, on random data.

    python -m benchmarks.pipeline --target 27b --layers 16 --cards 1 --minutes 2
    python -m benchmarks.pipeline --target 27b-hybrid --layers 16 --cards 2 --minutes 9   # a soak

Builds a random target of the given shapes on the card (no files), chats of random tokens, and a
draft, warms them up and then measures three times: target threads into the queue with nobody but a
thread that empties it, drafter threads on one batch over and over, and both. With one card both
roles share it, and the rate to reach is 1 / (1 / target + 1 / drafter); with two or more each role
has its own, and it is that of the slower side. Beside the rates: what the compile gate costs, how
far the allocator's memory swings, drift of the rate from the first third to the last, and compiles
after the gate is sealed. Prints JSON lines and a table last; ``tiny`` runs on a CPU too.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from benchmarks.draft_step import ceiling_tflops
from trainer import assembly
from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate, GateStats
from trainer.contract.config import TrainConfig, with_override
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import BatchMaker, BatchPlan
from trainer.errors import ChannelClosedError
from trainer.learning_rate import Schedule
from trainer.metrics import Memory
from trainer.model.target import Target, default_target_layer_ids
from trainer.workers.drafter import Replica, StepDone, StepRange
from trainer.workers.pipeline import Pipeline
from trainer.workers.place import take_place
from trainer.workers.supervisor import Pulse, StopRequest
from trainer.workers.target import Prepared

_NUM_TAPS = 5
_LEFT_OUT = 5  # steps at the beginning of a measurement: the queue fills, the allocator settles
_SAY_EVERY_S = 30.0
_PROFILE_S = 3.0


@dataclass(frozen=True)
class Shapes:
    """Sizes of a target and of its draft's attention (heads, kv heads, head dim)."""

    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    mask_token_id: int
    draft: tuple[int, int, int] = (32, 8, 128)
    hybrid: bool = False


_27B: dict[str, Any] = {
    "hidden": 5120,
    "inner": 17408,
    "vocab": 248320,
    "heads": 24,
    "kv_heads": 4,
    "head_dim": 256,
    "layers": 64,
    "mask_token_id": 248070,
}
TARGETS = {
    "8b": Shapes(4096, 12288, 151936, 32, 8, 128, 36, 151669),
    "27b": Shapes(**_27B),
    "27b-hybrid": Shapes(**_27B, hybrid=True),
    "tiny": Shapes(64, 128, 512, 4, 2, 16, 8, 500, draft=(4, 2, 16)),
}


@dataclass
class Steps:
    """What was seen after each step: when it ended, its tokens, and memory by device."""

    ended_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    memory: list[dict[str, Memory]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def rate(self, start: int = _LEFT_OUT, stop: int | None = None) -> float:
        """Tokens a second of steps ``start`` to ``stop``."""
        ended, tokens = self.ended_s[start - 1 : stop], self.tokens[start:stop]
        return sum(tokens) / (ended[-1] - ended[0])

    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(np.diff(self.ended_s[_LEFT_OUT - 1 :]))

    def drift(self) -> float:
        """Rate of the last third over that of the first, less 1."""
        third = (len(self.tokens) - _LEFT_OUT) // 3
        last = len(self.tokens) - third
        return self.rate(last) / self.rate(_LEFT_OUT, _LEFT_OUT + third) - 1

    def swing(self) -> dict[str, float]:
        """Largest less smallest reserved memory over the largest, by device."""
        found = {}
        for name in self.memory[0]:
            taken = [memory[name].reserved for memory in self.memory[_LEFT_OUT:]]
            found[name] = (max(taken) - min(taken)) / max(*taken, 1)
        return found


class Bench:
    """The parts of one measurement, built once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shapes = options, TARGETS[options.target]
        cards = [torch.device("cpu")]
        if options.device == "cuda":
            cards = [torch.device("cuda", i) for i in range(options.cards)]
        num_targets = options.targets if options.cards > 1 else 1
        self.target_devices = cards[:num_targets] if options.cards > 1 else cards[:1]
        self.drafter_devices = cards[num_targets:] if options.cards > 1 else cards[:1]
        self.config = self._config()
        self.gate = CompileGate(assembly.gate_settings(self.config, len(self.drafter_devices)))
        samples = self._samples()
        plan = BatchPlan([len(s.input_ids) for s in samples], self.config.data, 0)
        self.maker = BatchMaker(ChatDataset("random", "", samples), plan, self.config)
        self.targets = {
            str(device): build_target(self.shapes, options, device)
            for device in dict.fromkeys(self.target_devices)
        }
        finding = assembly.settle_targets(self.targets, self.config, self.gate)
        sys.stderr.write(f"{finding}\n")
        self.replicas = self._replicas()
        batches = self.maker.examples()
        assembly.warm_parts(self.gate, self.config, batches, self.targets.values(), self.replicas)

    def _config(self) -> TrainConfig:
        options, shapes = self.options, self.shapes
        heads, kv_heads, head_dim = shapes.draft
        raw: dict[str, Any] = {
            "target": {
                "path": "none",
                "dtype": options.dtype,
                "forward_tokens": options.tokens,
            },
            "data": {
                "path": "none",
                "token_budget": options.tokens,
                "max_length": options.longest,
                "max_anchors": options.anchors,
            },
            "draft": {
                "mask_token_id": shapes.mask_token_id,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head_dim,
                "dtype": options.dtype,
            },
            "optim": {"lr": 1e-5, "epochs": 1e5, "max_steps": 1_000_000},
            "run": {
                "device": options.device,
                "queue_depth": options.queue_depth,
                "queue_bytes": int(options.queue_gb * 1e9),
                "cpu_threads": 1 if options.device == "cpu" else None,
            },
            "compile": {"watchdog_s": 60.0, "limit_s": 200.0},
        }
        for setting in options.set:
            key, _, value = setting.partition("=")
            raw = with_override(raw, key, json_or_text(value))
        return TrainConfig.from_dict(raw)

    def _samples(self) -> tuple[Sample, ...]:
        draw = np.random.default_rng(0)
        found = []
        for number in range(self.options.samples):
            length = int(draw.integers(self.options.longest // 4, self.options.longest + 1))
            ids = draw.integers(0, self.shapes.mask_token_id, length).astype(np.int32)
            mask = np.arange(length) >= length // 8
            found.append(Sample(number, ids, mask))
        return tuple(found)

    def _replicas(self) -> list[Replica]:
        target = next(iter(self.targets.values()))
        schedule = Schedule.from_config(self.config.optim, 1_000_000)
        shape = assembly.draft_config(self.config, target)
        attention = assembly.attention_of(self.config, shape, self.gate)
        replicas = [
            assembly.build_replica(self.config, target, place, attention, schedule, None)
            for place in enumerate(self.drafter_devices)
        ]
        for replica in replicas:
            replica.optimizer.arrange_gradients(len(replicas), num_micro_batches=1)
        return replicas

    def pipeline(self, on_step: Callable[[StepDone, Pulse], None], stop: StopRequest) -> Pipeline:
        """Return the threads' frame for one measurement; they are added by its caller."""
        return Pipeline(
            config=self.config,
            gate=self.gate,
            maker=self.maker,
            targets=[self.targets[str(device)] for device in self.target_devices],
            replicas=self.replicas,
            steps=StepRange(0, 1_000_000 // len(self.replicas), len(self.replicas), 1),
            stop=stop,
            run_dir=Path(tempfile.gettempdir()),
            report=lambda text: sys.stderr.write(f"warning: {text}\n"),
            on_step=on_step,
        )

    def memory(self) -> dict[str, Memory]:
        """Return the memory of each device in use."""
        devices = dict.fromkeys([*self.target_devices, *self.drafter_devices])
        return {str(device): Memory.of(device) for device in devices}


def json_or_text(text: str) -> Any:
    """Return a value of --set: JSON where it is, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def build_target(shapes: Shapes, options: argparse.Namespace, device: torch.device) -> Target:
    """Return a random target on ``device``: dense, or three of four layers gated delta rule."""
    layers = options.layers or shapes.layers
    sizes: dict[str, Any] = {
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "vocab_size": shapes.vocab,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    config: Any = Qwen3Config(**sizes)
    if shapes.hybrid:
        config = Qwen3_5TextConfig(
            **sizes,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    ids = default_target_layer_ids(layers, _NUM_TAPS)
    return Target(model, ids, forward_tokens=options.tokens)


def measure_both(bench: Bench, seconds: float) -> tuple[Steps, dict[str, Any]]:
    """Run the whole pipeline for ``seconds``; returns its steps and the state of the queue."""
    seen, stop = Steps(), StopRequest()
    said = [time.monotonic()]

    def on_step(done: StepDone, _pulse: Pulse) -> None:
        now = time.monotonic()
        seen.ended_s.append(now)
        seen.tokens.append(done.sums.num_tokens)
        seen.losses.append(done.sums.loss_sum / max(done.sums.weight_sum, 1e-12))
        seen.memory.append(bench.memory())
        if len(seen.memory) > _LEFT_OUT:
            show_growth(seen)
        if now - said[0] > _SAY_EVERY_S:
            said[0] = now
            show("progress", steps=len(seen.tokens), loss=round(seen.losses[-1], 4))
        if len(seen.tokens) > 3 * _LEFT_OUT and now - seen.ended_s[0] > seconds:
            stop.soft.set()

    pipeline = bench.pipeline(on_step, stop)
    pipeline.run()
    flow = pipeline.flow
    return seen, {"target_wait_s": flow.target_wait_s, "drafter_wait_s": flow.drafter_wait_s}


def show_growth(seen: Steps) -> None:
    """Print, when a device's allocator took more in the last step, the blocks of each stream."""
    before, now = seen.memory[-2:]
    for name, memory in now.items():
        if memory.reserved <= before[name].reserved or name == "cpu":
            continue
        sizes: dict[int, list[int]] = {}
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == torch.device(name).index:
                sizes.setdefault(segment["stream"], []).append(segment["total_size"] >> 20)
        grown = (memory.reserved - before[name].reserved) >> 20
        streams = {stream: Counter(found).most_common(12) for stream, found in sizes.items()}
        show("growth", step=len(seen.memory), device=name, mib=grown, segments_mib=streams)


def measure_target(bench: Bench, seconds: float) -> Steps:
    """Run the target threads into a queue that a thread empties at once."""
    stop = StopRequest()
    pipeline = bench.pipeline(lambda _done, _pulse: None, stop)
    seen = Steps()

    def empty(_pulse: Pulse) -> None:
        take_place(bench.drafter_devices[0], None)
        index = 0
        while len(seen.tokens) <= 2 * _LEFT_OUT or seen.ended_s[-1] - seen.ended_s[0] < seconds:
            batch = pipeline.channel.get(index).batch
            seen.ended_s.append(time.monotonic())
            seen.tokens.append(batch.num_tokens)
            index += 1
        stop.soft.set()
        pipeline.channel.close()

    pipeline.add_targets()
    pipeline.supervisor.add("empties", empty)
    pipeline.run_added()
    return seen


def measure_drafters(bench: Bench, seconds: float) -> Steps:
    """Run the drafter threads on one batch a device, which is always there."""
    seen, stop = Steps(), StopRequest()

    def on_step(done: StepDone, _pulse: Pulse) -> None:
        seen.ended_s.append(time.monotonic())
        seen.tokens.append(done.sums.num_tokens)
        if len(seen.tokens) > 2 * _LEFT_OUT and seen.ended_s[-1] - seen.ended_s[0] > seconds:
            stop.soft.set()

    pipeline = bench.pipeline(on_step, stop)
    channel: OrderedChannel[Prepared] = pipeline.channel
    width = _NUM_TAPS * bench.shapes.hidden
    batch = bench.maker.make(0)
    ready = []
    for device in bench.drafter_devices:
        dtype = getattr(torch, bench.options.dtype)
        hidden = torch.randn(*batch.input_ids.shape, width, dtype=dtype, device=device)
        ready.append(Prepared(batch.to(device), hidden))

    def feed(_pulse: Pulse) -> None:
        index = 0
        try:
            while True:
                channel.put(index, ready[index % len(ready)])
                index += 1
        except ChannelClosedError:
            return

    pipeline.add_drafters()
    pipeline.supervisor.add("feeds", feed)
    pipeline.run_added()
    return seen


def gate_overhead_s(config: TrainConfig) -> float:
    """Seconds that a step of a known key spends in a gate when nobody else is there."""
    gate = CompileGate(assembly.gate_settings(config, 1))
    try:
        gate.run("known", lambda: None)
        count = 2000
        began = time.perf_counter()
        for _ in range(count):
            gate.run("known", lambda: None)
        return (time.perf_counter() - began) / count
    finally:
        gate.close()


@contextmanager
def stage(name: str) -> Iterator[dict[str, Any]]:
    """Time a stage and print what it found as one JSON line."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    yield found
    show(name, seconds=round(time.monotonic() - began, 1), **found)


def show(kind: str, **values: Any) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps({"kind": kind} | values) + "\n")
    sys.stdout.flush()


def stats_since(gate: CompileGate, before: GateStats) -> dict[str, float]:
    """Return what the gate counted since ``before``."""
    now = gate.stats
    names = ("num_shared", "num_exclusive", "num_graphs", "num_unexpected", "wait_s")
    return {name: getattr(now, name) - getattr(before, name) for name in names}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns the figures of the last line."""
    with stage("start") as found:
        bench = Bench(options)
        found.update({name: asdict(memory) for name, memory in bench.memory().items()})
        found["num_graphs"] = bench.gate.stats.num_graphs
    with stage("target") as found:
        target = measure_target(bench, options.seconds)
        found.update(tokens_per_s=round(target.rate()), batches=len(target.tokens))
    with stage("drafters") as found:
        drafters = measure_drafters(bench, options.seconds)
        found.update(of_steps(drafters))
    before = replace(bench.gate.stats)
    with stage("both") as found:
        both, flow = measure_both(bench, options.minutes * 60)
        found.update(flow | of_steps(both))
    counted = stats_since(bench.gate, before)
    if options.profile and options.device == "cuda":
        with stage("profile") as found:
            found.update(busy_share(bench))
    bench.gate.close()
    overhead_s = gate_overhead_s(bench.config)
    return figures(bench, target, drafters, both) | {
        "gate_us_a_step": round(overhead_s * 1e6, 1),
        "gate_share": gate_share(both, counted, overhead_s),
        "compiles_after_seal": counted["num_graphs"] + counted["num_unexpected"],
    }


def busy_share(bench: Bench) -> dict[str, Any]:
    """Return which part of a few seconds each card had a kernel or copy, and kernels' sums."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        both, _ = measure_both(bench, _PROFILE_S)
        torch.cuda.synchronize()
    ends: dict[int, float] = {}
    busy: dict[int, float] = {}
    total: dict[int, float] = {}
    first: dict[int, float] = {}
    events = [e for e in seen.events() or [] if e.device_type.name == "CUDA"]
    for event in sorted(events, key=lambda e: e.time_range.start):
        card, start, end = event.device_index, event.time_range.start, event.time_range.end
        first.setdefault(card, start)
        since = max(start, ends.get(card, start))
        busy[card] = busy.get(card, 0.0) + max(0.0, end - since)
        total[card] = total.get(card, 0.0) + end - start
        ends[card] = max(ends.get(card, end), end)
    return {
        "steps": len(both.tokens),
        "busy_share": {c: round(busy[c] / (ends[c] - first[c]), 4) for c in busy},
        "kernels_over_busy": {c: round(total[c] / busy[c], 4) for c in busy},
    }


def of_steps(seen: Steps) -> dict[str, float]:
    """Return the rate of a measurement and its step."""
    ms = round(seen.step_s() * 1e3, 2)
    return {"tokens_per_s": round(seen.rate()), "steps": len(seen.tokens), "step_ms": ms}


def gate_share(both: Steps, counted: dict[str, float], overhead_s: float) -> float:
    """Return the part of a step that goes to the gate: its locks, and waits for a compile."""
    spent = counted["wait_s"] + overhead_s * (counted["num_shared"] + counted["num_exclusive"])
    return round(spent / max(both.ended_s[-1] - both.ended_s[0], 1e-9), 6)


def figures(bench: Bench, target: Steps, drafters: Steps, both: Steps) -> dict[str, Any]:
    """Return the rates and what follows from them."""
    shared = bench.target_devices[0] == bench.drafter_devices[0]
    a, b = target.rate(), drafters.rate()
    reach = 1 / (1 / a + 1 / b) if shared else min(a, b)
    peak = {name: memory.peak for name, memory in both.memory[-1].items()}
    early = {name: memory.peak for name, memory in both.memory[_LEFT_OUT].items()}
    return {
        "target_tokens_per_s": round(a),
        "drafter_tokens_per_s": round(b),
        "both_tokens_per_s": round(both.rate()),
        "to_reach": round(reach),
        "efficiency": round(both.rate() / reach, 4),
        "drift": round(both.drift(), 4),
        "reserved_swing": {name: round(value, 5) for name, value in both.swing().items()},
        "peak_growth": {name: round(peak[name] / max(early[name], 1) - 1, 5) for name in peak},
        "peak_gb": {name: round(value / 1e9, 2) for name, value in peak.items()},
        "reserved_gb": {n: round(m.reserved / 1e9, 2) for n, m in both.memory[-1].items()},
        "first_loss": round(both.losses[0], 4),
        "last_loss": round(both.losses[-1], 4),
    }


def table(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """Return the figures as a Markdown table of one row."""
    cells = {
        "target": f"{options.target}, {options.layers or 'all'} layers",
        "cards": options.cards,
        "tokens / anchors": f"{options.tokens} / {options.anchors}",
        "target tok/s": found["target_tokens_per_s"],
        "drafter tok/s": found["drafter_tokens_per_s"],
        "both tok/s": found["both_tokens_per_s"],
        "of what is to reach": f"{found['efficiency']:.1%}",
        "gate": f"{found['gate_share']:.3%}",
        "reserved swing": f"{max(found['reserved_swing'].values()):.2%}",
        "drift": f"{found['drift']:+.2%}",
        "compiles": found["compiles_after_seal"],
    }
    lines = (cells, ["---"] * len(cells), cells.values())
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), default="27b")
    parser.add_argument("--layers", type=int, default=16, help="of the target; 0 for all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cards", type=int, default=1, help="1: both roles on one")
    parser.add_argument("--targets", type=int, default=1, help="cards of the target, of several")
    parser.add_argument("--tokens", type=int, default=8192, help="of a batch")
    parser.add_argument("--anchors", type=int, default=512, help="of a batch")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--queue-depth", type=int, default=4)
    parser.add_argument("--queue-gb", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each side alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true", help="add the share of time at work")
    parser.add_argument("--minutes", type=float, default=1.0, help="of both together")
    return parser.parse_args(arguments)


def main() -> int:
    """Print every stage and the table."""
    options = parse()
    card = "cpu"
    if options.device == "cuda":
        card = torch.cuda.get_device_name()
        options.layers = options.layers or None
    device = options.device
    show(
        "machine",
        card=card,
        torch=torch.__version__,
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        ceiling_tflops=round(ceiling_tflops(device), 1),
        **vars(options),
    )
    found = run(options)
    show("result", **found)
    sys.stdout.write(table(options, found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
