"""deploy: the trainer's code, and with --env its Python environment, into the container."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.bundle import Bundle
from dflashctl.environment import set_up_environment
from dflashctl.errors import DflashctlError
from dflashctl.files import look_at_release, send_release
from dflashctl.inventory import Place
from dflashctl.transport.base import Transport


@dataclass(frozen=True)
class DeployRequest:
    """What to deploy; ``requirements`` None takes those of the bundle."""

    bundle: Bundle
    environment: bool = False
    requirements: Path | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class DeployResult:
    """What was there, what was sent and how many remote commands it took."""

    place: str
    digest: str
    num_files: int
    num_sent: int
    sent_bytes: int
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    repaired: tuple[str, ...]
    environment: dict[str, Any] | None
    dry_run: bool
    round_trips: int


def deploy(
    transport: Transport,
    place: Place,
    request: DeployRequest,
    on_output: Callable[[bytes], None],
) -> DeployResult:
    """Bring the release to the container: one round trip when it is there, two when not.

    ``on_output`` gets what pip prints. Raises: MismatchError when the bytes that arrived are not
    those that were sent; DflashctlError when there is no room or the environment failed.
    """
    bundle, workspace = request.bundle, place.container.workspace
    there = look_at_release(transport, bundle, workspace)
    before = (there["newest"] or {}).get("files", {}) if there["state"] == "absent" else {}
    missing = there["state"] != "present"
    tar_size = len(bundle.tar_bytes()) if missing else 0
    if missing and not request.dry_run:
        _check_room(there["free_bytes"], tar_size, transport.place)
        send_release(transport, bundle, workspace)
    environment = None
    if request.environment and not request.dry_run:
        text = request.requirements.read_text() if request.requirements else bundle.requirements
        environment = set_up_environment(
            transport, place, text, bundle.requirements_digest, on_output
        )
    wanted = {f.path: f.sha256 for f in bundle.files} if missing else {}
    return DeployResult(
        place=transport.place,
        digest=bundle.digest,
        num_files=len(bundle.files),
        num_sent=0 if request.dry_run else len(wanted),
        sent_bytes=0 if request.dry_run else tar_size,
        added=tuple(sorted(wanted.keys() - before.keys())),
        changed=tuple(sorted(p for p in wanted.keys() & before if wanted[p] != before[p])),
        removed=tuple(sorted(before.keys() - wanted.keys())),
        repaired=tuple(there["differing"]),
        environment=environment,
        dry_run=request.dry_run,
        round_trips=transport.round_trips,
    )


def _check_room(free_bytes: int, needed_bytes: int, place: str) -> None:
    if free_bytes < 2 * needed_bytes:
        raise DflashctlError(
            f"not enough room in the workspace: {free_bytes} bytes free,"
            f" the release needs {needed_bytes}",
            hint=f"dflashctl runs gc --keep 1 -l {place}",
            place=place,
            code="disk-full",
        )
