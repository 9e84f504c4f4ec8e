"""What the GPUs of a node do: memory, utilisation, idle or held, and by whom.

The node sees every process with its pid and cgroup, a container sees memory only; so the node is
asked first. A card that gives no clear answer is unknown, and unknown is never idle.
"""

import re
from dataclasses import dataclass, field
from importlib.resources import files

from dflashctl.errors import MismatchError
from dflashctl.transport import run_script
from dflashctl.transport.base import Script, Transport

_MIB = 1 << 20
_IDLE_BYTES = 300 * _MIB  # driver and display reserve up to about this much on an empty card
_IDLE_FRAC = 0.10
_PROBE_S = 40.0  # two queries of at most 12 s each, and the way
_RUN_DIR = re.compile(r"--run-dir[ =](\S*)/runs/([A-Za-z][A-Za-z0-9_-]*)")
_STUCK = (124, 137)


@dataclass(frozen=True)
class Owner:
    """A process on a GPU; ``vmid`` None is the node itself, ``tag`` the run it belongs to."""

    pid: int
    command: str
    memory_bytes: int | None
    user: str | None = None
    vmid: int | None = None
    age_s: int | None = None
    tag: str | None = None

    def text(self) -> str:
        """Return "CT 105 pid 48122 python serve.py", or "run fresh7 (CT 200 pid 311)"."""
        where = "node" if self.vmid is None else f"CT {self.vmid}"
        if self.tag is not None:
            return f"run {self.tag} ({where} pid {self.pid})"
        return f"{where} pid {self.pid} {self.command[:80]}"


