"""What the plan makes of the data: anchors, their coverage, steps and hours."""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import assembly
from trainer.compile_gate import CompileGate
from trainer.contract.config import TrainConfig
from trainer.contract.errors import ContractError
from trainer.contract.events import EventDecoder
from trainer.contract.manifest import Manifest
from trainer.data.coverage import Coverage
from trainer.data.packing import Batch, BatchMaker
from trainer.device import current_device
from trainer.doctor.findings import Finding, problem, warning
from trainer.errors import DataError
from trainer.learning_rate import Schedule
from trainer.model.target import Target
from trainer.workers.drafter import Replica, forward_backward
from trainer.workers.target import FeatureCache, Prepared, gated_features

_LOOK_AT_BATCHES = 8
_TIMED_STEPS = 2
_LAST_STEPS = 50  # of an earlier run
_TAIL_BYTES = 256 << 10
# What a step's time depends on, besides the devices.
_STEP_SECTIONS = ("target", "data", "draft", "loss")


@dataclass(frozen=True)
class PlanFacts:
    """Figures of one epoch and of the whole run; tokens and anchors are those of a few batches."""

    batches_in_epoch: int
    batches_per_step: int
    steps_in_epoch: float
    num_steps: int
    num_warmup_steps: int
    tokens_per_step: float
    anchors_per_step: float
    coverage: Coverage


def plan_facts(data: assembly.Data, config: TrainConfig, num_drafters: int) -> PlanFacts:
    """Lay out the run's own batches. Raises: DataError when they make less than one step."""
    steps = assembly.step_range(config, data.plan, num_drafters)
    in_epoch = data.plan.batches_in_epoch
    batches = [data.maker.make(index) for index in range(min(_LOOK_AT_BATCHES, in_epoch))]
    per_step = steps.batches_per_step
    return PlanFacts(
        batches_in_epoch=in_epoch,
        batches_per_step=per_step,
        steps_in_epoch=in_epoch / per_step,
        num_steps=steps.num_steps,
        num_warmup_steps=Schedule.from_config(config.optim, steps.num_steps).num_warmup_steps,
        tokens_per_step=per_step * statistics.fmean(batch.num_tokens for batch in batches),
        anchors_per_step=per_step * statistics.fmean(batch.num_anchors for batch in batches),
        coverage=data.coverage(config, steps),
    )


@dataclass(frozen=True)
class HoursFacts:
    """Seconds of a step and where they come from; None where nobody has measured one."""

    step_s: float | None
    source: str
    hours: float | None


def hours(num_steps: int, measured: tuple[float, str] | None) -> HoursFacts:
    """Return the hours of all steps."""
    if measured is None:
        return HoursFacts(None, "unknown: no earlier run here, and no step was timed", None)
    step_s, source = measured
    return HoursFacts(round(step_s, 4), source, round(num_steps * step_s / 3600, 3))


def earlier_step_s(manifest: Manifest) -> tuple[float, str] | None:
    """Return the median seconds of the last steps of a like run in the workspace, and its tag.

    Like: the same target, data layout, draft and loss on as many GPUs of the same kinds.
    """
    for path in sorted(_manifests(manifest), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            other = Manifest.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ContractError):
            continue
        if _alike(manifest, other) and (seconds := _last_steps(path.with_name("metrics.jsonl"))):
            return statistics.median(seconds), f"the last {len(seconds)} steps of {other.tag}"
    return None


def _manifests(manifest: Manifest) -> Iterator[Path]:
    return (Path(manifest.workspace) / "runs").glob("*/manifest.json")


def _alike(one: Manifest, other: Manifest) -> bool:
    def facts(manifest: Manifest) -> str:
        config = manifest.config
        optim = config.get("optim", {})
        kinds = sorted((gpu.role, gpu.name or "cpu") for gpu in manifest.gpus)
        sections = [config.get(name) for name in _STEP_SECTIONS]
        return json.dumps([kinds, sections, optim.get("grad_accumulation"), optim.get("name")])

    return facts(one) == facts(other)


def _last_steps(path: Path) -> list[float]:
    """Return step_s of the last step events; the first steps compile and do not count."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            events = list(EventDecoder(lenient=True).feed(stream.read()))
    except OSError:
        return []
    steps = [e for e in events if e["kind"] == "step" and isinstance(e.get("step_s"), float)]
    return [event["step_s"] for event in steps[1:][-_LAST_STEPS:]]


def timed_step_s(
    manifest: Manifest, config: TrainConfig, target: Target, maker: BatchMaker, share: float
) -> tuple[float, str]:
    """Take a few real steps on one target and one drafter device; returns (seconds, source).

    On GPUs targets and drafters work side by side, so the slower side counts; on a CPU both share
    the cores. ``share``: of all visits, those whose features no cache holds.
    """
    devices = assembly.devices_of(manifest, config)
    gate = CompileGate(assembly.gate_settings(config, 1))
    try:
        assembly.settle_targets({str(target.device): target}, config, gate)
        shape = assembly.draft_config(config, target)
        attention = assembly.attention_of(config, shape, gate)
        place = 0, devices.drafters[0]
        schedule = Schedule.from_config(config.optim, 1)
        replica = assembly.build_replica(config, target, place, attention, schedule, None)
        (replica,), _ = assembly.scale_heads(config, [replica])
        replica.optimizer.arrange_gradients(1, config.optim.grad_accumulation)
        replica.draft.train()
        timings = [
            _timed(gate, target, replica, maker.make(index), config)
            for index in range(1 + _TIMED_STEPS)  # the first one compiles and warms up
        ][1:]
    finally:
        gate.close()
    per_step = len(devices.drafters) * config.optim.grad_accumulation
    target_s, drafter_s = (statistics.fmean(part) * per_step for part in zip(*timings, strict=True))
    target_s *= share
    if config.run.device == "cpu":
        step_s = target_s + drafter_s
    else:
        step_s = max(target_s / len(devices.targets), drafter_s / len(devices.drafters))
    return step_s, f"{_TIMED_STEPS} steps timed now"


def _timed(
    gate: CompileGate, target: Target, replica: Replica, batch: Batch, config: TrainConfig
) -> tuple[float, float]:
    """Return the seconds of the target's and of the drafter's part of one micro-batch."""
    began = time.monotonic()
    with current_device(target.device):
        hidden = gated_features(gate, target, batch, FeatureCache(0))
        _settle(target.device)
    between = time.monotonic()
    with current_device(replica.device):
        sums = forward_backward(replica, gate, Prepared(batch, hidden), config)
        replica.optimizer.apply(0, float(sums.loss_sum), float(sums.weight_sum))
        _settle(replica.device)
    return between - began, time.monotonic() - between


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan_findings(facts: PlanFacts, config: TrainConfig) -> list[Finding]:
    """Judge the plan."""
    if not facts.coverage.is_low:
        return []
    text = (
        f"an epoch trains {facts.coverage.per_epoch:.0%} of the answers' tokens, though"
        f" {facts.coverage.reachable:.0%} can be reached"
    )
    fix = f"raise data.max_anchors ({config.data.max_anchors}) or lower data.token_budget"
    return [warning("coverage", text, "data.max_anchors", fix)]


def no_plan(error: DataError) -> Finding:
    """Return the finding for data that makes no step."""
    fix = "more data or epochs, or a smaller data.token_budget"
    return problem("steps", str(error), "optim.epochs", fix)
