"""init: a first hosts.yaml, commented, to be edited."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import RefusedError, UsageError
from dflashctl.inventory import STARTER


@dataclass(frozen=True)
class InitResult:
    """Where the file was written."""

    path: str


def init(path: Path) -> InitResult:
    """Write the starter.

    Raises: RefusedError when the file is there already, UsageError without its directory.
    """
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(STARTER)
    except FileExistsError as error:
        raise RefusedError(
            "the file is there already; it was not changed",
            place=str(path),
            code="file-exists",
            hint="edit it, or name another directory: dflashctl init DIRECTORY",
        ) from error
    except FileNotFoundError as error:
        raise UsageError(
            "there is no such directory",
            place=str(path.parent),
            hint=f"mkdir -p {shlex.quote(str(path.parent))}",
        ) from error
    return InitResult(str(path))
