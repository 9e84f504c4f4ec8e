"""Target threads: make batches in order, run the frozen target, hand hidden states over.

On a GPU a thread starts the next batch before it waits for the one before, so that the card always
has work; a batch is handed over when its hidden states are there. A thread that fails leaves its
batches to the others, and the run goes on slower. So does one that stands still (a GPU that never
answers), until it is back: what it made meanwhile is dropped.
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
from trainer.workers.feature_memory import FeatureMemory
from trainer.workers.pace import PaceWatch
from trainer.workers.place import take_place
from trainer.workers.supervisor import Patience, Pulse, Relief, State
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


def batch_features(
    target: Target, batch: Batch, cache: FeatureCache, memory: FeatureMemory | None = None
) -> Tensor:
    """Return the hidden states of a batch, from the cache where it has them.

    ``memory``: where they are to lie. Shapes: [R, S, n * D] on the target's device.
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
    out = None
    if memory is not None:
        shape = (*batch.input_ids.shape, whole[0].shape[-1])
        out = memory.empty(shape, whole[0].dtype, target.device)
    return place_features(whole, batch, out)


def gated_features(
    gate: CompileGate,
    target: Target,
    batch: Batch,
    cache: FeatureCache,
    memory: FeatureMemory | None = None,
) -> Tensor:
    """Return ``batch_features`` [R, S, n * D] made inside the gate.

    The target is not compiled, but a compile elsewhere patches ``nn.Module`` for the whole process
    and would reach its forward; and kernels of a library may bring compiled functions of their own.
    """

    def body() -> Tensor:
        with torch.no_grad():
            return batch_features(target, batch, cache, memory)

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
    def seconds(self) -> float:
        """What it cost the thread and its card, without waits for others; after ``wait``."""
        seconds = self.host_s
        if self.began is not None and self.done is not None:
            seconds = max(seconds, self.began.elapsed_time(self.done) / 1e3)
        return seconds


@dataclass(frozen=True)
class TargetWorker:
    """One target thread; all share the cache, the channel, the transfer and the pace watch.

    drafters: their devices by rank; batch ``index`` goes to the one of rank ``index`` modulo their
    number. gpu: the target's, as people call it. report: gets what does not end the run. out: set
    while the thread is left out, because it failed or stands still.
    """

    name: str
    gpu: str
    target: Target
    maker: BatchMaker
    cache: FeatureCache
    channel: OrderedChannel[Prepared]
    transfer: Transfer
    drafters: Sequence[torch.device]
    gate: CompileGate
    pace: PaceWatch
    report: Callable[..., object]
    cpu_threads: int | None
    out: threading.Event = field(default_factory=threading.Event)

    def run(self, pulse: Pulse) -> None:
        """Work until the plan ends or the channel is closed.

        An error of this thread alone ends it and is told; the last thread raises its error.
        """
        try:
            take_place(self.target.device, self.cpu_threads)
            self._work(pulse)
        except (ChannelClosedError, WorkerError, CompileGateError):
            raise
        except Exception as error:
            self.out.set()
            given_back = self.channel.retire(self.name)
            if given_back is None:
                raise
            text = _failure_text(self.name, error, given_back)
            self._tell("failed", f"{text}\n{traceback.format_exc()}", 0.0)

    def relief(self, patience: Callable[[], Patience]) -> Relief:
        """Return how the other target threads make good for this one while it stands still."""

        def tell(state: State, text: str, age_s: float) -> None:
            if state == "back":
                self.out.clear()
            else:
                self.out.set()
            self._tell(state, text, age_s)

        return Relief(
            who=f"{self.name} on {self.gpu}",
            advice=f"look at {self.gpu} with nvidia-smi and dmesg (Xid)",
            patience=patience,
            take_over=lambda: self.channel.retire(self.name) is not None,
            tell=tell,
        )

    def _tell(self, state: str, text: str, age_s: float) -> None:
        age = round(age_s, 1)
        self.report(text, thread=self.name, device=self.gpu, state=state, age_s=age)

    def _work(self, pulse: Pulse) -> None:
        """Make and hand over batches."""
        ahead = 1 if self.target.device.type == "cuda" else 0
        held: dict[int, _Made] = {}
        while True:
            with pulse.wait("for a batch to prepare"):
                index = self.channel.claim(self.name, wait=not held)
            if index is not None:
                pulse.beat(f"prepares batch {index}")
                held[index] = self._start(index)
                if len(held) <= ahead:
                    continue
            elif not held:
                return
            lowest = min(held)
            self._hand_over(lowest, held[lowest], pulse)
            held = {i: made for i, made in held.items() if self.channel.holds(i, self.name)}

    def _start(self, index: int) -> _Made:
        began, done, since = None, None, time.monotonic()
        batch = self.maker.make(index)
        if self.target.device.type == "cuda":
            began, done = _timer(), _timer()
            began.record()
        memory = self.transfer.memory
        hidden = gated_features(self.gate, self.target, batch, self.cache, memory)
        if done is not None:
            done.record()
        return _Made(batch, hidden, time.monotonic() - since, began, done)

    def _hand_over(self, index: int, made: _Made, pulse: Pulse) -> None:
        """Hand the batch over, unless another was given back, which comes first."""
        pulse.beat(f"runs the target on batch {index}")
        made.wait()
        with pulse.wait(f"for room for batch {index}"):
            if not self.channel.admit(index, made.size_bytes, self.name):
                return
        device = self.drafters[index % len(self.drafters)]
        sent = self.transfer.send(made.batch, made.hidden, device, made.done)
        self.channel.put(index, Prepared(*sent), made.size_bytes, self.name)
        slow = self.pace.note(self.name, made.seconds, made.batch.num_tokens)
        if slow is not None:
            self.report(slow)


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
