"""Which directories of this machine a Python interpreter needs, asked of the interpreter itself."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from dflashctl.errors import LabError

# -P: the current directory is no part of what the interpreter needs.
_QUESTION = """
import json, sys
with open("/proc/self/maps") as maps:
    files = {line.split(None, 5)[5].strip() for line in maps if "/" in line}
json.dump({"prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix],
           "path": [p for p in sys.path if p], "mapped": sorted(files)}, sys.stdout)
"""


def python_paths(executable: str) -> list[str]:
    """Paths that must be visible, at the same place, for `executable` to run elsewhere.

    That is: the environment, the installation below it, the directories of packages, the
    libraries the process has mapped, and each of them with symbolic links resolved. Paths below
    another one of the list are left out, and so are packages installed in editable mode: what
    was deployed is what must run.

    Raises: LabError when the interpreter does not answer.
    """
    try:
        done = subprocess.run(
            [executable, "-P", "-c", _QUESTION], capture_output=True, timeout=60, check=True
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", None) or b""
        raise LabError(
            f"{executable} does not work as a Python interpreter: {error} "
            f"{detail.decode(errors='replace').strip()}".rstrip()
        ) from None
    links = [str(link.parent) for link in _links(Path(executable).absolute())]
    mapped = [str(Path(f).parent) for f in answer["mapped"] if Path(f).is_file()]
    packages = [p for p in answer["path"] if Path(p).name in ("site-packages", "dist-packages")]
    found = [p for p in (*answer["prefixes"], *packages, *links, *mapped) if Path(p).exists()]
    return outermost([*found, *map(os.path.realpath, found)])


def outermost(paths: Iterable[str]) -> list[str]:
    """The given absolute paths, sorted, without those that lie below another one of them."""
    kept: list[str] = []
    for path in sorted(map(os.path.normpath, paths)):
        if not any(path == k or path.startswith(k.rstrip("/") + "/") for k in kept):
            kept.append(path)
    return kept


def _links(path: Path) -> list[Path]:
    """The path itself and what each symbolic link on the way to the real file points at."""
    chain = [path]
    while chain[-1].is_symlink() and len(chain) < 40:
        chain.append(Path(os.path.normpath(chain[-1].parent / chain[-1].readlink())))
    return chain
