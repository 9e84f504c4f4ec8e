"""One training step of the draft on synthetic hidden states: forward, loss, backward, optimiser.

    python -m benchmarks.draft_step --cases A B C P D [--variant dflash2] [--loss dpace] [--profile]

Runs the trainer's own ``forward_backward`` and ``apply`` behind its compile gate, with the shapes
of real drafts and random weights, and the rate of an 8192^3 bf16 product of the same run beside
it. Prints one JSON line a case. A: 8B shapes, 2 rows of 768, 256 anchors; B: 27B shapes, 3,072
tokens and 512 anchors; C: 4,096 and 1,024; P: 16 documents in a pack of 49,152 and 1,024; D: 64
anchors, blocks of 8, sliding layers. ``tiny`` runs on a CPU too.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import HEAD_FP8, LOSSES, VARIANTS, OptimConfig, TrainConfig
from trainer.data.packing import Batch, Document
from trainer.learning_rate import Schedule
from trainer.loss import draft_loss
from trainer.model.attention import Attention, FlexAttention, SdpaAttention, SpanAttention
from trainer.model.draft import DraftModel
from trainer.model.draft_config import DraftConfig
from trainer.model.head_proof import compare
from trainer.model.scaled_head import OFF, ScaledHead
from trainer.model.target import FrozenHead
from trainer.optim import DraftOptimizer
from trainer.workers.drafter import Replica, forward_backward
from trainer.workers.target import Prepared

_NUM_TAPS = 5
_CEILING_SIZE = 8192


@dataclass(frozen=True)
class Shapes:
    """Sizes of a target's draft."""

    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    mask_token_id: int


@dataclass(frozen=True)
class Case:
    """One step: rows of ``length`` tokens in ``documents`` equal documents, anchors a row."""

    shapes: Shapes
    rows: int
    length: int
    anchors: int
    block_size: int = 16
    window: int | None = None
    documents: int = 1
    variant: str = "dflash"
    loss: str = "decay"


_8B = Shapes(4096, 12288, 151936, 32, 8, 128, 1e6, 151669)
_27B = Shapes(5120, 17408, 248320, 32, 8, 128, 1e7, 248070)
CASES = {
    "A": Case(_8B, 2, 768, 256),
    "B": Case(_27B, 1, 3072, 512),
    "C": Case(_27B, 1, 4096, 1024),
    "P": Case(_27B, 1, 49152, 1024, documents=16),
    "D": Case(_27B, 1, 3072, 64, block_size=8, window=2048),
    "tiny": Case(Shapes(64, 128, 512, 4, 2, 16, 1e6, 500), 1, 96, 8, documents=2),
}


def draft_config(case: Case) -> DraftConfig:
    """Return the configuration of the case's draft: five layers and five taps."""
    shapes = case.shapes
    kind = "sliding_attention" if case.window else "full_attention"
    return DraftConfig(
        hidden_size=shapes.hidden,
        intermediate_size=shapes.inner,
        num_draft_layers=5,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        head_dim=shapes.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=shapes.theta,
        max_position_embeddings=262144,
        vocab_size=shapes.vocab,
        block_size=case.block_size,
        mask_token_id=shapes.mask_token_id,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        layer_types=(kind,) * 5,
        sliding_window=case.window,
        variant=case.variant,
    )


def train_config(case: Case, device: str) -> TrainConfig:
    """Return the configuration that the step reads."""
    return TrainConfig.from_dict(
        {
            "target": {"path": "none"},
            "data": {"path": "none", "token_budget": case.rows * case.length, "max_length": 64},
            "draft": {
                "block_size": case.block_size,
                "mask_token_id": case.shapes.mask_token_id,
                "layer_types": list(draft_config(case).layer_types),
                "sliding_window": case.window,
                "variant": case.variant,
            },
            "loss": {"name": case.loss},
            "run": {"device": device},
        }
    )


def make_batch(case: Case, device: str, seed: int = 0) -> Batch:
    """Return a batch of random tokens, all trained, with evenly spread anchors."""
    draw = torch.Generator().manual_seed(seed)
    rows, length, each = case.rows, case.length, case.length // case.documents
    ids = torch.randint(case.shapes.mask_token_id, (rows, length), generator=draw)
    places = torch.arange(length)[None].expand(rows, -1)
    # Distinct, ascending, and not the last token of a document.
    free = torch.nonzero(places[0] % each < each - 1).flatten()
    chosen = [
        free[torch.randperm(len(free), generator=draw)[: case.anchors]].sort().values
        for _ in range(rows)
    ]
    documents = tuple(
        Document(row * case.documents + d, row, d * each, each)
        for row in range(rows)
        for d in range(case.documents)
    )
    number = places // each + torch.arange(rows)[:, None] * case.documents
    return Batch(
        index=0,
        epoch=0,
        input_ids=ids,
        loss_mask=torch.ones(rows, length, dtype=torch.bool),
        document_ids=number.int(),
        position_ids=(places % each).contiguous(),
        anchor_positions=torch.stack(chosen),
        anchor_keep=torch.ones(rows, case.anchors, dtype=torch.bool),
        documents=documents,
        num_tokens=rows * length,
        num_anchors=rows * case.anchors,
    ).to(device)


