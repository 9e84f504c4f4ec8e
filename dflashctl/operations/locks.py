"""locks: the GPU locks of the selected hosts, listed, or cleared by tag or GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflashctl.errors import DflashctlError, RefusedError, UsageError
from dflashctl.gpu_locks import Cleared, Lock, clear, list_locks
from dflashctl.inventory import Host, Place
from dflashctl.run_status import PlaceFailure
from dflashctl.transport import connect_host
from dflashctl.transport.base import Transport


@dataclass(frozen=True)
class HostLock:
    """A lock, and the host whose GPU it is on."""

    node: str
    lock: Lock


@dataclass(frozen=True)
class LocksResult:
    """Locks that were found, or cleared, and the hosts that gave no answer."""

    locks: tuple[HostLock, ...]
    failures: tuple[PlaceFailure, ...]


def list_all(places: Sequence[Place], *, accept_new: bool = False) -> LocksResult:
    """List the locks of every host of ``places``."""
    return _each(places, list_locks, accept_new=accept_new)


def clear_some(
    places: Sequence[Place], select: str, *, force: bool, accept_new: bool = False
) -> LocksResult:
    """Remove the locks of a tag, or of a GPU by (the beginning of) its UUID.

    Raises: RefusedError for one whose run lives, or may start, without ``force``; UsageError when
    there is none.
    """
    refused: list[HostLock] = []

    def ask(node: Transport) -> tuple[Lock, ...]:
        found: Cleared = clear(node, select, force=force)
        refused.extend(HostLock(node.place, lock) for lock in found.refused)
        return found.cleared

    result = _each(places, ask, accept_new=accept_new)
    if refused:
        first = refused[0]
        raise RefusedError(
            f"the lock of GPU {first.lock.uuid} is held by {first.lock.text()}",
            hint=f"dflashctl stop {first.lock.tag}; --force removes the lock and leaves the run",
            place=first.node,
            code="lock-held",
        )
    if not result.locks and not result.failures:
        raise UsageError(f"no lock of {select!r}", hint="dflashctl locks list", code="no-lock")
    return result


def _each(
    places: Sequence[Place],
    ask: Callable[[Transport], Sequence[Lock]],
    *,
    accept_new: bool,
) -> LocksResult:
    hosts: dict[str, Host] = {place.host.name: place.host for place in places}
    locks: list[HostLock] = []
    failures: list[PlaceFailure] = []
    for host in hosts.values():
        try:
            node = connect_host(host, accept_new=accept_new)
            try:
                locks += [HostLock(host.name, lock) for lock in ask(node)]
            finally:
                node.close()
        except DflashctlError as error:
            failures.append(PlaceFailure.of(host.name, error))
    return LocksResult(tuple(locks), tuple(failures))
