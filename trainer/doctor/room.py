"""What the run will take: disk, host memory, and the memory of each GPU.

Weights, optimiser and checkpoints are counted; activations are estimated from shapes, so a GPU
that is nearly full by this may still run, or not.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import HEAD_FP8, TrainConfig
from trainer.data.packing import most_anchors
from trainer.doctor.findings import Finding, problem, warning
from trainer.doctor.samples import DataFacts
from trainer.export import tensor_shapes
from trainer.model.draft_config import DraftConfig
from trainer.model.head import CHUNK_BYTES

_SIZES = {"float32": 4, "bfloat16": 2}
_EVENT_BYTES = 900  # a step event and its line of the log
_FULL_FRAC = 0.95  # of a GPU: CUDA itself and fragments take the rest
_TOKEN_BYTES = 5  # a token id and its mask, in memory
_GPU_FIXES = {
    "target": "lower target.forward_tokens or data.token_budget",
    "drafter": "lower data.max_anchors, data.token_budget, run.queue_bytes or loss.chunk_rows",
}


@dataclass(frozen=True)
class DiskFacts:
    """Bytes below the workspace; checkpoints: those kept and one being written."""

    path: str
    free_bytes: int
    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int
    log_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All that the run writes."""
        checkpoints = self.checkpoint_bytes * self.num_checkpoints
        return checkpoints + self.export_bytes + self.log_bytes


@dataclass(frozen=True)
class HostFacts:
    """Bytes of the container's memory. features_bytes: hidden states of all samples."""

    available_bytes: int | None
    cache_bytes: int
    features_bytes: int
    data_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What is held for as long as the run lives."""
        return min(self.cache_bytes, self.features_bytes) + self.data_bytes


@dataclass(frozen=True)
class Card:
    """A device that holds a role; total_bytes None where there is no GPU to compare with."""

    device: str
    name: str
    total_bytes: int | None

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """Ask CUDA; a CPU has no memory of its own."""
        if device.type != "cuda":
            return cls(str(device), "cpu", None)
        facts = torch.cuda.get_device_properties(device)
        return cls(str(device), str(facts.name), int(facts.total_memory))


@dataclass(frozen=True)
class DeviceFacts:
    """One role's memory by part."""

    card: Card
    parts: dict[str, int]

    @property
    def needed_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def draft_numbers(draft: DraftConfig) -> int:
    """Return how many numbers the draft trains."""
    return sum(prod(shape) for shape in tensor_shapes(draft).values())


def _moment_numbers(draft: DraftConfig, config: TrainConfig) -> int:
    """AdamW keeps two numbers a weight, Muon one for the matrices of the layers."""
    per_tensor = {
        name: 1 if config.optim.name == "muon" and name.startswith("layers.") else 2
        for name in tensor_shapes(draft)
    }
    return sum(
        prod(shape) * (per_tensor[name] if len(shape) == 2 else 2)
        for name, shape in tensor_shapes(draft).items()
    )


def disk_facts(run_dir: Path, draft: DraftConfig, config: TrainConfig, num_steps: int) -> DiskFacts:
    """Return what checkpoints, export and logs take where the run will lie."""
    numbers, run = draft_numbers(draft), config.run
    averages = numbers if config.optim.ema_decay is not None else 0
    best = config.evaluation.every_steps is not None
    return DiskFacts(
        path=str(run_dir),
        free_bytes=shutil.disk_usage(run_dir).free,
        checkpoint_bytes=4 * (numbers + _moment_numbers(draft, config) + averages),
        num_checkpoints=run.keep_checkpoints + 1 + best,
        export_bytes=numbers * _SIZES[draft.dtype],
        log_bytes=num_steps // run.log_every_steps * _EVENT_BYTES,
    )


def host_facts(data: DataFacts, draft: DraftConfig, config: TrainConfig) -> HostFacts:
    """Return what the feature cache and the data take of the container's memory."""
    width = draft.num_taps * draft.hidden_size * _SIZES[config.target.dtype]
    in_memory = 0 if Path(data.path).is_dir() else data.num_tokens * _TOKEN_BYTES
    return HostFacts(
        available_bytes=available_bytes(),
        cache_bytes=config.target.cache_bytes,
        features_bytes=data.num_tokens * width,
        data_bytes=in_memory,
    )


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the memory that can still be taken, by the machine's word or the container's limit."""
    found: list[int] = []
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        found += [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no Linux, or no cgroup of its own
    return min(found) if found else None


def target_facts(
    text_config: Any, weight_bytes: int, draft: DraftConfig, config: TrainConfig, card: Card
) -> DeviceFacts:
    """Return what a target GPU holds: weights, one forward, and taps on their way to drafters."""
    size = _SIZES[config.target.dtype]
    hidden = int(text_config.hidden_size)
    inner = _inner_size(text_config, hidden)
    forward_tokens = min(config.target.forward_tokens, config.data.token_budget)
    taps = config.data.token_budget * draft.num_taps * hidden * size
    parts = {
        "weights": weight_bytes,
        # The residual, its norm, queries to outputs, and the three inner products of one layer.
        "forward (estimate)": forward_tokens * (8 * hidden + 3 * inner) * size,
        # One batch is made while another waits to be handed over and the one before is let go;
        # one copy joins its documents.
        "taps of three batches": taps * 4,
    }
    if config.target.fp8 != "off":  # beside the weights, which verification needs as they are
        parts["weights in FP8"] = weight_bytes // size
    return DeviceFacts(card, parts)


def _inner_size(text_config: Any, hidden: int) -> int:
    """Return the inner width of one token's feed-forward; that of the experts it goes to."""
    expert = getattr(text_config, "moe_intermediate_size", None)
    if expert is not None:
        return int(expert) * int(getattr(text_config, "num_experts_per_tok", None) or 1)
    return int(getattr(text_config, "intermediate_size", None) or 4 * hidden)


