"""Programs sent to a container or node: one file each, standard library only, JSON in argv[1].

They run as ``python3 -I -S -c TEXT JSON``, so they import nothing of this project.
The container's own python3 runs them: Python 3.10 (Ubuntu 22.04) must do.
"""

from pathlib import Path


def program(name: str) -> str:
    """Return the text of ``dflashctl/remote/NAME.py``, from a checkout or an installed wheel."""
    # importlib.resources would read it from a zip as well, for 10 ms more
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
