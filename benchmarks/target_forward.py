"""The frozen target's forward up to its last tap: eager, compiled, in FP8; random weights.

    python -m benchmarks.target_forward --models q8 q27 --variants eager compiled fp8 [--profile]

Builds Qwen3-8B shapes (q8), the text part of Qwen3.6-27B's (q27: 48 layers of the gated delta rule
and 16 of full attention) or a tiny hybrid (a CPU too) on the device, and times
``Target.document_features`` through the trainer's compile gate, in each way to run its layers.
Prints one JSON line a measurement: the rate, the share of an 8192^3 bf16 product of the same run,
peak memory, graphs and recompiles. ``--compare`` also tells by how much each tap differs from
eager bf16, and on a cut model from eager fp32 (of itself, so a cut model should fit twice).
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.draft_step import ceiling_tflops, timed
from trainer.compile_gate import CompileGate, GateSettings
from trainer.model import recurrent_kernels
from trainer.model.batching import active_kernels
from trainer.model.compiled_target import CompiledTarget
from trainer.model.target import PACKED, ROWS, Target, default_target_layer_ids

_NUM_TAPS = 5
_CHUNK = 64  # tokens that the delta rule takes at a time
_GROUPS = (  # kernels by parts of their names, the first that fits
    ("compiled", ("triton_poi", "triton_red", "triton_per")),
    ("attention", ("flash", "fmha", "sdpa", "cudnn_generated", "attention")),
    ("delta rule", ("chunk_", "solve_tril", "recompute_w_u", "gated_delta", "causal_conv")),
    ("products", ("nvjet", "gemm", "cutlass", "cublas", "splitk", "wgmma", "scaled_mm")),
    ("copies", ("copy", "cat", "index", "gather", "memcpy", "memset")),
)


def _qwen3(num_layers: int) -> Any:
    return transformers.Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )


_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def _qwen36(num_layers: int) -> Any:
    return transformers.Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=num_layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=248320,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters=_ROPE | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
        tie_word_embeddings=False,
    )


def _tiny(num_layers: int) -> Any:
    return transformers.Qwen3_5TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        rope_parameters=_ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Shape:
    """A model: its class in transformers, its configuration and its number of layers."""

    kind: str
    config: Callable[[int], Any]
    num_layers: int


MODELS = {
    "q8": Shape("Qwen3ForCausalLM", _qwen3, 36),
    "q27": Shape("Qwen3_5ForCausalLM", _qwen36, 64),
    "tiny": Shape("Qwen3_5ForCausalLM", _tiny, 8),
}
VARIANTS = ("eager", "eager_packed", "compiled", "fp8")


def build(name: str, num_layers: int | None, device: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights, made on the device from empty tensors."""
    shape = MODELS[name]
    config = shape.config(num_layers or shape.num_layers)
    config._attn_implementation = "sdpa"
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = getattr(transformers, shape.kind)(config)
    finally:
        torch.set_default_dtype(old)
    model.to_empty(device=device)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers are computed
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):
                weight.uniform_(0.01, 16, generator=draw).log_()
            elif weight.ndim > 1:
                weight.normal_(0, 0.02, generator=draw)
            else:  # a centred norm multiplies by 1 + weight
                centred = "Qwen3_5" in shape.kind and "linear_attn.norm" not in key
                weight.fill_(0.0 if centred else 1.0)
    return model.eval()


