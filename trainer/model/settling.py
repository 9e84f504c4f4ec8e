"""How a target runs, settled and tested on the target itself before training.

``settle`` chooses how documents are joined (model/batching.py) and whether the layers are compiled
(model/compiled_target.py). Compiled layers take over only when they give what the model's own give,
for every tap, with the weights that are loaded; then all their graphs are made, and no other is.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.compile_gate import CompileGate
from trainer.contract.config import TargetConfig
from trainer.errors import TargetError, TrainerError
from trainer.model import recurrent_kernels, row_scaled
from trainer.model.batching import (
    AUTO,
    BatchingFinding,
    kernel_of_delta_rule,
    probe_documents,
    settle_batching,
)
from trainer.model.compiled_target import CompiledTarget, why_unknown
from trainer.model.target import ROWS, Target

OFF, ON, FP8_ROWS = "off", "on", "rows"
# Of |difference| / |tap|. Rounding of a deep model is ten times below (it grows from layer to
# layer); a norm, a gate or a boundary that is wrong changes a tap by more than half.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_FP8_TOLERANCE = 0.3  # one product in e4m3 is 4% off


@dataclass(frozen=True)
class CompiledFinding:
    """How the layers run, and what the self-test found.

    sizes: tokens of a forward, all that are compiled; empty when the layers are the model's own.
    differences: of each tap from the model's own layers, relative, worst document. why_not: what
    keeps the layers from being compiled; failed: that was the self-test. products: bfloat16,
    float32 or FP8 rows.
    """

    sizes: tuple[int, ...] = ()
    differences: tuple[float, ...] = ()
    tolerance: float = 0.0
    num_graphs: int = 0
    seconds: float = 0.0
    products: str = ""
    why_not: str = ""
    failed: bool = False

    @property
    def passed(self) -> bool:
        """Whether each tap is what the model's own layers give."""
        found = self.differences
        return bool(found) and all(value <= self.tolerance for value in found)  # False for a NaN

    def __str__(self) -> str:
        if not self.differences:
            return f"target layers: as in transformers ({self.why_not})"
        found = " ".join(f"{value:.1e}" for value in self.differences)
        told = f"taps differ from the model's own by {found} (limit {self.tolerance:.0e})"
        if self.why_not:
            return f"target layers: as in transformers ({self.why_not}; {told})"
        sizes = ", ".join(str(size) for size in self.sizes)
        return (
            f"target layers: compiled for {sizes} tokens, {self.num_graphs} graphs in"
            f" {self.seconds:.0f} s, products in {self.products}; {told}"
        )


@dataclass(frozen=True)
class Settled:
    """How a target runs."""

    batching: BatchingFinding
    compiled: CompiledFinding

    @property
    def warnings(self) -> list[str]:
        """What a run should not pass over: compiled layers that failed their self-test."""
        return [str(self.compiled)] if self.compiled.failed else []

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"batching": self.batching.to_dict(), "compiled": asdict(self.compiled)}

    def __str__(self) -> str:
        return f"{self.batching}; {self.compiled}"


def settle(
    target: Target, config: TargetConfig, gate: CompileGate, *, forward_tokens: int, compiles: bool
) -> Settled:
    """Settle how ``target`` runs; sets its .batching and .compiled. Not while a thread uses it.

    ``forward_tokens``: of the longest forward of compiled layers, no less than any document has.
    ``compiles``: whether this run compiles at all.

    Raises: TargetError when what the configuration insists on cannot be had.
    """
    key = ("batching", str(target.device))
    batching = gate.run(key, lambda: settle_batching(target, config.batching), library=True)
    target.compiled = None
    reason = why_not(target, config, compiles=compiles)
    if reason:
        if config.compile == ON or config.fp8 != OFF:
            name = "compile: on" if config.fp8 == OFF else f"fp8: {config.fp8}"
            raise TargetError(f"target.{name} cannot be had: {reason}")
        return Settled(batching, CompiledFinding(why_not=reason))
    began, graphs = time.monotonic(), gate.stats.num_graphs
    made = CompiledTarget(
        target.decoder,
        target.target_layer_ids,
        gate,
        forward_tokens=forward_tokens,
        fp8=config.fp8 == FP8_ROWS,
    )
    finding = _tested(target, made, gate, config.fp8)
    if not finding.passed:
        if config.compile == ON or config.fp8 != OFF:
            raise TargetError(f"{finding}; set target.compile to off and target.fp8 to off")
        return Settled(batching, finding)
    _compile_all(target, made, gate)
    target.compiled = made
    finding = replace(
        finding,
        num_graphs=gate.stats.num_graphs - graphs,
        seconds=time.monotonic() - began,
    )
    return Settled(batching, finding)


