"""Adds up the gradients of the drafter threads, so that every replica takes the same step.

Each drafter holds its sums in one flat tensor on its own device, in buckets. While its backward
goes on, a bucket whose gradients are all there is packed; the last replica to have one ready starts
its exchange: slice r of all replicas is added in rank order on the device of replica r, and
everybody copies the finished slices. The result does not depend on which thread was first, and is
the same to the bit in every replica. Copies and sums run on streams of their own, behind the events
of what they read. No thread waits for another before all buckets are under way.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from trainer.errors import ChannelClosedError

_ALIGNMENT = 64  # numbers
BUCKET_NUMBERS = 64 << 20  # 128 MiB of bf16: about 25 buckets of a 1.7 B draft


class TrainedBatch(NamedTuple):
    """A batch that went through forward and backward: index in the plan, epoch, sample ids."""

    batch_index: int
    epoch: int
    sample_ids: tuple[int, ...]


@dataclass
class StepSums:
    """What one drafter, or all together, summed up over the micro-batches of a step.

    num_hits of num_slots drafted slots were right, teacher-forced; num_accepted counts those with
    no wrong one before them. num_stop: drafters that were asked to stop; as all add up the same
    numbers, all stop after the same step. batches: what was trained on. figures: of the variant,
    numerator and denominator by their key in the step event.
    """

    loss_sum: float = 0.0
    weight_sum: float = 0.0
    num_tokens: int = 0
    num_anchors: int = 0
    num_hits: int = 0
    num_slots: int = 0
    num_accepted: int = 0
    num_stop: int = 0
    batches: tuple[TrainedBatch, ...] = ()
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, other: "StepSums") -> None:
        """Add another drafter's sums to these."""
        for item in fields(self):
            if item.name != "figures":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        for key, (above, below) in other.figures.items():
            own = self.figures.get(key, (0.0, 0.0))
            self.figures[key] = own[0] + above, own[1] + below

    def ratios(self) -> dict[str, float]:
        """Return the variant's figures; 0 where nothing was counted."""
        return {k: above / below if below else 0.0 for k, (above, below) in self.figures.items()}


class Gradients(Protocol):
    """What is exchanged of a replica: the gradients of ``params``, one flat tensor [P].

    starts: where each parameter begins in it. The optimiser has them.
    """

    flat_grad: Tensor
    starts: list[int]

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, which backward gives their gradients."""

    def take_in(self, places: Sequence[int]) -> None:
        """Add the gradients of some parameters to the flat sum, on the current stream."""

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the flat sum. Shape: []."""


class Exchanged(NamedTuple):
    """Of all replicas: the sums, and in rank order [replicas, K] what is still on the device.

    The last column is the norm of the replica's own gradient, before it was added to others.
    """

    sums: StepSums
    rows: Tensor


@dataclass(frozen=True)
class Bucket:
    """Neighbours in the flat gradient that travel together: numbers start..stop, and places."""

    start: int
    stop: int
    places: tuple[int, ...]


def buckets_of(starts: Sequence[int], length: int, at_least: int) -> list[Bucket]:
    """Part a flat tensor, whose tensors begin at ``starts``, into buckets of ``at_least`` numbers.

    The last one may be smaller.
    """
    found: list[Bucket] = []
    places: list[int] = []
    for place, stop in enumerate([*starts[1:], length]):
        places.append(place)
        if stop - starts[places[0]] >= at_least or stop == length:
            found.append(Bucket(starts[places[0]], stop, tuple(places)))
            places = []
    return found


class _Told(NamedTuple):
    """What a replica lets the others read of a step; ``there``: when ``row`` is."""

    sums: StepSums
    row: Tensor
    there: torch.cuda.Event | None


class _Member:
    """One replica: its gradient and the streams on which it travels."""

    def __init__(self, gradients: Gradients, num_replicas: int) -> None:
        self.gradients, self.flat = gradients, gradients.flat_grad
        self.device = self.flat.device
        on_gpu: Any = torch.cuda.Stream if self.flat.is_cuda else _no_stream
        self.stream: torch.cuda.Stream | None = on_gpu(self.device)
        # One to each other replica, so that what leaves does not wait for what comes.
        self.ways: list[torch.cuda.Stream | None] = [
            on_gpu(self.device) for _ in range(num_replicas)
        ]
        self.is_open = False
        self.missing: list[set[int]] = []
        self.norms: list[Tensor] = []
        self.ready: dict[int, torch.cuda.Event | None] = {}
        self.turn = 0