@dataclass(frozen=True)
class GpuState:
    """One card. ``state``: idle, ours, busy or unknown; ``reason`` says why it is not idle."""

    index: int
    uuid: str
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_frac: float | None
    state: str
    reason: str = ""
    owners: tuple[Owner, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Answer of one node; ``problem`` is what the driver said instead of rows."""

    gpus: tuple[GpuState, ...]
    problem: str = ""
    installed: bool = True

    def find(self, role: str, place: str) -> GpuState:
        """Return the card that "3" or "GPU-..." names; raises MismatchError."""
        for gpu in self.gpus:
            if role in (str(gpu.index), gpu.uuid):
                return gpu
        there = ", ".join(str(gpu.index) for gpu in self.gpus) or "none"
        raise MismatchError(
            f"GPU {role} of hosts.yaml is not there (found: {there})"
            + (f": {self.problem}" if self.problem else ""),
            hint="dflashctl gpus",
            place=place,
            code="gpu-missing",
        )


@dataclass
class _Sections:
    """The raw answer of gpus.sh."""

    gpus: list[str] = field(default_factory=list)
    apps: list[str] = field(default_factory=list)
    gpus_rc: int | None = None
    apps_rc: int | None = None
    facts: dict[int, list[str]] = field(default_factory=dict)
    installed: bool = True


def probe(transport: Transport) -> Probe:
    """Ask the GPUs of the place; one round trip. Raises: what ``run_script`` raises."""
    text = files("dflashctl.remote").joinpath("gpus.sh").read_text(encoding="utf-8")
    result = run_script(transport, Script(text, deadline_s=_PROBE_S, what="gpus"))
    return parse(result.stdout.decode("utf-8", "replace"))


def parse(text: str) -> Probe:
    """Turn the answer of gpus.sh into states."""
    sections = _split(text)
    if not sections.installed:
        return Probe((), "nvidia-smi is not installed", installed=False)
    owners, unlisted = _owners(sections)
    gpus, odd = [], []
    for line in sections.gpus:
        gpu = _gpu(line, owners, apps_known=sections.apps_rc == 0 and not unlisted)
        if gpu is None:
            odd.append(line)
        else:
            gpus.append(gpu)
    problem = " ".join(odd)
    if sections.gpus_rc in _STUCK or sections.gpus_rc is None:
        problem = "nvidia-smi gave no answer within 10 s (driver stuck?)"
    elif sections.gpus_rc and not problem:
        problem = f"nvidia-smi ended with status {sections.gpus_rc}"
    return Probe(tuple(gpus), problem)


def _split(text: str) -> _Sections:
    found = _Sections()
    section: list[str] | None = None
    name = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line == "@none":
            found.installed = False
        elif line in ("@gpus", "@apps"):
            name = line[1:]
            section = found.gpus if name == "gpus" else found.apps
        elif line.startswith("@rc ") and line[4:].isdigit():
            setattr(found, f"{name}_rc", int(line[4:]))
            section = None
        elif line.startswith("@pid ") and line[5:].isdigit():
            section = found.facts.setdefault(int(line[5:]), [])
        elif line and section is not None:
            section.append(line)
    return found


def _owners(sections: _Sections) -> tuple[dict[str, list[Owner]], bool]:
    """Return the processes by GPU uuid, and whether a line could not be read."""
    owners: dict[str, list[Owner]] = {}
    unlisted = False
    for line in sections.apps:
        head, _, memory = line.rpartition(",")
        words = [word.strip() for word in head.split(",", 2)]  # a process name may hold commas
        if len(words) != 3 or not words[1].isdigit():
            unlisted = unlisted or not line.startswith("No running")
            continue
        uuid, pid, name = words
        owner = _owner(int(pid), name, _mib(memory), sections.facts.get(int(pid), []))
        owners.setdefault(uuid, []).append(owner)
    return owners, unlisted


def _owner(pid: int, name: str, memory_bytes: int | None, facts: list[str]) -> Owner:
    if not facts:
        return Owner(pid, name, memory_bytes)
    cgroup = next((line for line in facts if line.startswith("/lxc/")), "")
    command = next((line[4:].strip() for line in facts if line.startswith("@cmd")), "") or name
    run = _RUN_DIR.search(command)
    return Owner(
        pid=pid,
        command=command,
        memory_bytes=memory_bytes,
        user=None if facts[0] == "?" else facts[0],
        vmid=int(cgroup[5:]) if cgroup else None,
        age_s=int(facts[1]) if len(facts) > 1 and facts[1].isdigit() else None,
        tag=run[2] if run and "trainer" in command else None,
    )


def _gpu(line: str, owners: dict[str, list[Owner]], *, apps_known: bool) -> GpuState | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) < 6 or not words[0].isdigit():
        return None
    index, uuid = int(words[0]), words[1]
    used, total, utilization = _mib(words[-3]), _mib(words[-2]), _percent(words[-1])
    mine = tuple(owners.get(uuid, ()))
    if used is None and not mine:
        state, reason = "unknown", f"the driver says {words[-3]} of its memory"
    else:
        state, reason = _judge(used or 0, utilization, mine, apps_known=apps_known)
    name = ", ".join(words[2:-3])
    return GpuState(index, uuid, name, used, total, utilization, state, reason, mine)


def _judge(
    used_bytes: int,
    utilization: float | None,
    owners: tuple[Owner, ...],
    *,
    apps_known: bool,
) -> tuple[str, str]:
    if owners:
        state = "ours" if all(owner.tag is not None for owner in owners) else "busy"
        return state, "; ".join(owner.text() for owner in owners)
    if used_bytes >= _IDLE_BYTES:
        return "busy", f"{used_bytes / _MIB:.0f} MiB held, and no process is visible from here"
    if utilization is not None and utilization >= _IDLE_FRAC:
        return "busy", f"utilisation {utilization:.0%}, and no process is visible from here"
    if not apps_known:
        return "unknown", "the driver does not list its processes"
    return "idle", ""


def _mib(text: str) -> int | None:
    text = text.strip()
    return int(text) * _MIB if text.isdigit() else None


def _percent(text: str) -> float | None:
    text = text.strip()
    return int(text) / 100 if text.isdigit() else None