def documents(lengths: Sequence[int], vocabulary: int) -> list[Tensor]:
    """Return random documents of these lengths."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=draw) for length in lengths]


def mixed_lengths(count: int) -> list[int]:
    """Return lengths spread evenly in their logarithm from 256 to 3,072, mean about 1,130."""
    share = torch.rand(count, generator=torch.Generator().manual_seed(5))
    return [int(length) for length in (256 * 12**share).long()]


def useful_flops(target: Target, lengths: Sequence[int]) -> float:
    """Return the FLOPs that no way to run the layers can do without, for these documents."""
    config, tokens = target.text_config, sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    total = 0.0
    for layer in list(target.layers)[: target.target_layer_ids[-1] + 1]:
        linears = [part for part in layer.modules() if isinstance(part, torch.nn.Linear)]
        total += 2 * tokens * sum(part.weight.numel() for part in linears)
        delta: Any = getattr(layer, "linear_attn", None)
        if delta is None:
            total += 4 * pairs * config.num_attention_heads * config.head_dim
        else:
            key, value = delta.head_k_dim, delta.head_v_dim
            each = 6 * key * value + 2 * _CHUNK * (3 * key + 2 * value)
            total += tokens * delta.num_v_heads * each
    return total


def sustained_tflops(device: str) -> float:
    """Return the rate of the same product once a second of it has brought the card to its limit."""
    if device == "cpu":
        return 0.0
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = timed(lambda: left @ right, 700, 50, device)
    return 2 * 8192**3 / statistics.median(times) / 1e9


@dataclass
class Bench:
    """One model and what was measured with it."""

    name: str
    options: argparse.Namespace
    gate: CompileGate
    target: Target = field(init=False)
    made: dict[str, CompiledTarget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = torch.bfloat16 if self.options.device == "cuda" else torch.float32
        model = build(self.name, self.options.layers, self.options.device, dtype)
        num_layers = len(model.model.layers)
        taps = default_target_layer_ids(num_layers, min(_NUM_TAPS, max(1, num_layers - 4)))
        self.target = Target(model, taps, forward_tokens=self.options.forward_tokens)
        if self.name != "q8":
            print("kernels:", active_kernels(self.target, ROWS), flush=True)

    def run(self, variant: str, lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Return what runs the target over documents of these lengths."""
        target, options = self.target, self.options
        rows = documents(lengths, int(target.text_config.vocab_size))
        if variant.startswith("eager"):
            batching = PACKED if variant == "eager_packed" else ROWS
            if batching == PACKED:
                target.attend_by_document()
            return lambda: target.document_features(rows, batching)
        if variant not in self.made:
            self.made[variant] = CompiledTarget(
                target.decoder,
                target.target_layer_ids,
                self.gate,
                forward_tokens=options.forward_tokens,
                fp8=variant == "fp8",
            )
        made = self.made[variant]

        def run() -> list[Tensor]:
            with self.gate.step((self.name, variant, *lengths)):
                return made.features(rows)

        return run

    def measure(self, variant: str, lengths: Sequence[int], ceiling: float) -> dict[str, Any]:
        """Time one variant."""
        device, options = self.options.device, self.options
        began, graphs = time.monotonic(), self.gate.stats.num_graphs
        run = self.run(variant, lengths)
        first = run()
        if device == "cuda":
            torch.cuda.synchronize()
        setup_s, made = time.monotonic() - began, self.gate.stats.num_graphs - graphs
        with torch.no_grad():
            times = timed(run, options.warmup, options.steps, device)
        ms, tokens = statistics.median(times), sum(lengths)
        rate = useful_flops(self.target, lengths) / ms / 1e9
        line: dict[str, Any] = {
            "model": self.name,
            "layers": len(self.target.layers),
            "variant": variant,
            "documents": len(lengths),
            "tokens": tokens,
            "ms": round(ms, 2),
            "min_ms": round(min(times), 2),
            "tokens_per_s": round(tokens / ms * 1e3),
            "useful_tflops": round(rate, 1),
            "share_of_product": round(rate / ceiling, 3) if ceiling else None,
            "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)
            if device == "cuda"
            else None,
            "setup_s": round(setup_s, 1),
            "num_graphs": made,
            "num_recompiles": self.gate.stats.num_graphs - graphs - made,
            "finite": all(bool(one.isfinite().all()) for one in first),
        }
        if options.profile and device == "cuda":
            line["kernel_ms"] = kernel_groups(run)
        return line


