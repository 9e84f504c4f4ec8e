"""push: files and directories of the laptop into a container; unchanged files are not sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import UsageError
from dflashctl.files import collect, send, wanted
from dflashctl.transport.base import Transport


@dataclass(frozen=True)
class PushResult:
    """What was sent and what was there already."""

    place: str
    directory: str
    sent: tuple[str, ...]
    num_unchanged: int
    sent_bytes: int
    dry_run: bool
    round_trips: int


def push(
    transport: Transport, sources: Sequence[Path], directory: str, *, dry_run: bool = False
) -> PushResult:
    """Bring ``sources`` below ``directory``: one round trip when all are there, two when not.

    Raises: UsageError for a missing source or a relative directory; MismatchError when what
    arrived is not what was sent.
    """
    if not directory.startswith("/"):
        raise UsageError(
            f"{directory!r} is not an absolute path in the container", hint="/workspace/data"
        )
    outgoing = collect(sources)
    differing = wanted(transport, outgoing, directory) if outgoing else []
    if differing and not dry_run:
        send(transport, differing, directory)
    return PushResult(
        place=transport.place,
        directory=directory,
        sent=tuple(entry.name for entry in differing),
        num_unchanged=len(outgoing) - len(differing),
        sent_bytes=0 if dry_run else sum(entry.size_bytes for entry in differing),
        dry_run=dry_run,
        round_trips=transport.round_trips,
    )
