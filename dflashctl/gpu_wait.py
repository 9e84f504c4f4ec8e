"""Waits for GPUs to be free: asks the node now and then, says what it waits for, holds nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dflashctl.errors import DflashctlError, RefusedError, StateUnknownError, UnreachableError
from dflashctl.gpu_roles import Ways, probe_for
from dflashctl.gpus import Probe

_PASSES = ("gpu-busy", "gpu-orphaned", "gpu-unknown", "gpu-wedged")  # what a wait may outlast
_TOLD_EVERY_S = 300.0
_POLL_S = 15.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long to wait (0: not at all), and the check of an answer: it raises while not free."""

    wait_s: float
    require_free: Callable[[Probe], object]


def when_free(
    ways: Ways, patience: Patience, attempt: Callable[[], Result], say: Callable[[str], None]
) -> Result:
    """Return what ``attempt`` returns; while it is refused for its GPUs, wait and try again.

    Raises: what ``attempt`` raises; at the end of the wait its last refusal (or, with the node out
    of reach then, UnreachableError); KeyboardInterrupt with words for what it left.
    """
    limit: float | None = None
    while True:
        try:
            return attempt()
        except (RefusedError, StateUnknownError) as error:
            if patience.wait_s <= 0 or error.code not in _PASSES:
                raise
            limit = time.monotonic() + patience.wait_s if limit is None else limit
            try:
                _wait(ways, patience, limit, error, say)
            except KeyboardInterrupt:
                text = "; it was waiting: nothing was started or locked"
                raise KeyboardInterrupt(text) from None


def _wait(
    ways: Ways,
    patience: Patience,
    limit: float,
    reason: DflashctlError,
    say: Callable[[str], None],
) -> None:
    """Return when the GPUs look free; raises the last reason at the end of the wait."""
    poll_s = min(_POLL_S, max(1.0, patience.wait_s / 20))
    told, told_at = "", 0.0
    while True:
        now = time.monotonic()
        if now >= limit:
            reason.message += f" (after waiting {patience.wait_s:.0f} s)"
            raise reason
        if reason.message != told or now - told_at > _TOLD_EVERY_S:
            told, told_at = reason.message, now
            say(f"waiting, {limit - now:.0f} s more at most: {reason.message}")
        time.sleep(min(poll_s, limit - now))
        try:
            ways.reopen()
            patience.require_free(probe_for(ways.node, ways.inside))
        except (RefusedError, StateUnknownError, UnreachableError) as error:
            reason = error
        else:
            return
