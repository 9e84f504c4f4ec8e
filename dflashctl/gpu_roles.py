"""The GPUs that hosts.yaml gives a container, found on the node and proven idle."""

from dataclasses import dataclass
from typing import Any

from dflashctl.errors import ConfigurationError, MismatchError, RefusedError, StateUnknownError
from dflashctl.gpus import GpuState, Probe, probe
from dflashctl.inventory import Container, Place
from dflashctl.transport.base import Transport
from trainer.contract.manifest import Gpu, Manifest

CPU = "cpu"


@dataclass(frozen=True)
class Ways:
    """A place with the open ways into its container and to its node (one and the same for self)."""

    place: Place
    inside: Transport
    node: Transport

    @property
    def round_trips(self) -> int:
        """Remote commands so far."""
        same = self.node is self.inside
        return self.inside.round_trips + (0 if same else self.node.round_trips)


def claim_roles(ways: Ways, facts: dict[str, Any]) -> tuple[Gpu, ...]:
    """Return the place's GPUs by role, each idle and seen by the container itself.

    facts: those of ``remote/facts.py``; they say which GPUs the container sees, if it can tell.
    Raises: MismatchError when one is not there, RefusedError naming the holder when one is not
    idle, StateUnknownError when the driver does not say.
    """
    container = ways.place.container
    if not uses_gpus(container):
        return cpu_roles(container)
    gpus = claim(container, probe_for(ways.node, ways.inside))
    require_visible(gpus, facts, ways.place.label)
    return gpus


def require_free_again(ways: Ways, manifest: Manifest) -> None:
    """Check that the GPUs of an earlier launch are idle; raises as ``claim_roles``."""
    if any(gpu.uuid for gpu in manifest.gpus):
        answer = probe_for(ways.node, ways.inside)
        for gpu in manifest.gpus:
            if gpu.uuid is not None:
                require_idle(answer.find(gpu.uuid, ways.place.label), ways.place.label)


def uses_gpus(container: Container) -> bool:
    """Say whether the roles name GPUs; raises ConfigurationError for none, or a mixture."""
    roles = (*container.target, *container.drafter)
    if not container.target or not container.drafter:
        raise ConfigurationError(
            f"{container.label} has no GPUs for both roles",
            hint="gpus: {target: [0], drafter: [1]} in hosts.yaml (or [cpu] for each)",
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
    return answer if answer.installed or inside is node else probe(inside)


def cpu_roles(container: Container) -> tuple[Gpu, ...]:
    """Return the roles of a container that trains on its CPU."""
    roles = [("target", r) for r in container.target] + [("drafter", r) for r in container.drafter]
    return tuple(Gpu(role, None, None, None) for role, _ in roles)


def claim(container: Container, answer: Probe) -> tuple[Gpu, ...]:
    """Return the container's GPUs by role when each is idle; raises as ``claim_roles``."""
    claimed = []
    for role, members in (("target", container.target), ("drafter", container.drafter)):
        for member in members:
            gpu = answer.find(member, container.label)
            require_idle(gpu, container.label)
            claimed.append(Gpu(role, gpu.index, gpu.uuid, gpu.name))
    return tuple(claimed)


def require_idle(gpu: GpuState, place: str) -> None:
    """Raise unless the card is idle; unknown is not idle."""
    if gpu.state == "idle":
        return
    name = f"GPU {gpu.index} ({gpu.uuid})"
    if gpu.state == "unknown":
        raise StateUnknownError(
            f"{name} may be in use: {gpu.reason}", hint="dflashctl gpus", place=place
        )
    tags = sorted({owner.tag for owner in gpu.owners if owner.tag})
    hint = f"dflashctl stop {tags[0]}" if tags else "dflashctl gpus   (pick other GPUs, or wait)"
    raise RefusedError(f"{name} is not idle: {gpu.reason}", hint=hint, place=place, code="gpu-busy")


def require_visible(gpus: tuple[Gpu, ...], facts: dict[str, Any], place: str) -> None:
    """Raise MismatchError when the container itself does not see a GPU that it was given."""
    seen, problem = facts.get("gpu_uuids"), facts.get("gpu_problem")
    if seen is None:
        return  # the container has no nvidia-smi; CUDA will tell at the start
    said = f" (its nvidia-smi says: {problem})" if problem else ""
    for gpu in gpus:
        if gpu.uuid is not None and gpu.uuid not in seen:
            raise MismatchError(
                f"GPU {gpu.index} ({gpu.uuid}) is on the node and not in the container{said}",
                hint="pass it through in the container's configuration",
                place=place,
                code="gpu-missing",
            )
