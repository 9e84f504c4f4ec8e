"""Target threads: make batches in order, run the frozen target, hand hidden states over."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate
from trainer.data.packing import Batch, BatchMaker, place_features
from trainer.model.target import Target
from trainer.workers.supervisor import Pulse


@dataclass(frozen=True)
class Prepared:
    """A batch with its hidden states. Shapes: target_hidden [R, S, n * D]."""

    batch: Batch
    target_hidden: Tensor


class FeatureCache:
    """Hidden states of samples already seen, in host memory, up to ``capacity_bytes``.

    Samples are visited once an epoch in random order, so the first ones stay: replacing them
    would hit no more often.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._features: dict[int, Tensor] = {}
        self.used_bytes = 0

    def get(self, sample_id: int) -> Tensor | None:
        """Return the features of a sample on the CPU, or None."""
        return self._features.get(sample_id)

    def put(self, sample_id: int, features: Tensor) -> None:
        """Keep the features when there is room."""
        size = features.numel() * features.element_size()
        with self._lock:
            if sample_id in self._features or self.used_bytes + size > self._capacity_bytes:
                return
            self.used_bytes += size
            # A copy: the tensor may be a view of a whole padded batch.
            self._features[sample_id] = features.to("cpu", copy=True)


class IndexCounter:
    """Hands out batch indices, each once, to all target threads."""

    def __init__(self, first: int, stop: int) -> None:
        self._next, self._stop = first, stop
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return the next index, or None after the last."""
        with self._lock:
            if self._next >= self._stop:
                return None
            self._next += 1
            return self._next - 1


def batch_features(target: Target, batch: Batch, cache: FeatureCache) -> Tensor:
    """Return the hidden states of a batch, from the cache where it has them.

    Shapes: [R, S, n * D] on the target's device.
    """
    found: list[Tensor | None] = [cache.get(sample_id) for sample_id in batch.sample_ids]
    missing = [place for place, features in enumerate(found) if features is None]
    if missing:
        tokens = batch.document_tokens()
        made = target.document_features([tokens[place] for place in missing])
        for place, features in zip(missing, made, strict=True):
            found[place] = features
            cache.put(batch.sample_ids[place], features)
    whole: Sequence[Tensor] = [f.to(target.device) for f in found if f is not None]
    return place_features(whole, batch)


def gated_features(gate: CompileGate, target: Target, batch: Batch, cache: FeatureCache) -> Tensor:
    """Return ``batch_features`` made inside the gate.

    The target is not compiled, but a compile elsewhere patches ``nn.Module`` for the whole process
    and would reach its forward; and kernels of a library may bring compiled functions of their own.
    """

    def body() -> Tensor:
        with torch.no_grad():
            return batch_features(target, batch, cache)

    return gate.run(("target", str(target.device)), body, library=True)


@dataclass(frozen=True)
class TargetWorker:
    """One target thread; all share the counter, the cache and the channel."""

    target: Target
    maker: BatchMaker
    cache: FeatureCache
    counter: IndexCounter
    channel: OrderedChannel[Prepared]
    gate: CompileGate
    cpu_threads: int | None

    def run(self, pulse: Pulse) -> None:
        """Work until the plan ends or the channel is closed."""
        if self.target.device.type == "cuda":
            torch.cuda.set_device(self.target.device)
        elif self.cpu_threads is not None:
            torch.set_num_threads(self.cpu_threads)
        while (index := self.counter.take()) is not None:
            pulse.beat(f"prepares batch {index}")
            batch = self.maker.make(index)
            hidden = gated_features(self.gate, self.target, batch, self.cache)
            with pulse.wait(f"for room for batch {index}"):
                self.channel.put(index, Prepared(batch, hidden))