def kernel_groups(run: Callable[[], object]) -> dict[str, Any]:
    """Return milliseconds of GPU kernels by group, and the longest twelve."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    groups: dict[str, float] = {}
    single: dict[str, float] = {}
    for event in found.key_averages():
        ms = event.self_device_time_total / 1e3
        if not ms or "#" in event.key:  # a range, not a kernel
            continue
        low = event.key.lower()
        group = next((g for g, parts in _GROUPS if any(p in low for p in parts)), "elementwise")
        groups[group] = groups.get(group, 0.0) + ms
        single[f"{event.key[:60]} x{event.count}"] = ms
    longest = sorted(single.items(), key=lambda item: -item[1])[:12]
    groups = {"all": sum(groups.values()), **dict(sorted(groups.items(), key=lambda g: -g[1]))}
    return {k: round(v, 2) for k, v in groups.items()} | {
        "longest": {k: round(v, 2) for k, v in longest}
    }


def relative(found: Sequence[Tensor], wanted: Sequence[Tensor], taps: int) -> list[float]:
    """Return the relative difference of each tap, over all documents."""
    parts = zip(*([x.float().chunk(taps, -1) for x in rows] for rows in (found, wanted)))  # noqa: B905
    sums = torch.zeros(2, taps)
    for one, other in parts:
        for tap, (a, b) in enumerate(zip(one, other, strict=True)):
            sums[0, tap] += (a - b).square().sum().cpu()
            sums[1, tap] += b.square().sum().cpu()
    return [float(f"{float(value):.2e}") for value in (sums[0] / sums[1]).sqrt()]


def compare(bench: Bench, variants: Sequence[str], lengths: Sequence[int]) -> None:
    """Print the difference of each variant's taps to eager ones of the same and of fp32 weights."""
    taps = len(bench.target.target_layer_ids)
    found = {variant: bench.run(variant, lengths)() for variant in ["eager", *variants]}
    exact = None
    if bench.options.layers or bench.options.device == "cpu":
        wide = bench.target.model.float()
        exact = Target(wide, bench.target.target_layer_ids).document_features(
            documents(lengths, int(bench.target.text_config.vocab_size)), ROWS
        )
    for variant, features in found.items():
        line: dict[str, Any] = {"model": bench.name, "variant": variant, "taps_differ_from": {}}
        line["taps_differ_from"]["eager"] = relative(features, found["eager"], taps)
        if exact is not None:
            line["taps_differ_from"]["fp32"] = relative(features, exact, taps)
        show(line, bench.options.output)


def show(line: dict[str, Any], output: Path | None) -> None:
    """Print one JSON line, and append it to a file."""
    text = json.dumps(line)
    print(text, flush=True)
    if output is not None:
        with output.open("a") as stream:
            stream.write(text + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["q8", "q27"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "compiled"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--mixed", type=int, help="also this many documents of mixed lengths")
    parser.add_argument("--layers", type=int, help="of a cut model")
    parser.add_argument("--forward-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="add the time of groups of kernels")
    parser.add_argument("--compare", action="store_true", help="differences of taps, no times")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    return parser.parse_args()


def main() -> int:
    """Measure every model in every variant; returns the exit status."""
    options = parse()
    recurrent_kernels.offer_convolution("qwen3_5")
    ceiling, hot = ceiling_tflops(options.device), sustained_tflops(options.device)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    rates = {"ceiling_tflops": round(ceiling, 1), "sustained_tflops": round(hot, 1)}
    show({"card": card, "torch": torch.__version__, **rates}, options.output)
    shapes = [[options.length] * options.documents]
    if options.mixed:
        shapes.append(mixed_lengths(options.mixed))
    for name in options.models:
        gate = CompileGate(GateSettings(compile=options.device == "cuda"))
        try:
            bench = Bench(name, options, gate)
            if options.compare:
                compare(bench, [v for v in options.variants if v != "eager"], shapes[-1])
            else:
                for variant in options.variants:
                    for lengths in shapes:
                        show(bench.measure(variant, lengths, ceiling), options.output)
        finally:
            gate.close()
        del bench
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