class GradientSync:
    """Meeting point of ``num_replicas`` drafter threads.

    A thread works inside ``joined``; the last backward of a step, inside ``travelling``; and then
    it calls ``exchange``.
    """

    def __init__(self, num_replicas: int, bucket_numbers: int = BUCKET_NUMBERS) -> None:
        self._num_replicas, self._bucket_numbers = num_replicas, bucket_numbers
        self._barrier = threading.Barrier(num_replicas)
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._buckets: list[Bucket] = []
        self._arrived: list[int] = []
        self._tails: list[torch.cuda.Event | None] = []
        # A thread may tell of a step while another still reads of the step before, not of earlier.
        self._told: tuple[dict[int, _Told], dict[int, _Told]] = ({}, {})

    @contextmanager
    def joined(self, rank: int, gradients: Gradients) -> Iterator[None]:
        """Take part with a replica's gradient, which is looked at as backward makes it."""
        member = _Member(gradients, self._num_replicas)
        with self._lock:
            self._members[rank] = member
            if not self._buckets:
                length = member.flat.numel()
                self._buckets = buckets_of(gradients.starts, length, self._bucket_numbers)
                self._arrived = [0] * len(self._buckets)
        with ExitStack() as hooks:
            if self._num_replicas > 1:
                of_place = {p: number for number, b in enumerate(self._buckets) for p in b.places}
                for place, param in enumerate(gradients.params):

                    def came(_param: Tensor, place: int = place) -> None:
                        self._came(rank, place, of_place[place])

                    hook = param.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield

    @contextmanager
    def travelling(self, rank: int) -> Iterator[None]:
        """Let the gradients of a backward travel as they come, and at its end all others.

        Those are zeros, or the sums of the micro-batches before.
        """
        member = self._members[rank]
        member.is_open = self._num_replicas > 1
        member.missing = [set(bucket.places) for bucket in self._buckets]
        member.norms, member.ready = [], {}
        yield
        if member.is_open:
            member.is_open = False
            for number, missing in enumerate(member.missing):
                if missing:
                    self._send(rank, number)

    def exchange(self, rank: int, sums: StepSums, figures: Tensor) -> Exchanged:
        """Wait until the gradients of all replicas are on their way to be added.

        What is queued on this thread's stream after that reads their sum in the gradients'
        ``flat_grad``. Shapes: figures [K - 1] that are still on the device, as many in every
        replica. Raises: ChannelClosedError when another thread failed or the run is being stopped.
        """
        member = self._members[rank]
        told = self._told[member.turn]
        member.turn = 1 - member.turn
        told[rank] = self._tell(member, sums, figures)
        self._wait()
        total = StepSums()
        in_order = [told[other] for other in range(self._num_replicas)]
        for one in in_order:
            total.add(one.sums)
        for event in (*self._tails, *(one.there for one in in_order)):
            if event is not None:
                torch.cuda.current_stream(member.device).wait_event(event)
        return Exchanged(total, torch.stack([one.row.to(member.device) for one in in_order]))

    def wait_for_abort(self) -> NoReturn:
        """Wait for the end of the run, which another thread has met; raises ChannelClosedError."""
        self._wait()
        raise ChannelClosedError("another drafter thread left the step")

    def abort(self) -> None:
        """Wake whoever waits here; ``exchange`` raises from now on."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ChannelClosedError("another drafter thread left the step") from error

    def _tell(self, member: _Member, sums: StepSums, figures: Tensor) -> _Told:
        if self._num_replicas == 1:
            norm = member.gradients.grad_norm().to(figures.dtype)
            return _Told(sums, torch.cat((figures, norm[None])), None)
        with _behind(member.stream):
            norm = torch.linalg.vector_norm(torch.stack(member.norms)).to(figures.dtype)
            return _Told(sums, torch.cat((figures, norm[None])), _mark(member.stream))

    def _came(self, rank: int, place: int, number: int) -> None:
        """Backward has made a gradient; the thread is the autograd engine's on a GPU."""
        member = self._members[rank]
        if member.is_open:
            member.missing[number].discard(place)
            if not member.missing[number]:
                self._send(rank, number)

    def _send(self, rank: int, number: int) -> None:
        """Pack a bucket of one replica; the last to come starts its exchange."""
        member, bucket = self._members[rank], self._buckets[number]
        with _behind(member.stream), torch.no_grad():
            if not member.missing[number]:  # else ``accumulate`` did it
                member.gradients.take_in(bucket.places)
            packed = member.flat[bucket.start : bucket.stop]
            member.norms.append(torch.linalg.vector_norm(packed, dtype=torch.float32))
            member.ready[number] = _mark(member.stream)
        with self._lock:
            self._arrived[number] += 1
            if self._arrived[number] == self._num_replicas:
                self._arrived[number] = 0
                with torch.no_grad():
                    self._add_up(number)

    def _add_up(self, number: int) -> None:
        """Start the exchange of a bucket that every replica has packed."""
        members = [self._members[rank] for rank in range(self._num_replicas)]
        bounds = _slices(self._buckets[number], self._num_replicas)
        packed = [member.ready[number] for member in members]
        added = [
            self._add_slice(members, rank, slice(*bounds[rank]), packed)
            for rank in range(len(members))
        ]
        for rank, member in enumerate(members):
            for owner, (start, stop) in enumerate(bounds):
                if owner != rank:
                    theirs, way = members[owner], members[owner].ways[rank]
                    with _from_to(way, member.stream, added[owner]):
                        member.flat[start:stop].copy_(theirs.flat[start:stop], non_blocking=True)
        self._tails = [_mark(member.stream) for member in members]

    def _add_slice(
        self,
        members: Sequence[_Member],
        rank: int,
        part: slice,
        packed: Sequence[torch.cuda.Event | None],
    ) -> torch.cuda.Event | None:
        """Add one slice of all replicas into that of ``rank``, in rank order for every rank."""
        own = members[rank]
        with _on(own.stream):
            parts = []  # the own one was packed on this stream
            for other, member in enumerate(members):
                if other == rank:
                    parts.append(own.flat[part])
                    continue
                parts.append(torch.empty_like(own.flat[part]))
                with _from_to(member.ways[rank], own.stream, packed[other]):
                    parts[-1].copy_(member.flat[part], non_blocking=True)
            if len(parts) == 2:
                torch.add(parts[0], parts[1], out=own.flat[part])
            else:
                total = parts[0].to(torch.float32, copy=True)
                for one in parts[1:]:
                    total += one
                own.flat[part].copy_(total)  # rounded once, as the sum of two is
            return _mark(own.stream)


def _no_stream(_device: torch.device) -> None:
    """Stand in for a stream where there are none."""


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def _behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on ``stream``, behind what this thread has queued on its own."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with _on(stream):
        yield


@contextmanager
def _from_to(
    way: torch.cuda.Stream | None,
    into: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
) -> Iterator[None]:
    """Copy behind ``after`` on ``way``, a stream of the source, for which ``into`` then waits.

    torch copies between GPUs on the current stream of the source, and makes it and the current
    stream of the destination wait for each other. On one GPU the copy is ``into``'s own.
    """
    if way is not None and into is not None and after is not None:
        way.wait_event(after)
        into.wait_event(after)
    with _on(way), _on(into):
        yield


def _slices(bucket: Bucket, num_parts: int) -> list[tuple[int, int]]:
    """Part a bucket evenly, at multiples of _ALIGNMENT from its start, for wide loads."""
    length = bucket.stop - bucket.start
    places = [length * part // num_parts for part in range(1, num_parts)]
    edges = [bucket.start + place // _ALIGNMENT * _ALIGNMENT for place in places]
    return list(itertools.pairwise([bucket.start, *edges, bucket.stop]))
