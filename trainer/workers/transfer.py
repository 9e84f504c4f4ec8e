"""The way of a batch and its hidden states from a target's GPU to a drafter's.

Copies run on streams of their own, so that neither the target's next forward nor the drafter's step
waits for them: the drafter's stream waits for the event of a copy that it is about to use, and no
host thread waits at all. Between GPUs that reach each other memory goes directly, else through
pinned host memory. Roles that share a GPU share the tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.data.packing import Batch
from trainer.workers.feature_memory import FeatureMemory

# Through the host: a piece goes down to it while the piece before goes up to the other GPU.
_PIECE_BYTES = 64 << 20


class Transfer:
    """Sends batches; one for all target threads of a run.

    .memory is where hidden states lie, those to be sent and those that have arrived.
    """

    def __init__(self, devices: Iterable[torch.device], *, through_host: bool = False) -> None:
        """Make the streams; ``through_host`` never goes directly."""
        cards = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        make: Any = torch.cuda.Stream  # torch gives it no types
        self._streams: dict[torch.device, torch.cuda.Stream] = {card: make(card) for card in cards}
        self.memory = FeatureMemory(cards)
        self._direct = {
            (a, b): not through_host and torch.cuda.can_device_access_peer(a, b)
            for a in cards
            for b in cards
            if a != b
        }

    def describe(self) -> str:
        """Say how hidden states travel; "" where they do not."""
        if not self._direct:
            return ""
        ways = {True: "directly", False: "through pinned host memory"}
        told = [f"{a.index}->{b.index} {ways[d]}" for (a, b), d in self._direct.items()]
        return f"hidden states between GPUs: {', '.join(told)}"

    def send(
        self, batch: Batch, hidden: Tensor, device: torch.device, made: torch.cuda.Event | None
    ) -> tuple[Batch, Tensor, torch.cuda.Event | None]:
        """Start the copies to ``device``; returns what is there once the event has happened.

        ``made``: after it ``hidden`` is complete. On the CPU nothing is copied and there is no
        event. Shapes: hidden [R, S, n * D].
        """
        if device.type != "cuda":
            return batch, hidden, None
        into = self._streams[device]
        if made is not None:
            into.wait_event(made)
        if hidden.device != device:
            hidden = self._moved(hidden, device, made)
        with torch.cuda.stream(into):
            batch = batch.pin_memory().to(device)
            ready = into.record_event()
        return batch, hidden, ready

    def _moved(self, hidden: Tensor, device: torch.device, made: torch.cuda.Event | None) -> Tensor:
        out, into = self._streams[hidden.device], self._streams[device]
        if made is not None:
            out.wait_event(made)
        hidden.record_stream(out)  # its memory is free for the target's stream after the copy only
        with torch.cuda.stream(into):
            moved = self.memory.empty(hidden.shape, hidden.dtype, device)
            if not self._direct[hidden.device, device]:
                through_host(hidden, moved, out, into)
            else:
                # torch copies on the current stream of the source, and lets that of the
                # destination wait for it.
                with torch.cuda.stream(out):
                    moved.copy_(hidden, non_blocking=True)
        return moved


def through_host(
    source: Tensor, destination: Tensor, out: torch.cuda.Stream, into: torch.cuda.Stream
) -> None:
    """Copy through pinned host memory: down on stream ``out``, up on stream ``into``.

    Both tensors are contiguous and equal in shape and dtype.
    """
    count = max(1, _PIECE_BYTES // source.element_size())
    sides = (torch.split(tensor.view(-1), count) for tensor in (source, destination))
    for down, up in zip(*sides, strict=True):
        with torch.cuda.stream(out):
            host = torch.empty(down.shape, dtype=down.dtype, pin_memory=True)
            host.copy_(down, non_blocking=True)
            arrived = out.record_event()
        with torch.cuda.stream(into):
            into.wait_event(arrived)
            up.copy_(host, non_blocking=True)  # torch keeps ``host`` until this copy has run
