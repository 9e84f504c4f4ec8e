"""Opening again when sshd hung up before its greeting.

sshd drops new connections at random above MaxStartups (10:30:100), which many at once reach;
nothing has run by then, so trying again is safe.
"""

import random
import time
from collections.abc import Callable

from dflashctl.errors import UnreachableError

NO_GREETING = "no-greeting"  # code of the error that is tried again

_MAX_TRIES = 4
_PAUSE_S = (0.2, 0.8)  # times the number of the try; random, so that the many spread


def open_patiently(open_once: Callable[[], None]) -> None:
    """Call ``open_once`` until it succeeds, or fails otherwise than by ``no-greeting``.

    Raises: what the last try raised.
    """
    for number in range(1, _MAX_TRIES + 1):
        try:
            open_once()
        except UnreachableError as error:
            if error.code != NO_GREETING or number == _MAX_TRIES:
                raise
            time.sleep(random.uniform(*_PAUSE_S) * number)  # noqa: S311 - no secret
        else:
            return
