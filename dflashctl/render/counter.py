"""A counter of received bytes on the terminal; silent when stderr is none."""

import time
from collections.abc import Callable
from typing import TextIO

from dflashctl.render.tables import size

_EVERY_S = 0.25


def byte_counter(stream: TextIO) -> Callable[[int], None]:
    """Return a function that takes the size of each block and shows the sum in place."""
    if not stream.isatty():
        return lambda _: None
    total_bytes, next_s = 0, 0.0

    def count(num_bytes: int) -> None:
        nonlocal total_bytes, next_s
        total_bytes += num_bytes
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + _EVERY_S
            stream.write(f"\r{size(total_bytes)} received \x1b[K\r")
            stream.flush()

    return count
