"""Target threads: make batches in order, run the frozen target, hand hidden states over.

On a GPU a thread starts the next batch before it waits for the one before, so that the card always
has work; a batch is handed over when its hidden states are there. A thread that fails leaves its
batches to the others, and the run goes on slower.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate
from trainer.data.packing import Batch, BatchMaker, place_features
from trainer.errors import ChannelClosedError, CompileGateError, WorkerError
from trainer.model.target import Target
from trainer.workers.pace import PaceWatch
from trainer.workers.place import take_place
from trainer.workers.supervisor import Pulse
from trainer.workers.transfer import Transfer


@dataclass(frozen=True)
class Prepared:
    """A batch with its hidden states. Shapes: target_hidden [R, S, n * D].

    ready: what must have happened on the GPU before they are used; None when it has.
    """

    batch: Batch
    target_hidden: Tensor
    ready: torch.cuda.Event | None = None

    def received(self) -> "Prepared":
        """Let the calling thread's stream wait for the tensors, and keep them until it is done."""
        if self.ready is None:
            return self
        stream = torch.cuda.current_stream(self.target_hidden.device)
        stream.wait_event(self.ready)
        self.target_hidden.record_stream(stream)
        self.batch.record_stream(stream)
        return replace(self, ready=None)


class FeatureCache:
    """Hidden states of samples already seen, in host memory, up to ``capacity_bytes``.

    Samples are visited once an epoch in random order, so the first ones stay: replacing them
    would hit no more often.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._features: dict[int, Tensor | None] = {}  # None: room is kept, the copy under way
        self.used_bytes = 0

    def get(self, sample_id: int) -> Tensor | None:
        """Return the features of a sample on the CPU, or None. Shapes: [length, n * D]."""
        return self._features.get(sample_id)

    def put(self, sample_id: int, features: Tensor) -> None:
        """Keep the features when there is room; no other thread waits for the copy.

        Shapes: [length, n * D].
        """
        size = features.numel() * features.element_size()
        with self._lock:
            if sample_id in self._features or self.used_bytes + size > self._capacity_bytes:
                return
            self.used_bytes += size
            self._features[sample_id] = None
        # A copy: the tensor may be a view of a whole padded batch.
        self._features[sample_id] = features.to("cpu", copy=True)


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
    """Return ``batch_features`` [R, S, n * D] made inside the gate.

    The target is not compiled, but a compile elsewhere patches ``nn.Module`` for the whole process
    and would reach its forward; and kernels of a library may bring compiled functions of their own.
    """

    def body() -> Tensor:
        with torch.no_grad():
            return batch_features(target, batch, cache)

    return gate.run(("target", str(target.device)), body, library=True)


@dataclass(frozen=True)
class _Made:
    """A batch whose forward was started. done: its end on the GPU, with ``began``, to time it."""

    batch: Batch
    hidden: Tensor
    host_s: float
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None

    @property
    def size_bytes(self) -> int:
        return self.hidden.numel() * self.hidden.element_size()

    def wait(self) -> None:
        """Wait for its hidden states; errors of the GPU surface here."""
        if self.done is not None:
            self.done.synchronize()

    @property
    def seconds_per_token(self) -> float:
        """What it cost the thread and its card, without waits for others; after ``wait``."""
        seconds = self.host_s
        if self.began is not None and self.done is not None:
            seconds = max(seconds, self.began.elapsed_time(self.done) / 1e3)
        return seconds / max(self.batch.num_tokens, 1)


@dataclass(frozen=True)
class TargetWorker:
    """One target thread; all share the cache, the channel, the transfer and the pace watch.

    drafters: their devices by rank; batch ``index`` goes to the one of rank ``index`` modulo their
    number. report: gets what does not end the run. failed: set when the thread is left out.
    """

    name: str
    target: Target
    maker: BatchMaker
    cache: FeatureCache
    channel: OrderedChannel[Prepared]
    transfer: Transfer
    drafters: Sequence[torch.device]
    gate: CompileGate
    pace: PaceWatch
    report: Callable[[str], object]
    cpu_threads: int | None
    failed: threading.Event = field(default_factory=threading.Event)

    def run(self, pulse: Pulse) -> None:
        """Work until the plan ends or the channel is closed.

        An error of this thread alone ends it and is told; the last thread raises its error.
        """
        claimed: set[int] = set()
        try:
            take_place(self.target.device, self.cpu_threads)
            self._work(claimed, pulse)
        except (ChannelClosedError, WorkerError, CompileGateError):
            raise
        except Exception as error:
            self.failed.set()
            if not self.channel.retire(claimed):
                raise
            text = _failure_text(self.name, error, sorted(claimed))
            self.report(f"{text}\n{traceback.format_exc()}")

    def _work(self, claimed: set[int], pulse: Pulse) -> None:
        """Make and hand over batches; ``claimed`` holds those that are not handed over yet."""
        ahead = 1 if self.target.device.type == "cuda" else 0
        held: dict[int, _Made] = {}
        while True:
            with pulse.wait("for a batch to prepare"):
                index = self.channel.claim(wait=not held)
            if index is not None:
                claimed.add(index)
                pulse.beat(f"prepares batch {index}")
                held[index] = self._start(index)
                if len(held) <= ahead:
                    continue
            elif not held:
                return
            lowest = min(held)
            if self._hand_over(lowest, held[lowest], pulse):
                del held[lowest]
                claimed.remove(lowest)

    def _start(self, index: int) -> _Made:
        began, done, since = None, None, time.monotonic()
        batch = self.maker.make(index)
        if self.target.device.type == "cuda":
            began, done = _timer(), _timer()
            began.record()
        hidden = gated_features(self.gate, self.target, batch, self.cache)
        if done is not None:
            done.record()
        return _Made(batch, hidden, time.monotonic() - since, began, done)

    def _hand_over(self, index: int, made: _Made, pulse: Pulse) -> bool:
        """Hand the batch over; False when another was given back, which comes first."""
        pulse.beat(f"runs the target on batch {index}")
        made.wait()
        with pulse.wait(f"for room for batch {index}"):
            if not self.channel.admit(index, made.size_bytes):
                return False
        device = self.drafters[index % len(self.drafters)]
        sent = self.transfer.send(made.batch, made.hidden, device, made.done)
        self.channel.put(index, Prepared(*sent), made.size_bytes)
        slow = self.pace.note(self.name, made.seconds_per_token)
        if slow is not None:
            self.report(slow)
        return True


def _timer() -> torch.cuda.Event:
    """Return an event that a host can wait for without a busy core."""
    made: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]
        enable_timing=True, blocking=True
    )
    return made


def _failure_text(name: str, error: Exception, indices: Sequence[int]) -> str:
    what = (str(error).splitlines() or [""])[0]
    batches = ", ".join(map(str, indices))
    return (
        f"{name} failed and is left out, the run goes on slower: {type(error).__name__}: {what};"
        f" the other target threads take its batches {batches}"
    )
