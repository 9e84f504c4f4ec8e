"""The GPUs that hosts.yaml gives a container: locked on the node, then proven idle.

The lock comes first and the look inside it, so that of two launches for one card exactly one
goes on. A lock is kept for as long as a process of its run lives (``remote/gpus.py``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dflashctl.errors import (
    ConfigurationError,
    DflashctlError,
    MismatchError,
    RefusedError,
    StateUnknownError,
)
from dflashctl.gpu_locks import LEASE_S, Holder, Lock, ask, bind, read_locks, release
from dflashctl.gpus import GpuState, Probe, parse, probe
from dflashctl.inventory import Container, Expect, Place
from dflashctl.kept_way import KeptWay
from dflashctl.transport.base import Transport
from trainer.contract.manifest import Gpu, Manifest

CPU = "cpu"
Chosen = TypeVar("Chosen")
_UNFIT = {
    "failed": ("gpu-failed", "reboot the node, or give the run other GPUs in hosts.yaml"),
    "orphaned": (
        "gpu-orphaned",
        "end what holds it, or restart its container or the node; nothing is reset from here",
    ),
}


@dataclass(frozen=True)
class Ways:
    """A place with the open ways into its container and to its node, over one connection.

    For self both are the same.
    """

    place: Place
    inside: Transport
    node: Transport

    @property
    def round_trips(self) -> int:
        """Remote commands so far, both ways."""
        return self.node.round_trips

    def leave(self) -> bool:
        """Leave the container, as the end of a command does; False where each command leaves it."""
        if not isinstance(self.inside, KeptWay):
            return False
        self.inside.leave()
        return True

    def reopen(self) -> None:
        """Connect anew: a connection that idled for long may be dead and not know it."""
        for way in {id(way): way for way in (self.inside, self.node)}.values():
            way.close()
            way.open()


@dataclass(frozen=True)
class Bound:
    """The process of a run as its node sees it (None: it does not), and the GPUs at that moment."""

    pid: int | None
    seen: Probe


class Claim:
    """The locks of one holder, in hand until its run is bound to them or they are let go."""

    def __init__(self, ways: Ways, holder: Holder) -> None:
        self.holder = holder
        self.taken_over: tuple[Lock, ...] = ()
        self.is_confined = False
        self._ways = ways
        self._taken_at = time.monotonic()
        self._wanted: list[str] = []

    def took(
        self, uuids: Sequence[str], taken_over: Sequence[Lock], *, is_confined: bool = False
    ) -> None:
        """Note what was locked just now; ``is_confined``: on a machine that is a container."""
        self._wanted, self._taken_at = list(uuids), time.monotonic()
        self.taken_over = (*self.taken_over, *taken_over)
        self.is_confined = is_confined

    @property
    def warning(self) -> str:
        """Say what the locks do not hold off; "" when they hold off all."""
        if not self.is_confined or self.holder.vmid is not None:
            return ""
        return (
            f"{self.holder.host} is itself a container: its GPU locks are not seen by launches from"
            " its node or from other containers with the same cards, nor theirs here; name the node"
            " and the container in hosts.yaml instead, or share no card"
        )

    def renew_if_due(self) -> None:
        """Take the same locks anew when half of their lease is over; raises as ``claim_roles``."""
        if self._wanted and time.monotonic() - self._taken_at > LEASE_S / 2:
            _lock(self._ways, self, self._wanted)

    def bind(self) -> Bound | None:
        """Tie the locks to the run's process, and look at the GPUs; None where none is locked."""
        if not self._wanted:
            return None
        raw = bind(self._ways.node, self.holder)
        return Bound(raw["pid"], parse(raw, token=self.holder.token))

    def release(self) -> None:
        """Let go of the locks; those of a run that lives stay."""
        if self._wanted:
            release(self._ways.node, self.holder)
            self._wanted = []

    def let_go(self) -> bool:
        """Release after a failure; False where the node cannot be asked: the lease ends them."""
        try:
            self.release()
        except DflashctlError:
            return False
        return True

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let go of the locks of a command that has ended, or whose end nobody saw."""
        self.let_go()


def claim_roles(ways: Ways, facts: dict[str, Any], holder: Holder) -> tuple[tuple[Gpu, ...], Claim]:
    """Lock the place's GPUs; return them by role, each idle and seen by the container itself.

    facts: those of ``remote/facts.py``; they say which GPUs the container sees, if it can tell.
    Raises: MismatchError when one is not there, RefusedError naming the holder when one is not
    idle, StateUnknownError when the driver does not say. Nothing stays locked then.
    """
    container, hold = ways.place.container, Claim(ways, holder)
    if not uses_gpus(container):
        return cpu_roles(container), hold

    def choose(answer: Probe) -> tuple[Gpu, ...]:
        require_expected(answer, ways.place.host.expect, ways.place.host.name)
        gpus = claim(container, answer)
        require_visible(gpus, facts, ways.place.label)
        require_expected_inside(facts, container)
        return gpus

    wanted = list(dict.fromkeys((*container.target, *container.drafter)))  # one may have both
    return _held(ways, hold, wanted, choose), hold


def claim_again(ways: Ways, manifest: Manifest, holder: Holder) -> Claim:
    """Lock the GPUs of an earlier launch, and check that they are idle; raises as claim_roles."""
    hold = Claim(ways, holder)
    uuids = list(dict.fromkeys(gpu.uuid for gpu in manifest.gpus if gpu.uuid is not None))

    def check(answer: Probe) -> tuple[Gpu, ...]:
        for uuid in uuids:
            require_idle(answer.find(uuid, ways.place.label), ways.place.label, answer)
        return ()

    if uuids:
        _held(ways, hold, uuids, check)
    return hold


def claim_idle(ways: Ways, count: int, holder: Holder) -> tuple[tuple[GpuState, ...], Claim]:
    """Lock the first ``count`` GPUs of the roles that are idle and not locked.

    Raises: RefusedError naming a holder when there are fewer, or another was faster; as
    ``claim_roles`` else.
    """
    container, hold = ways.place.container, Claim(ways, holder)
    label = container.label
    seen = probe_for(ways.node, ways.inside)
    if seen.wedged:
        raise _wedged(seen, label)
    members = [seen.find(one, label) for one in (*container.target, *container.drafter)]
    cards = list({gpu.uuid: gpu for gpu in members}.values())
    idle = [gpu.uuid for gpu in cards if gpu.state == "idle"][:count]
    if len(idle) < count:
        for gpu in cards:
            require_idle(gpu, label, seen)
        raise RefusedError(
            f"the roles name {len(cards)} GPUs, not {count}",
            hint="name more under `gpus:` of the container in hosts.yaml",
            place=label,
        )

    def choose(answer: Probe) -> tuple[GpuState, ...]:
        found = tuple(answer.find(uuid, label) for uuid in idle)
        for gpu in found:
            require_idle(gpu, label, answer)
        return found

    return _held(ways, hold, idle, choose), hold


def _held(ways: Ways, hold: Claim, wanted: list[str], choose: Callable[[Probe], Chosen]) -> Chosen:
    """Lock the wanted GPUs and choose among what is seen inside the locks; else let go."""
    try:
        answer = _lock(ways, hold, wanted)
        if not answer.installed and ways.node is not ways.inside:
            seen = probe(ways.inside, from_node=False)
            _lock(ways, hold, [seen.find(one, ways.place.label).uuid for one in wanted])
            answer = probe(ways.inside, from_node=False)
        return choose(answer)
    except BaseException:
        hold.let_go()
        raise


def _lock(ways: Ways, hold: Claim, wanted: list[str]) -> Probe:
    """Take the locks, all or none, and look inside them; raises RefusedError for the holder."""
    holder = hold.holder
    raw = ask(ways.node, "claim", wanted=wanted, claim=holder.wish())
    answer, taken = parse(raw, token=holder.token), raw["claim"]
    if taken is None:
        return answer  # one is not there, or the driver does not answer: the look says which
    conflicts = read_locks(taken, "conflicts")
    if conflicts:
        raise _locked(conflicts, answer, ways.place.label)
    found = read_locks(taken, "taken_over")
    hold.took(taken["uuids"], found, is_confined=taken["confined"])
    return answer


def _locked(conflicts: Sequence[Lock], answer: Probe, place: str) -> RefusedError:
    lock = conflicts[0]
    index = next((gpu.index for gpu in answer.gpus if gpu.uuid == lock.uuid), None)
    name = lock.uuid if index is None else f"{index} ({lock.uuid})"
    more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
    hint = f"dflashctl stop {lock.tag}, other GPUs, or wait: dflashctl launch --wait 2h"
    if lock.state == "starting":
        hint = f"wait: dflashctl launch --wait 2h; or look: dflashctl status {lock.tag}"
    return RefusedError(
        f"GPU {name}{more} is not idle: locked by {lock.text()}",
        hint=hint,
        place=place,
        code="gpu-busy",
    )


def require_expected(answer: Probe, expect: Expect | None, place: str) -> None:
    """Raise MismatchError when a host has other GPUs than hosts.yaml expects of it."""
    problem = "" if expect is None or answer.problem else unexpected(answer.gpus, expect)
    if problem:
        raise MismatchError(problem, hint="dflashctl gpus", place=place, code="gpu-expected")


def require_expected_inside(facts: dict[str, Any], container: Container) -> None:
    """Raise MismatchError when a container sees another number of GPUs than is expected of it."""
    seen, expect = facts.get("gpu_uuids"), container.expect
    if seen is not None and expect is not None and expect.count not in (None, len(seen)):
        raise MismatchError(
            f"hosts.yaml expects {expect.count} GPUs, the container sees {len(seen)}",
            hint="pass them through in the container's configuration, or correct `expect`",
            place=container.label,
            code="gpu-expected",
        )


def unexpected(gpus: Sequence[GpuState], expect: Expect) -> str:
    """Say what about these cards differs from what hosts.yaml expects; "" when nothing does."""
    if expect.count is not None and expect.count != len(gpus):
        return f"hosts.yaml expects {expect.count} GPUs, and {len(gpus)} are there"
    others = [gpu for gpu in gpus if expect.model and expect.model not in gpu.name]
    if others:
        gpu = others[0]
        return f"hosts.yaml expects {expect.model}, and GPU {gpu.index} ({gpu.uuid}) is {gpu.name}"
    return ""


def uses_gpus(container: Container) -> bool:
    """Say whether the roles name GPUs; raises ConfigurationError for none, or a mixture."""
    roles = (*container.target, *container.drafter)
    named = {"target": container.target, "drafter": container.drafter}
    if missing := [role for role, gpus in named.items() if not gpus]:
        raise ConfigurationError(
            f"{container.label} has no GPU for the role {' or '.join(missing)}",
            hint="gpus: {target: [0], drafter: [1]} in hosts.yaml (one GPU may stand in both), or"
            " [cpu] for each",
        )
    on_cpu = [role == CPU for role in roles]
    if any(on_cpu) and not all(on_cpu):
        raise ConfigurationError(
            f"{container.label} mixes cpu and GPUs in its roles",
            hint="gpus: {target: [0], drafter: [1]} in hosts.yaml, or [cpu] for each",
        )
    return not any(on_cpu)


def probe_for(node: Transport, inside: Transport) -> Probe:
    """Ask the node, which sees every process; without nvidia-smi there, ask the container."""
    answer = probe(node)
    if answer.installed or inside is node:
        return answer
    return probe(inside, from_node=False)


def cpu_roles(container: Container) -> tuple[Gpu, ...]:
    """Return the roles of a container that trains on its CPU."""
    roles = [("target", r) for r in container.target] + [("drafter", r) for r in container.drafter]
    return tuple(Gpu(role, None, None, None) for role, _ in roles)


def claim(container: Container, answer: Probe) -> tuple[Gpu, ...]:
    """Return the container's GPUs by role when each is idle.

    Raises: as ``claim_roles``; ConfigurationError for one that has two names in a role.
    """
    if answer.wedged:
        raise _wedged(answer, container.label)
    claimed = []
    for role, members in (("target", container.target), ("drafter", container.drafter)):
        names: dict[str, str] = {}
        for member in members:
            gpu = answer.find(member, container.label)
            if names.setdefault(gpu.uuid, member) != member:
                raise ConfigurationError(
                    f"GPU {gpu.index} stands twice under {role}: {names[gpu.uuid]} and {member}",
                    hint="leave one of them out in hosts.yaml",
                    place=container.label,
                )
            require_idle(gpu, container.label, answer)
            claimed.append(Gpu(role, gpu.index, gpu.uuid, gpu.name))
    return tuple(claimed)


def require_idle(gpu: GpuState, place: str, answer: Probe) -> None:
    """Raise unless the card is idle; unknown is not idle, nor is a card of a driver that hangs."""
    name = f"GPU {gpu.index} ({gpu.uuid})"
    if answer.wedged:
        raise _wedged(answer, place)
    if gpu.state == "idle":
        return
    if gpu.state == "unknown":
        raise StateUnknownError(
            f"{name} may be in use: {gpu.reason}",
            hint="dflashctl gpus",
            place=place,
            code="gpu-unknown",
        )
    text = f"{name} is not idle: {gpu.reason}"
    if gpu.state == "failed":
        code, hint = _UNFIT[gpu.state]
        raise MismatchError(f"{name} has failed: {gpu.reason}", hint=hint, place=place, code=code)
    if gpu.state == "orphaned":
        code, hint = _UNFIT[gpu.state]
        raise RefusedError(text, hint=hint, place=place, code=code)
    tags = sorted({owner.tag for owner in gpu.owners if owner.tag})
    hint = "dflashctl gpus   (pick other GPUs, or wait: dflashctl launch --wait 2h)"
    if tags:
        hint = f"dflashctl stop {tags[0]}, or wait: dflashctl launch --wait 2h"
    raise RefusedError(text, hint=hint, place=place, code="gpu-busy")


def _wedged(answer: Probe, place: str) -> StateUnknownError:
    return StateUnknownError(
        f"the GPUs cannot be asked: {answer.problem}",
        hint="restart the node when it stays so; a driver in this state does not come back",
        place=place,
        code="gpu-wedged",
    )


def require_visible(gpus: tuple[Gpu, ...], facts: dict[str, Any], place: str) -> None:
    """Raise MismatchError when the container itself does not see a GPU that it was given.

    Raises StateUnknownError when its nvidia-smi did not answer.
    """
    seen, problem = facts.get("gpu_uuids"), facts.get("gpu_problem")
    if seen is None:
        return  # the container has no nvidia-smi; CUDA will tell at the start
    if facts.get("gpu_silent"):
        raise StateUnknownError(
            "nvidia-smi in the container gave no answer within 10 s",
            hint="dflashctl gpus",
            place=place,
            code="gpu-unknown",
        )
    if problem and not seen and any(gpu.uuid is not None for gpu in gpus):
        raise lost_inside(problem, place)
    said = f" (its nvidia-smi says: {problem})" if problem else ""
    for gpu in gpus:
        if gpu.uuid is not None and gpu.uuid not in seen:
            raise MismatchError(
                f"GPU {gpu.index} ({gpu.uuid}) is on the node and not in the container{said}",
                hint="pass it through in the container's configuration",
                place=place,
                code="gpu-missing",
            )


def lost_inside(problem: str, place: str) -> MismatchError:
    """Return the error for a container that lost its GPUs while its node has them."""
    return MismatchError(
        f"the container lost its GPUs, and the node has them (its nvidia-smi says: {problem})",
        hint=f"restart the container: pct reboot {place.rpartition('/')[2]}",
        place=place,
        code="gpus-lost",
    )
