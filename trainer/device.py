"""Working with one GPU among several: making it the current one, and reading numbers from it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one inside: Triton launches where the thread is, not the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class HostCopy:
    """A copy of a device's numbers that was asked for when it was made; nothing waits then."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values, None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def wait(self) -> list[float]:
        """Return the numbers once they are here; work queued after them goes on."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.tolist()
        return found
