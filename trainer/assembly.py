"""Builds the parts of a run from its manifest: devices, target, data, plan and draft replicas.

Training, warm-up, evaluation and export all start from the same parts, made in the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from trainer import torch_compiler
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import Sections, TrainConfig
from trainer.contract.errors import ConfigError, ManifestError
from trainer.contract.manifest import Gpu, Manifest
from trainer.data.coverage import Coverage, expected_coverage
from trainer.data.dataset import Dataset, load_tokenizer
from trainer.data.packing import Batch, BatchMaker, BatchPlan
from trainer.data.shards import open_dataset
from trainer.device import current_device
from trainer.errors import DataError, TargetError
from trainer.learning_rate import Schedule
from trainer.loss import LossSums
from trainer.model.attention import Attention, FlexAttention, SdpaAttention, SpanAttention
from trainer.model.attention_memory import MeteredAttention, Taken, meter_of
from trainer.model.attention_proof import prove_spans
from trainer.model.draft import DraftConfig, DraftModel, measured_tap_scale
from trainer.model.head_proof import HeadFinding, scaled_head_of
from trainer.model.scaled_head import OFF
from trainer.model.settling import Settled, settle
from trainer.model.spans import why_no_spans
from trainer.model.target import FrozenHead, Target, load_target
from trainer.optim import DraftOptimizer
from trainer.workers.drafter import Replica, StepRange, forward_backward, step_key
from trainer.workers.target import FeatureCache, Prepared, gated_features

# Tap sizes vary little between chats; this many samples fix them to a per mille.
_TAP_SCALE_SAMPLES = 64
_COVERAGE_BATCHES = 32  # spread over the first epoch
_GRAPHS_PER_SHAPE = 4
_MAY_CHANGE = frozenset(
    (
        *("target.path", "target.cache_bytes", "data.path"),  # what is there has its own digest
        "target.compile",
        "loss.chunk_rows",
        *("optim.lr", "optim.adamw_lr", "optim.min_lr_frac"),  # the schedule's form stays
        *("optim.weight_decay", "optim.clip_norm", "optim.ema_decay"),
    )
)
_MAX_SHAPES = 256


@dataclass(frozen=True)
class Devices:
    """One entry a role entry of hosts.yaml, in its order; on the CPU all are ``cpu``.

    target_gpus: where target threads run, as people call it.
    """

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    labels: dict[str, torch.device]
    target_gpus: tuple[str, ...]


def read_manifest(run_dir: Path) -> tuple[Manifest, TrainConfig]:
    """Read manifest.json of a run. Raises: ManifestError, ConfigError."""
    path = run_dir / "manifest.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; is this a run directory?") from error
    manifest = Manifest.from_json(text)
    return manifest, TrainConfig.from_dict(manifest.config)


def devices_of(manifest: Manifest, config: TrainConfig) -> Devices:
    """Return the torch devices of the roles.

    CUDA_VISIBLE_DEVICES lists the target GPUs first and the drafter GPUs after them, each once, so
    cuda:i is the i-th GPU of the manifest; a GPU may hold several roles.

    Raises: ConfigError when the GPUs asked for are not there; the CPU is never taken instead.
    """
    roles = manifest.devices("target"), manifest.devices("drafter")
    for gpus, name in zip(roles, ("target", "drafter"), strict=True):
        if not gpus:
            raise ConfigError(f"manifest.json has no device in the role {name}")
    if config.run.device == "cpu":
        cpu = torch.device("cpu")
        targets, drafters = ((cpu,) * len(gpus) for gpus in roles)
        return Devices(targets, drafters, {"cpu": cpu}, ("cpu",) * len(targets))
    gpus = [*roles[0], *roles[1]]
    _check_cuda(gpus)
    order = list(dict.fromkeys(gpu.uuid for gpu in gpus))
    found = [torch.device("cuda", order.index(gpu.uuid)) for gpu in gpus]
    labels = {f"{gpu.role}:{gpu.index}": d for gpu, d in zip(gpus, found, strict=True)}
    count, names = len(roles[0]), tuple(f"GPU {gpu.index}" for gpu in roles[0])
    return Devices(tuple(found[:count]), tuple(found[count:]), labels, names)


def _check_cuda(gpus: Sequence[Gpu]) -> None:
    if any(gpu.uuid is None for gpu in gpus):
        raise ConfigError("run.device is cuda, but a role entry is `cpu`; set run.device to cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"run.device is cuda, but torch {torch.__version__} sees no usable GPU here;"
            " look at the driver with nvidia-smi, or set run.device to cpu"
        )
    needed = len({gpu.uuid for gpu in gpus})
    if torch.cuda.device_count() < needed:
        raise ConfigError(
            f"the roles need {needed} GPUs, but torch sees {torch.cuda.device_count()};"
            " CUDA_VISIBLE_DEVICES must list the target GPUs, then the drafter GPUs"
        )


def compiles(config: TrainConfig) -> bool:
    """Say whether anything is compiled."""
    return config.run.device == "cuda" and config.compile.mode != "off"


def gate_settings(config: TrainConfig, num_devices: int) -> GateSettings:
    """Return the settings of the compile gate for this run. Raises: ConfigError."""
    chosen = config.compile
    if chosen.caching_precompile and not torch_compiler.keeps_traces():
        raise ConfigError(
            f"compile.caching_precompile needs torch 2.14, this is {torch.__version__}; leave it"
            " out, the other caches work everywhere"
        )
    return GateSettings(
        compile=compiles(config),
        gate=chosen.gate == "on",
        recompile_limit=num_devices * _MAX_SHAPES * _GRAPHS_PER_SHAPE,
        watchdog_s=chosen.watchdog_s,
        limit_s=chosen.limit_s,
        allow_fallback=chosen.allow_fallback,
        force_during_fx_trace=chosen.force_during_fx_trace,
        error_on_nested_fx_trace=chosen.error_on_nested_fx_trace,
        caching_precompile=chosen.caching_precompile,
    )


@dataclass(frozen=True)
class Data:
    """The tokenised chats and the plan over them."""

    dataset: Dataset
    plan: BatchPlan
    maker: BatchMaker

    @classmethod
    def load(cls, manifest: Manifest, config: TrainConfig) -> "Data":
        """Open or tokenise the data. Raises: DataError, also when it is not the launched one."""
        tokenizer = load_tokenizer(config.target.path, config.target.revision)
        dataset = open_dataset(config.data.path, tokenizer, config.data.max_length)
        if dataset.sha256 != manifest.dataset_sha256:
            raise DataError(
                f"{config.data.path} has changed since the launch: sha256"
                f" {dataset.sha256[:12]}, the manifest has {manifest.dataset_sha256[:12]}"
            )
        plan = BatchPlan(dataset.lengths, config.data, config.seed)
        return cls(dataset, plan, BatchMaker(dataset, plan, config))

    def epochs(self, steps: StepRange) -> float:
        """Return how often the steps of the whole run visit the data."""
        return steps.num_steps * steps.batches_per_step / self.plan.batches_in_epoch

    def coverage(self, config: TrainConfig, steps: StepRange) -> Coverage:
        """Return which share of the trained tokens the drawn blocks reach, by a few batches."""
        last = self.plan.batches_in_epoch - 1
        places = np.unique(np.linspace(0, last, _COVERAGE_BATCHES).round().astype(int))
        batches = [self.maker.make(int(place)) for place in places]
        return expected_coverage(
            batches, config.data.max_anchors, config.draft.block_size, self.epochs(steps)
        )


def step_range(config: TrainConfig, plan: BatchPlan, num_drafters: int) -> StepRange:
    """Return the steps of the whole run. Raises: DataError when the data is less than one step."""
    accumulation = config.optim.grad_accumulation
    batches_per_step, most = num_drafters * accumulation, config.optim.max_steps
    num_batches = plan.num_batches(
        config.optim.epochs, at_most=None if most is None else most * batches_per_step
    )
    num_steps = num_batches // batches_per_step
    if num_steps == 0:
        raise DataError(
            f"{num_batches} batches in optim.epochs {config.optim.epochs:g} are less than one step"
            f" of {num_drafters} drafters x {accumulation}; use more epochs or smaller batches"
        )
    return StepRange(0, num_steps, num_drafters, accumulation)


def load_targets(config: TrainConfig, devices: Sequence[torch.device]) -> dict[str, Target]:
    """Load the target once a device; threads on the CPU share one. Raises: TargetError."""
    disable_progress_bar()  # it would fill the log with carriage returns
    return {
        str(device): load_target(config.target, config.draft, device)
        for device in dict.fromkeys(devices)
    }


def settle_targets(
    targets: Mapping[str, Target], config: TrainConfig, gate: CompileGate
) -> Settled:
    """Settle how each target joins documents and runs its layers.

    Returns the finding of the first target that has a warning, else of the first.

    Raises: TargetError when the configuration insists on what a target cannot do.
    """
    room = min(config.target.forward_tokens, config.data.token_budget)
    forward_tokens = max(room, config.data.max_length)
    found = []
    for target in targets.values():
        with current_device(target.device):  # kernels of recurrent layers compile here, alone
            found.append(
                settle(
                    target,
                    config.target,
                    gate,
                    forward_tokens=forward_tokens,
                    compiles=compiles(config),
                )
            )
    return next((one for one in found if one.warnings), found[0])


def draft_config(config: TrainConfig, target: Target) -> DraftConfig:
    """Return the draft's shape. Raises: TargetError when it does not fit the target."""
    return DraftConfig.from_target(target.text_config, config.draft, target.num_layers)


