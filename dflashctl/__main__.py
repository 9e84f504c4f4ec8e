"""``dflashctl`` and ``python -m dflashctl``: the command line, with little of the collector.

A command imports a thousand modules and ends soon: few collections on the way save it 15 ms, and
none of all modules at its end 50 ms.
"""

import gc
import sys

_ALLOCATIONS = 20_000  # between two collections of the youngest; Python's own is 700


def run() -> None:
    """Run the command line and exit with its status."""
    gc.set_threshold(_ALLOCATIONS)
    from dflashctl.cli import main

    try:
        sys.exit(main())
    finally:
        gc.freeze()


if __name__ == "__main__":
    run()
