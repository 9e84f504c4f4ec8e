"""The locks on GPUs, one for each UUID, kept on the machine that has them: who holds which.

``remote/gpus.py`` takes and judges them there; here are its answers as objects, and the requests.
"""

import getpass
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashctl.program import Program, run_program
from dflashctl.transport.base import Transport

LEASE_S = 600.0  # from taking the locks to the start; longer checks renew it
ANSWER_S = 75.0  # three questions to a slow driver, the containers' views, and the way


@dataclass(frozen=True)
class Lock:
    """One lock. ``state``: live (its run lives), starting (a launch is under way) or stale.

    pid: of the run, as the node sees it; None until it was seen. why: what the state rests on.
    """

    uuid: str
    tag: str
    host: str
    vmid: int | None
    run_dir: str
    by: str
    boot_id: str
    created_unix_s: float
    pid: int | None
    state: str
    why: str
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Lock":
        """Read the program's words; a lock that was left half made has few."""
        return cls(
            uuid=str(raw["uuid"]),
            tag=str(raw.get("tag", "?")),
            host=str(raw.get("host", "?")),
            vmid=raw.get("vmid"),
            run_dir=str(raw.get("run_dir", "?")),
            by=str(raw.get("by", "?")),
            boot_id=str(raw.get("boot_id", "")),
            created_unix_s=float(raw.get("created_unix_s", 0.0)),
            pid=raw.get("pid"),
            state=str(raw["state"]),
            why=str(raw["why"]),
            token=str(raw.get("token", "")),
        )

    @property
    def place(self) -> str:
        """``kpro6/200``, as the holder's hosts.yaml names it."""
        return f"{self.host}/{'self' if self.vmid is None else self.vmid}"

    def text(self) -> str:
        """Return "run fresh7 of me@laptop (kpro6/200), since 2026-11-30 12:01:33: its ..."."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.created_unix_s))
        return f"run {self.tag} of {self.by} ({self.place}), since {since}: {self.why}"


@dataclass(frozen=True)
class Holder:
    """Who takes locks: a run by its tag and directory; ``token`` tells its locks from others'.

    run_dir ends with / where any directory below it will do (warmup, check).
    """

    tag: str
    host: str
    vmid: int | None
    run_dir: str
    token: str

    @property
    def run(self) -> dict[str, Any]:
        """What tells its locks from others'."""
        return {"token": self.token, "vmid": self.vmid, "run_dir": self.run_dir}

    def wish(self) -> dict[str, Any]:
        """Return what a lock says of it."""
        named = {"tag": self.tag, "host": self.host, "by": _me(), "lease_s": LEASE_S}
        return self.run | named


def new_token() -> str:
    """Return what tells this launch's locks from every other's."""
    return secrets.token_hex(16)


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry
        user = "?"
    return f"{user}@{socket.gethostname()}"


def ask(node: Transport, action: str, **arguments: Any) -> dict[str, Any]:
    """Run one action of ``remote/gpus.py``; one round trip. Raises: as ``run_program``."""
    program = Program("gpus", {"action": action, **arguments}, deadline_s=ANSWER_S)
    return run_program(node, program)


def read_locks(answer: Mapping[str, Any], key: str = "locks") -> tuple[Lock, ...]:
    """Return the locks of an answer."""
    return tuple(Lock.of(raw) for raw in answer.get(key, ()))


def list_locks(node: Transport) -> tuple[Lock, ...]:
    """Return every lock of a node, stale ones too."""
    return read_locks(ask(node, "list"))


def bind(node: Transport, holder: Holder) -> dict[str, Any]:
    """Write the run's process into its locks, and look at the GPUs.

    The answer is a look with ``pid``: the process on the node, None when it was not seen.
    """
    return ask(node, "bind", run=holder.run, look=True)


def release(node: Transport, holder: Holder) -> tuple[Lock, ...]:
    """Let go of the holder's locks unless a process of it lives; return those that stayed."""
    return read_locks(ask(node, "release", run=holder.run), "kept")


@dataclass(frozen=True)
class Cleared:
    """What became of `locks clear` on one node: removed, or refused because they are held."""

    cleared: tuple[Lock, ...]
    refused: tuple[Lock, ...]


def clear(node: Transport, select: str, *, force: bool) -> Cleared:
    """Remove the locks of a tag or of a GPU (by UUID, or its beginning)."""
    answer = ask(node, "clear", select=select, force=force)
    return Cleared(read_locks(answer, "cleared"), read_locks(answer, "refused"))


def others(locks: Sequence[Lock], token: str) -> dict[str, Lock]:
    """Return the locks that stand in the way of ``token``, by UUID."""
    return {lock.uuid: lock for lock in locks if lock.state != "stale" and lock.token != token}
