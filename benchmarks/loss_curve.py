"""The fused step against the plain one: the same losses, step by step.

    python -m benchmarks.loss_curve [--steps 200] [--head-fp8 both]

Trains a small draft three times on the same made-up chain of tokens: with the trainer's own step
(compiled layers, kernels of its own, one-pass AdamW), with plain PyTorch (dense attention, nothing
compiled, torch's AdamW on fp32 masters, gradients clipped by torch), and plainly once more on other
anchors, which shows how much two runs of the same kind differ. With --head-fp8 it trains once more
with the trainer's own step and FP8 products of the head. Prints the curves and one JSON line.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace

import torch

from benchmarks.draft_step import (
    Case,
    Shapes,
    draft_config,
    make_batch,
    random_head,
    train_config,
    with_fp8,
)
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import HEAD_FP8, OptimConfig
from trainer.learning_rate import Schedule
from trainer.loss import draft_loss
from trainer.model.attention import Attention, SdpaAttention, SpanAttention
from trainer.model.draft import DraftModel
from trainer.model.scaled_head import OFF
from trainer.model.target import FrozenHead
from trainer.optim import DraftOptimizer
from trainer.workers.drafter import Replica, forward_backward
from trainer.workers.target import Prepared

_SMALL = Case(Shapes(1024, 3072, 32000, 8, 2, 128, 1e6, 31999), 1, 1024, 96, documents=4)
_TINY = Case(Shapes(64, 128, 512, 4, 2, 16, 1e6, 511), 1, 96, 8, documents=2)
_LR = 3e-4


class Chain:
    """Batches whose next token mostly follows from the last, and taps that tell the tokens."""

    def __init__(self, case: Case, num_steps: int, device: str) -> None:
        self._case, self._device = case, device
        draw = torch.Generator().manual_seed(1)
        vocab, shape = case.shapes.mask_token_id, (num_steps, case.rows, case.length)
        after = torch.randperm(vocab, generator=draw)
        self._ids = torch.randint(vocab, shape, generator=draw)
        jumps = torch.rand(shape, generator=draw) < 0.1
        for place in range(1, case.length):
            follows = after[self._ids[..., place - 1]]
            self._ids[..., place] = torch.where(jumps[..., place], self._ids[..., place], follows)
        taps = torch.randn(vocab, 5 * case.shapes.hidden, generator=draw)
        self._taps = taps.to(device, torch.bfloat16)

    def batch(self, step: int, seed: int) -> Prepared:
        """Return the batch of a step; ``seed`` draws the anchors."""
        plain = make_batch(self._case, "cpu", seed=seed * 100003 + step)
        batch = replace(plain, input_ids=self._ids[step]).to(torch.device(self._device))
        return Prepared(batch, self._taps[batch.input_ids])


def fused(
    case: Case, batches: list[Prepared], head: FrozenHead, gate: CompileGate, device: str
) -> list[float]:
    """Train with the trainer's step; on a CPU its plain form, which only tries this program."""
    attention: Attention = SpanAttention(gate) if device != "cpu" else SdpaAttention()
    draft = DraftModel(draft_config(case), device=device, attention=attention)
    optimizer = DraftOptimizer(draft, OptimConfig(lr=_LR), Schedule(len(batches), 10, 0.1))
    optimizer.take_gradients_directly()
    replica = Replica(0, draft, head, optimizer, torch.device(device))
    losses = []
    for step, prepared in enumerate(batches):
        sums = forward_backward(replica, gate, prepared, train_config(case, device))
        optimizer.apply(step, sums.loss_sum, sums.weight_sum)
        losses.append(sums.loss)
    return losses


def plain(case: Case, batches: list[Prepared], head: FrozenHead, device: str) -> list[float]:
    """Train with PyTorch alone."""
    draft = DraftModel(draft_config(case), device=device)
    masters = [p.detach().float() for p in draft.parameters()]
    adamw = torch.optim.AdamW(masters, lr=_LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule, config = Schedule(len(batches), 10, 0.1), train_config(case, device)
    losses = []
    for step, prepared in enumerate(batches):
        draft.zero_grad()
        sums = draft_loss(draft, head, prepared.batch, prepared.target_hidden, config)
        sums.loss_sum.backward()  # type: ignore[no-untyped-call]
        for master, param in zip(masters, draft.parameters(), strict=True):
            assert param.grad is not None  # noqa: S101 - every parameter is used
            master.grad = param.grad.float() / sums.weight_sum
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in adamw.param_groups:
            group["lr"] = _LR * schedule.factor(step)
        adamw.step()
        with torch.no_grad():
            for master, param in zip(masters, draft.parameters(), strict=True):
                param.copy_(master)
        losses.append(sums.loss)
    return losses


def gap(one: list[float], other: list[float]) -> float:
    """Return the mean distance of two curves over their last half."""
    half = len(one) // 2
    return statistics.fmean(abs(a - b) for a, b in zip(one[half:], other[half:], strict=True))


def main() -> int:
    """Train three times; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--head-fp8", choices=HEAD_FP8, default=OFF)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device, case = options.device, _SMALL if options.device == "cuda" else _TINY
    chain = Chain(case, options.steps, device)
    head = random_head(case.shapes, device, torch.bfloat16)
    drawn = [[chain.batch(step, seed) for step in range(options.steps)] for seed in (0, 1)]
    gate = CompileGate(GateSettings(compile=device != "cpu"))  # one: graphs are the process's
    try:
        curves = {"fused": fused(case, drawn[0], head, gate, device)}
        if options.head_fp8 != OFF:
            scaled = with_fp8(head, options.head_fp8)
            curves["fp8"] = fused(case, drawn[0], scaled, gate, device)
    finally:
        gate.close()
    curves["plain"] = plain(case, drawn[0], head, device)
    curves["plain, other anchors"] = plain(case, drawn[1], head, device)
    for step in sorted({0, 1, 10, 50, 100, 150, options.steps - 1} & set(range(options.steps))):
        text = "  ".join(f"{name} {curve[step]:.4f}" for name, curve in curves.items())
        sys.stdout.write(f"step {step:4d}  {text}\n")
    found = {
        "first_gap": round(abs(curves["fused"][0] - curves["plain"][0]), 5),
        "gap_fused_plain": round(gap(curves["fused"], curves["plain"]), 5),
        "gap_of_anchors": round(gap(curves["plain"], curves["plain, other anchors"]), 5),
    }
    if options.head_fp8 != OFF:
        found["first_gap_fp8"] = round(abs(curves["fp8"][0] - curves["plain"][0]), 5)
        found["gap_fp8_plain"] = round(gap(curves["fp8"], curves["plain"]), 5)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