def attention_of(config: TrainConfig, draft: DraftConfig, gate: CompileGate) -> Attention:
    """Return dense SDPA where nothing is compiled, else what compile.attention says.

    Raises: TargetError for spans and heads that the kernels do not take.
    """
    if not compiles(config):
        return SdpaAttention()
    wanted, refused = config.compile.attention, why_no_spans(draft.head_dim)
    if wanted == "spans" and refused:
        raise TargetError(refused)
    return FlexAttention(gate) if wanted == "flex" or refused else SpanAttention(gate)


def tap_scale(target: Target, dataset: Dataset, gate: CompileGate) -> Tensor:
    """Measure 1 / RMS of each tap on the first samples. Shapes: [n] fp32."""
    documents = [torch.from_numpy(s.input_ids) for s in dataset.samples[:_TAP_SCALE_SAMPLES]]
    with current_device(target.device):
        key = ("target", str(target.device))
        features = gate.run(key, lambda: target.document_features(documents), library=True)
    return measured_tap_scale(features, len(target.target_layer_ids)).cpu()


def build_replica(
    config: TrainConfig,
    target: Target,
    place: tuple[int, torch.device],
    attention: Attention,
    schedule: Schedule,
    scale: Tensor | None,
) -> Replica:
    """Build the draft of ``place`` (rank, device); every rank starts from the same weights.

    Shapes: scale [num_taps], as ``measured_tap_scale`` gives it.
    """
    rank, device = place
    draft = DraftModel(
        draft_config(config, target), seed=config.seed, device=device, attention=attention
    )
    if scale is not None:
        draft.tap_scale.copy_(scale)
    head = target.head.to(device, getattr(torch, config.draft.dtype))
    optimizer = DraftOptimizer(draft, config.optim, schedule, keep_average=rank == 0)
    return Replica(rank, draft, head, optimizer, device)