def ceiling_tflops(device: str) -> float:
    """Return the rate of a large bf16 product, median of 20."""
    if device == "cpu":
        return 0.0
    left, right = (
        torch.randn(_CEILING_SIZE, _CEILING_SIZE, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    times = timed(lambda: left @ right, 5, 20, device)
    return 2 * _CEILING_SIZE**3 / statistics.median(times) / 1e9


def timed(step: Any, num_warmup: int, num_steps: int, device: str) -> list[float]:
    """Return the milliseconds of each call after the warm-up."""
    for _ in range(num_warmup):
        step()
    if device == "cpu":
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
        return times
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    event: Any = torch.cuda.Event  # torch gives it no types
    marks = [event(enable_timing=True) for _ in range(num_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case."""
    case = replace(CASES[name], variant=options.variant, loss=options.loss)
    device = options.device
    gate = CompileGate(GateSettings(compile=device != "cpu"))
    try:
        config = train_config(case, device)
        attention: Attention = SdpaAttention()
        if device != "cpu":
            attention = {"flex": FlexAttention, "spans": SpanAttention}[options.attention](gate)
        draft = DraftModel(draft_config(case), device=device, attention=attention)
        draft.train()
        head = with_fp8(random_head(case.shapes, device, draft.fc.weight.dtype), options.head_fp8)
        optimizer = DraftOptimizer(
            draft, OptimConfig(lr=1e-5), Schedule.from_config(OptimConfig(), 1000)
        )
        optimizer.take_gradients_directly()  # as a run of one drafter does
        replica = Replica(0, draft, head, optimizer, torch.device(device))
        hidden = torch.randn(
            case.rows,
            case.length,
            _NUM_TAPS * case.shapes.hidden,
            dtype=torch.bfloat16,
            device=device,
        )
        prepared = Prepared(make_batch(case, device), hidden)
        losses: list[float] = []

        def step() -> None:
            sums = forward_backward(replica, gate, prepared, config)
            row = torch.stack((sums.loss_sum.double(), sums.weight_sum.double()))
            copy = optimizer.launch(len(losses), row, optimizer.grad_norm())
            told = copy.wait()  # the one time that the host waits, as in a run
            optimizer.settle(len(losses), told)
            losses.append(told[0] / told[1])

        reference = plain_loss(case, draft, head, prepared, config) if options.reference else None
        times = timed(step, options.warmup, options.steps, device)
        graphs = gate.stats.num_graphs
        kinds = kernel_ms(step) if options.profile and device != "cpu" else {}
    finally:
        gate.close()
    median = statistics.median(times)
    return {
        "case": name,
        "variant": case.variant,
        "loss": case.loss,
        "head_fp8": options.head_fp8,
        "step_ms": round(median, 2),
        "min_ms": round(min(times), 2),
        "anchors_per_s": round(case.rows * case.anchors / median * 1e3),
        "tokens_per_s": round(case.rows * case.length / median * 1e3),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
        "first_loss": round(losses[0], 4),
        **({} if reference is None else {"fp32_loss": round(reference, 4)}),
        **({} if head.fp8 is None else {"self_test": compare(head, options.head_fp8).figures}),
        "num_graphs": graphs,
        "num_unexpected_compiles": gate.stats.num_unexpected,
        **({"kernel_ms": kinds} if kinds else {}),
    }


@torch.no_grad()
def plain_loss(
    case: Case, draft: DraftModel, head: FrozenHead, prepared: Prepared, config: TrainConfig
) -> float:
    """Return the loss of the same weights in eager fp32 with a dense mask, nothing fused."""
    device = draft.fc.weight.device
    wide = DraftModel(replace(draft_config(case), dtype="float32"), device=device)
    wide.load_state_dict({name: value.float() for name, value in draft.state_dict().items()})
    hidden = prepared.target_hidden.float()
    return draft_loss(wide, head.to(device, torch.float32), prepared.batch, hidden, config).loss


def kernel_ms(step: Any) -> dict[str, float]:
    """Return the milliseconds of the twenty longest kinds of GPU kernels of one step."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    totals = {
        event.key[:80]: event.self_device_time_total / 1e3
        for event in found.key_averages()
        if event.self_device_time_total
    }
    longest = sorted(totals.items(), key=lambda item: -item[1])[:20]
    return {"all": round(sum(totals.values()), 1)} | {k: round(v, 1) for k, v in longest}


def random_head(shapes: Shapes, device: str, dtype: torch.dtype) -> FrozenHead:
    """Return embedding and head, both random."""

    def weight() -> Tensor:
        return torch.randn(shapes.vocab, shapes.hidden, device=device, dtype=dtype) * 0.02

    return FrozenHead(weight(), weight())


def with_fp8(head: FrozenHead, products: str) -> FrozenHead:
    """Return the head with its FP8 form, as loss.head_fp8 asks for it."""
    return head if products == OFF else replace(head, fp8=ScaledHead.of(head.lm_head, products))


def main() -> int:
    """Run the cases asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=sorted(CASES), default=["A", "B", "C", "P", "D"]
    )
    parser.add_argument("--variant", choices=VARIANTS, default="dflash")
    parser.add_argument("--loss", choices=LOSSES, default="decay")
    parser.add_argument("--attention", choices=("spans", "flex"), default="spans")
    parser.add_argument("--head-fp8", choices=HEAD_FP8, default=OFF)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="add the time of each kernel")
    parser.add_argument(
        "--reference", action="store_true", help="add the first loss in eager fp32 (dense masks)"
    )
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    lines = [
        {
            "card": card,
            "torch": torch.__version__,
            "ceiling_tflops": round(ceiling_tflops(options.device), 1),
        }
    ]
    for name in [None, *options.cases]:
        if name is not None:
            lines.append(run_case(name, options))
            if options.device == "cuda":
                torch.cuda.empty_cache()
        text = json.dumps(lines[-1])
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if options.output:
            with options.output.open("a") as stream:
                stream.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