def drafter_facts(draft: DraftConfig, config: TrainConfig, card: Card) -> DeviceFacts:
    """Return what a drafter GPU holds."""
    size, numbers = _SIZES[draft.dtype], draft_numbers(draft)
    data, vocab, hidden = config.data, draft.vocab_size, draft.hidden_size
    block_tokens = most_anchors(data) * draft.block_size
    # A sampled head has the rows of the labels, each perhaps another, and the random ones.
    sampled = min(vocab, config.loss.head_sample + block_tokens)
    columns = sampled if config.loss.head_sample else vocab
    chunk_rows = config.loss.chunk_rows or max(1, CHUNK_BYTES // (vocab * size))
    own = 0 if draft.dtype == "float32" else numbers * size  # fp32 weights are the masters
    # With AdamW on a GPU bf16 weights are a half of their masters.
    split = config.optim.name == "adamw" and config.run.device != "cpu"
    averages = numbers * 4 if config.optim.ema_decay is not None else 0
    heads = draft.num_attention_heads * draft.head_dim
    narrow = draft.num_key_value_heads * draft.head_dim
    # Kept for the backward, a layer: of each block token the residuals, norms, queries, keys,
    # values, outputs and inner products; of each context token keys and values, before and after.
    per_block = 5 * hidden + 4 * heads + 4 * narrow + 4 * draft.intermediate_size
    kept = block_tokens * per_block + data.token_budget * 6 * narrow
    taps = data.token_budget * draft.num_taps * hidden * _SIZES[config.target.dtype]
    queued = config.run.queue_bytes
    if config.run.queue_depth is not None:
        queued = min(queued, taps * config.run.queue_depth)
    parts = {
        "weights": own,
        "fp32 masters": numbers * 4 - (own if split else 0),
        "optimiser moments": _moment_numbers(draft, config) * 4,
        "gradients": numbers * 4 + numbers * size,
        "moving average": averages,
        "target's embedding and head": vocab * hidden * size * (1 if draft.tied_target else 2),
        "taps in the queue": max(taps, queued),
        "taps of a batch": data.token_budget * (draft.num_taps + 2) * hidden * size,
        "activations (estimate)": draft.num_draft_layers * kept * size,
        "logits of a chunk": min(block_tokens, chunk_rows) * columns * size,
    }
    num_fp8 = HEAD_FP8.index(config.loss.head_fp8)  # heads: of the logits, of their gradient
    if num_fp8:
        parts["head in FP8"] = num_fp8 * vocab * hidden
    if config.loss.head_fp8 == "both":  # the logits' shares in FP8, a byte each
        parts["logits of a chunk"] += min(block_tokens, chunk_rows) * columns
    return DeviceFacts(card, parts)


def room_findings(
    disk: DiskFacts | None, host: HostFacts | None, devices: Mapping[str, DeviceFacts]
) -> list[Finding]:
    """Judge disk, host memory and GPUs."""
    found: list[Finding] = []
    if disk is not None and disk.needed_bytes > disk.free_bytes:
        text = (
            f"{gib(disk.needed_bytes)} are needed ({disk.num_checkpoints} checkpoints of"
            f" {gib(disk.checkpoint_bytes)}), {gib(disk.free_bytes)} are free"
        )
        fix = "make room, lower run.keep_checkpoints, or another workspace in hosts.yaml"
        found.append(problem("disk", text, disk.path, fix))
    if host is not None and (host.available_bytes or host.needed_bytes) < host.needed_bytes:
        text = (
            f"the cache of hidden states and the data take {gib(host.needed_bytes)},"
            f" {gib(host.available_bytes or 0)} are available: the kernel would kill the run"
        )
        fix = "lower target.cache_bytes, or raise the container's memory limit"
        found.append(warning("host-memory", text, "target.cache_bytes", fix))
    return found + _gpu_findings(devices)


def _gpu_findings(devices: Mapping[str, DeviceFacts]) -> list[Finding]:
    """Warn about GPUs that are too small; a GPU may hold both roles."""
    found: list[Finding] = []
    for card in dict.fromkeys(one.card for one in devices.values()):
        roles = {role: one for role, one in devices.items() if one.card == card}
        needed = sum(one.needed_bytes for one in roles.values())
        if card.total_bytes is None or needed <= _FULL_FRAC * card.total_bytes:
            continue
        parts = {part: size for one in roles.values() for part, size in one.parts.items()}
        text = (
            f"about {gib(needed)} are needed, {card.name} has {gib(card.total_bytes)};"
            f" the largest part: {max(parts, key=lambda part: parts[part])}"
        )
        fix = _GPU_FIXES[next(iter(roles))] if len(roles) == 1 else "give each role its own GPU"
        found.append(warning("gpu-memory", text, " and ".join(roles), fix))
    return found


def gib(size_bytes: int) -> str:
    """Return bytes for people."""
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"
