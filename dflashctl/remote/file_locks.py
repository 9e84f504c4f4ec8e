"""Waiting for a lock on a file, with an end; a part of programs of this package."""

import fcntl
import time

_LOOK_S = 0.05


def take_within(handle: int, limit_s: float) -> bool:
    """Lock an open file for this process alone; False when another still holds it after a time."""
    limit = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                return False
            time.sleep(_LOOK_S)
        else:
            return True
