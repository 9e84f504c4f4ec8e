"""init: a first hosts.yaml, commented, to be edited."""

from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import RefusedError
from dflashctl.inventory import STARTER


@dataclass(frozen=True)
class InitResult:
    """Where the file was written."""

    path: str


def init(path: Path) -> InitResult:
    """Write the starter; raises RefusedError when the file is there already."""
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
    return InitResult(str(path))