def why_not(target: Target, config: TargetConfig, *, compiles: bool) -> str:
    """Return why the layers of ``target`` are not compiled, or an empty text."""
    if config.compile == OFF:
        return "target.compile is off"
    if not compiles and config.compile == AUTO:
        return "nothing is compiled"
    reason = why_unknown(target.decoder, target.target_layer_ids)
    if not reason and config.fp8 == FP8_ROWS:
        reason = row_scaled.why_not(target.device, target.dtype)
    rule = kernel_of_delta_rule(target)
    if not reason and config.compile == AUTO and rule and recurrent_kernels.is_fallback(rule):
        reason = "flash-linear-attention, whose delta rule they need, is not installed"
    return reason


def _tested(target: Target, made: CompiledTarget, gate: CompileGate, fp8: str) -> CompiledFinding:
    """Say by how much the compiled layers differ from the model's own."""
    try:
        differences = _differences(target, made, gate)
    except (TrainerError, torch.OutOfMemoryError):
        raise
    # Kernels of libraries fail in as many ways as there are versions and cards; the model runs.
    except Exception as error:  # noqa: BLE001
        said = " ".join(str(error).split())
        return CompiledFinding(failed=True, why_not=f"the self-test cannot run: {said}")
    dtype = str(target.dtype).removeprefix("torch.")
    finding = CompiledFinding(
        sizes=made.sizes,
        differences=differences,
        tolerance=TOLERANCES[target.dtype] if fp8 == OFF else _FP8_TOLERANCE,
        products=dtype if fp8 == OFF else f"FP8 {fp8}",
    )
    if finding.passed:
        return finding
    return replace(finding, failed=True, why_not="the self-test failed")


def _differences(target: Target, made: CompiledTarget, gate: CompileGate) -> tuple[float, ...]:
    """Compare documents of many lengths in one row, and two that fill it, with each alone."""
    spread = torch.arange(made.sizes[0]) * 7919 % target.head.embedding.shape[0]
    taps = len(target.target_layer_ids)
    worst = torch.zeros(taps)
    for documents in (probe_documents(target), list(spread.chunk(2))):

        def both(documents: Sequence[Tensor] = documents) -> tuple[list[Tensor], list[Tensor]]:
            own = [target.document_features([one], ROWS)[0] for one in documents]
            return made.features(documents), own

        key = ("target", str(target.device), made.sizes[0], len(documents))
        for one, alone in zip(*gate.run(key, both, library=True), strict=True):
            worst = torch.maximum(worst, _relative(one, alone, taps))
    return tuple(worst.tolist())


def _relative(found: Tensor, wanted: Tensor, taps: int) -> Tensor:
    """Return |found - wanted| / |wanted| of each tap. Shapes: [length, n * D] -> [n] on the CPU."""
    pairs = zip(found.float().chunk(taps, -1), wanted.float().chunk(taps, -1), strict=True)
    return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-30) for a, b in pairs]).cpu()


def _compile_all(target: Target, made: CompiledTarget, gate: CompileGate) -> None:
    """Run one forward of each size: documents of unequal length, and one alone."""
    for size in made.sizes:
        whole = torch.zeros(size, dtype=torch.long)

        def forward(whole: Tensor = whole, size: int = size) -> None:
            made.forward([whole], size)
            made.forward(list(torch.split(whole, [size // 4, size - size // 4])), size)

        gate.run(("target", str(target.device), size), forward, library=True)