def scale_heads(
    config: TrainConfig, replicas: Sequence[Replica]
) -> tuple[list[Replica], list[HeadFinding]]:
    """Return the replicas with the head's FP8 form, made and tested once a device.

    As they are, and no finding, where loss.head_fp8 is off. Raises: TargetError when a device
    cannot have it.
    """
    products = config.loss.head_fp8
    if products == OFF:
        return list(replicas), []
    made: dict[torch.device, tuple[FrozenHead, HeadFinding]] = {}
    for replica in replicas:
        if replica.device not in made:
            with current_device(replica.device):
                made[replica.device] = scaled_head_of(replica.head, products)
    shared = [
        replace(replica, head=replace(replica.head, fp8=made[replica.device][0].fp8))
        for replica in replicas
    ]
    return shared, [finding for _, finding in made.values()]


def warm_parts(
    gate: CompileGate,
    config: TrainConfig,
    batches: Sequence[Batch],
    targets: Iterable[Target],
    replicas: Iterable[Replica],
) -> list[str]:
    """Compile in this thread what the workers will need, then allow no further compile.

    ``batches``: one of each shape of the plan; the replicas' weights stay as they are. Returns what
    a person should know of it.
    """
    prepared, told = warm_targets(gate, batches, targets), []
    for replica in replicas:
        warmed = warm_replica(gate, config, prepared, replica)
        if warmed.attention is not None:
            told.append(f"attention on {replica.device} takes {warmed.attention}")
        with current_device(replica.device):
            replica.optimizer.rehearse()
    if config.data.packing or config.data.row_lengths is not None:  # else shapes have no end
        gate.seal()
    return told


