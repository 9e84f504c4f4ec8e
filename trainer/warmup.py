"""Fills the compile caches before a launch: ``python -m trainer warmup --run-dir DIR``.

Builds the run's own parts and takes one real step (forward, backward, optimiser) with the run's own
shapes on each drafter device in turn. Prints one JSON line a device on standard output and writes
warmup.json into the cache directory. What the caches cannot keep (tracing and guards, per process)
is done again by the trainer, in seconds.
"""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer import assembly
from trainer.compile_gate import CompileGate
from trainer.contract.config import TrainConfig
from trainer.contract.warmup_stamp import write_stamp
from trainer.data.packing import Batch
from trainer.model.target import Target
from trainer.optim import Schedule
from trainer.workers.drafter import forward_backward
from trainer.workers.target import FeatureCache, Prepared, gated_features

_LOOK_AT_BATCHES = 256


def warm_up(run_dir: Path) -> None:
    """Warm up every drafter device of the run.

    Raises: TrainerError or ContractError by name.
    """
    manifest, config = assembly.read_manifest(run_dir)
    devices = assembly.devices_of(manifest, config)
    gate = CompileGate(
        assembly.gate_settings(config, len(devices.drafters)),
        report=lambda text: sys.stderr.write(f"warning: {text}"),
    )
    began = time.monotonic()
    try:
        data = assembly.Data.load(manifest, config)
        steps = assembly.step_range(config, data.plan, len(devices.drafters))
        targets = assembly.load_targets(config, devices.targets[:1])
        target = next(iter(targets.values()))
        settled = assembly.settle_targets(targets, config, gate)
        _say(
            "warmup_loaded",
            load_s=_since(began),
            target=config.target.path,
            **settled.to_dict(),
        )
        batch = largest_batch(data, config)
        with assembly.current_device(target.device):
            hidden = gated_features(gate, target, batch, FeatureCache(0))
        prepared = Prepared(batch, hidden)
        schedule = Schedule.from_config(config.optim, steps.num_steps)
        told = [
            _warm_one(place, gate, prepared, (config, target, schedule))
            for place in _distinct(devices.drafters)
        ]
    finally:
        gate.close()
    if not assembly.compiles(config):
        text = "device cpu or compile off: nothing was compiled; one real step ran as a check"
        _say("warmup_note", text=text)
    write_stamp(manifest, told, time.time())
    _say(
        "warmup_done",
        num_devices=len(told),
        num_compiles=sum(one["num_compiles"] for one in told),
        total_s=_since(began),
        cache_dir=manifest.cache_dir,
    )


def largest_batch(data: assembly.Data, config: TrainConfig) -> Batch:
    """Return a batch with the plan's shapes: any packed one, the largest of the first in rows."""
    if config.data.packing:
        return data.maker.make(0)
    count = min(_LOOK_AT_BATCHES, data.plan.batches_in_epoch)
    lengths = data.dataset.lengths

    def padded_tokens(index: int) -> int:
        _, rows = data.plan.batch(index)
        return len(rows) * max(int(lengths[row].max()) for row in rows)

    return data.maker.make(max(range(count), key=padded_tokens))


def _warm_one(
    place: tuple[int, torch.device],
    gate: CompileGate,
    prepared: Prepared,
    parts: tuple[TrainConfig, Target, Schedule],
) -> dict[str, Any]:
    config, target, schedule = parts
    began, before = time.monotonic(), gate.stats.num_graphs
    attention = assembly.attention_of(config, gate)
    replica = assembly.build_replica(config, target, place, attention, schedule, None)
    replica.draft.train()
    with assembly.current_device(replica.device):
        sums = forward_backward(replica, gate, prepared, config)
        replica.optimizer.apply(0, float(sums.loss_sum), float(sums.weight_sum))
    if replica.device.type == "cuda":
        torch.cuda.synchronize(replica.device)
    return _say(
        "warmup",
        device=str(replica.device),
        warmup_s=_since(began),
        num_compiles=gate.stats.num_graphs - before,
        rows=prepared.batch.input_ids.shape[0],
        row_tokens=prepared.batch.input_ids.shape[1],
        loss=sums.loss,
    )


def _distinct(devices: Iterable[torch.device]) -> list[tuple[int, torch.device]]:
    """Return (rank, device) once a device; on the CPU all ranks share one."""
    return list(enumerate(dict.fromkeys(devices)))


def _say(kind: str, **values: Any) -> dict[str, Any]:
    sys.stdout.write(json.dumps({"kind": kind} | values) + "\n")
    sys.stdout.flush()
    return values


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
