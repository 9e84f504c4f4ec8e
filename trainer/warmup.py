"""Fills the compile caches before a launch: ``python -m trainer warmup --run-dir DIR``.

Builds the run's own parts and takes real steps (forward, backward, optimiser) of every shape that
the run takes: the target's on each target device, the draft's on each drafter device in turn.
Prints one JSON line a device on standard output and writes warmup.json into the cache directory.
What the caches cannot keep (tracing and guards, per process) is done again by the trainer, in
seconds.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer import assembly, cache_store, torch_compiler
from trainer.compile_gate import CompileEvent, CompileGate
from trainer.contract.config import TrainConfig
from trainer.contract.manifest import Manifest
from trainer.contract.warmup_stamp import write_stamp
from trainer.device import current_device
from trainer.learning_rate import Schedule
from trainer.model.target import Target
from trainer.workers.target import Prepared


@dataclass(frozen=True)
class WarmupOptions:
    """Artefact files: ``load`` before anything is compiled, ``save`` at the end."""

    load: Path | None = None
    save: Path | None = None


@dataclass
class _Caches:
    """What the caches on disk gave so far."""

    counts: Counter[str] = field(default_factory=Counter)

    def take(self, event: CompileEvent) -> None:
        self.counts.update(event.cache)


def warm_up(run_dir: Path, options: WarmupOptions | None = None) -> None:
    """Warm up every device of the run.

    Raises: TrainerError or ContractError by name.
    """
    chosen = options or WarmupOptions()
    manifest, config = assembly.read_manifest(run_dir)
    with cache_store.only_writer(Path(manifest.cache_dir)):
        _fill(manifest, config, chosen)


def _fill(manifest: Manifest, config: TrainConfig, options: WarmupOptions) -> None:
    devices, caches = assembly.devices_of(manifest, config), _Caches()
    began = time.monotonic()
    if options.save is not None:
        cache_store.require_place(options.save)
        if not assembly.compiles(config):
            raise cache_store.nothing_to_save(options.save)
    if options.load is not None:
        size = cache_store.load(options.load, manifest)
        _say("warmup_artifacts", loaded=str(options.load), size_bytes=size)
    gate = CompileGate(
        assembly.gate_settings(config, len(devices.drafters)),
        on_event=caches.take,
        report=lambda text: sys.stderr.write(f"warning: {text}"),
    )
    try:
        data = assembly.Data.load(manifest, config)
        steps = assembly.step_range(config, data.plan, len(devices.drafters))
        targets = assembly.load_targets(config, devices.targets)
        settled = assembly.settle_targets(targets, config, gate)
        batches = data.maker.examples()
        prepared = assembly.warm_targets(gate, batches, targets.values())
        _say(
            "warmup_loaded",
            load_s=_since(began),
            target=config.target.path,
            batching=settled.to_dict(),
            num_compiles=gate.stats.num_graphs,
            cache=dict(caches.counts),
        )
        target = next(iter(targets.values()))
        schedule = Schedule.from_config(config.optim, steps.num_steps)
        told = [
            _warm_one(place, gate, prepared, (config, target, schedule), caches)
            for place in _distinct(devices.drafters)
        ]
    finally:
        gate.close()
    for text in _notes(config, data):
        _say("warmup_note", text=text)
    _keep(manifest, config, options)
    write_stamp(manifest, told, time.time())
    _say(
        "warmup_done",
        num_devices=len(told),
        num_compiles=gate.stats.num_graphs,
        total_s=_since(began),
        cache_dir=manifest.cache_dir,
    )


def _notes(config: TrainConfig, data: assembly.Data) -> list[str]:
    if not assembly.compiles(config):
        return ["device cpu or compile off: nothing was compiled; one real step ran as a check"]
    if data.plan.shapes() is None:
        text = "rows come in many lengths, of which one was warmed up"
        return [f"{text}: data.row_lengths would make them few, data.packing one"]
    return []


def _keep(manifest: Manifest, config: TrainConfig, options: WarmupOptions) -> None:
    if options.save is not None:
        size = cache_store.save(options.save, manifest)
        _say("warmup_artifacts", saved=str(options.save), size_bytes=size)
    elif config.compile.caching_precompile and assembly.compiles(config):
        torch_compiler.save_artifacts()  # this is what writes traces and guards to the disk


def _warm_one(
    place: tuple[int, torch.device],
    gate: CompileGate,
    prepared: Sequence[Prepared],
    parts: tuple[TrainConfig, Target, Schedule],
    caches: _Caches,
) -> dict[str, Any]:
    config, target, schedule = parts
    began, before, had = time.monotonic(), gate.stats.num_graphs, caches.counts.copy()
    attention = assembly.attention_of(config, assembly.draft_config(config, target), gate)
    replica = assembly.build_replica(config, target, place, attention, schedule, None)
    (replica,), findings = assembly.scale_heads(config, [replica])
    # As many drafters as there may be read gradients of the same type: the same kernels.
    replica.optimizer.arrange_gradients(1, config.optim.grad_accumulation)
    warmed = assembly.warm_replica(gate, config, prepared, replica)
    sums = warmed.sums
    with current_device(replica.device):
        replica.optimizer.apply(0, float(sums.loss_sum), float(sums.weight_sum))
    if replica.device.type == "cuda":
        torch.cuda.synchronize(replica.device)
    shapes = [(*one.batch.input_ids.shape, one.batch.anchor_positions.shape[1]) for one in prepared]
    return _say(
        "warmup",
        device=str(replica.device),
        warmup_s=_since(began),
        num_compiles=gate.stats.num_graphs - before,
        cache=dict(caches.counts - had),
        shapes=shapes,
        rows=shapes[-1][0],
        row_tokens=shapes[-1][1],
        loss=sums.loss,
        attention=None if warmed.attention is None else vars(warmed.attention),
        **({"head_fp8": findings[0].figures} if findings else {}),
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
