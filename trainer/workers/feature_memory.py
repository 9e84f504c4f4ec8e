"""Memory on a GPU for hidden states that wait, apart from what forwards and steps work with.

Hidden states of a batch end when another thread is done with them, at another moment each time.
Among the blocks that a forward takes and gives back in the same order again and again, they would
now and then be where a larger one has to go, and the process would take more memory, hours into a
run. Here they lie in a pool of their own, which has room for all that can be there at once before
the first step.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FeatureMemory:
    """One pool a GPU; any thread may take from it."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Make the pools of those ``devices`` that are GPUs."""
        make: Any = torch.cuda.Stream  # torch gives it no types
        cards = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        # The allocator keeps a pool a stream. Nothing ever runs on these: every use is on a stream
        # that was recorded, and a block is free once all of those are through with it.
        self._pools: dict[torch.device, torch.cuda.Stream] = {card: make(card) for card in cards}

    def empty(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for use on the calling thread's stream of ``device``.

        Other streams that use it have to be recorded. Raises: torch.OutOfMemoryError.
        """
        pool = self._pools.get(device)
        if pool is None:
            return torch.empty(*shape, dtype=dtype, device=device)
        with torch.cuda.stream(pool):
            made = torch.empty(*shape, dtype=dtype, device=device)
        made.record_stream(torch.cuda.current_stream(device))
        return made

    def make_room(self, device: torch.device, size_bytes: int, count: int) -> bool:
        """Take room for ``count`` blocks of one size; False when the GPU has not so much.

        The room is the allocator's: where memory runs short it gives back what is not used of it.
        """
        pool = self._pools.get(device)
        if pool is None:
            return True
        blocks: list[Tensor] = []
        try:
            with torch.cuda.stream(pool):
                while len(blocks) < count:
                    blocks.append(torch.empty(size_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            return False
        return True