def warm_targets(
    gate: CompileGate, batches: Sequence[Batch], targets: Iterable[Target]
) -> list[Prepared]:
    """Make the hidden states of each batch on each target; returns those of the last."""
    prepared: list[Prepared] = []
    for target in targets:
        with current_device(target.device):
            prepared = [
                Prepared(batch, gated_features(gate, target, batch, FeatureCache(0)))
                for batch in batches
            ]
    return prepared


@dataclass(frozen=True)
class Warmed:
    """What the warm-up of a replica gave: the sums of the last batch, and what attention took.

    attention: None where nothing keeps it from being dense, or nothing tells.
    """

    sums: LossSums
    attention: Taken | None


def warm_replica(
    gate: CompileGate, config: TrainConfig, prepared: Sequence[Prepared], replica: Replica
) -> Warmed:
    """Run forward and backward of every batch.

    Raises: TargetError when the attention's kernels give wrong numbers on this device,
    CompileGateError when attention runs dense all the same.
    """
    draft, attention = replica.draft, replica.draft.attention
    draft.train()
    with current_device(replica.device):
        if isinstance(attention, SpanAttention):
            prove_spans(attention.attend, draft.config, replica.device)
        sums = [forward_backward(replica, gate, one, config) for one in prepared]
        metered = replica.device.type == "cuda" and not isinstance(attention, SdpaAttention)
        taken = [_metered(gate, config, one, replica) for one in prepared] if metered else []
    return Warmed(sums[-1], worst_attention(gate, taken))


def worst_attention(gate: CompileGate, taken: Sequence[Taken]) -> Taken | None:
    """Return what took most of what it may; None, and a warning, where that cannot be measured."""
    worst = max(taken, key=lambda one: one.share, default=None)
    if worst is None or worst.taken:
        return worst
    # Any forward requests its output at least.
    gate.warn_once(
        "whether attention runs dense could not be measured: the allocator counts no requests"
        " (PYTORCH_CUDA_ALLOC_CONF backend:cudaMallocAsync does not; native does)"
    )
    return None


def _metered(gate: CompileGate, config: TrainConfig, one: Prepared, replica: Replica) -> Taken:
    """Run a warm step once more and look at what attention takes, now that nothing compiles.

    No other thread may work on the device. Raises: CompileGateError when it is dense.
    """
    draft, attention = replica.draft, replica.draft.attention
    metered = draft.attention = MeteredAttention(attention, meter_of(replica.device))
    try:
        forward_backward(replica, gate, one, config)
    finally:
        draft.attention = attention
    taken = metered.found
    if taken.share > 1:
        key = step_key(replica.device, one.batch, draft)
        gate.report_fallback(key, f"attention of step {key} runs dense, it takes {taken}")
    return taken


def identity(
    config: TrainConfig, target: Target, manifest: Manifest, steps: StepRange
) -> dict[str, Any]:
    """Return the facts of a run by name: its whole configuration, and what follows from it.

    A resumed run must share them with its checkpoint, but for those of ``may_change``.
    """
    return _settings(config) | {
        "draft.target_layer_ids": list(target.target_layer_ids),
        "target_revision": manifest.target_revision,
        "dataset_sha256": manifest.dataset_sha256,
        "seed": config.seed,
        "batches_per_step": steps.batches_per_step,
        "num_steps": steps.num_steps,
    }


def default_facts() -> dict[str, Any]:
    """Return the facts of ``identity`` that a run had before there were settings for them."""
    return _settings(Sections())


def _settings(config: Sections) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in config.to_dict().items()
        if isinstance(values, dict)
        for key, value in values.items()
    }


def may_change(name: str) -> bool:
    """Say whether a resumed run may change this fact of ``identity``.

    It may when neither the meaning of the weights, nor the order of the data, nor the place in the
    schedule depends on it. Whatever is not listed, later settings included, may not.
    """
    return name.startswith(("run.", "compile.", "evaluation.")) or name in _MAY_CHANGE
