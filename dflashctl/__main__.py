"""``dflashctl`` and ``python -m dflashctl``: the command line, with little of the collector.

A command imports a thousand modules and ends soon: few collections on the way save it 15 ms, and
none of all modules at its end 50 ms.
"""

import gc
import os
import signal
import sys
from types import FrameType

_ALLOCATIONS = 20_000  # between two collections of the youngest; Python's own is 700
_INTERRUPTED = 130  # as ExitCode, whose module is not imported yet


def run() -> None:
    """Run the command line and exit with its status."""
    # Elsewhere a KeyboardInterrupt would show a traceback. Who ignores SIGINT goes on doing so.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(_ALLOCATIONS)
    from dflashctl.cli import main

    try:
        if listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
        if listens:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)
    else:
        sys.exit(status)
    finally:
        gc.freeze()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End at once: nothing is begun yet, or all is done."""
    try:
        os.write(2, b"interrupted\n")
    finally:  # with a closed stderr, too
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    run()
