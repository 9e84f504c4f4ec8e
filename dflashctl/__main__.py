"""``python -m dflashctl``: the same as the ``dflashctl`` command."""

import sys

from dflashctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
