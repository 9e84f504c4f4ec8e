"""What the GPUs of a node do: memory, utilisation, idle or held, and by whom.

The node sees every process with its pid and cgroup, a container sees memory only; so the node is
asked first. A card that gives no clear answer is unknown, and unknown is never idle.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.errors import MismatchError
from dflashctl.gpu_locks import Lock, ask, others, read_locks
from dflashctl.transport.base import Transport

_MIB = 1 << 20
_IDLE_BYTES = 300 * _MIB  # driver and display reserve up to about this much on an empty card
_IDLE_FRAC = 0.10
_RUN_DIR = re.compile(r"--run-dir[ =](\S*)/runs/([A-Za-z][A-Za-z0-9_-]*)")
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")
_LOST = re.compile(r"lost|unknown error|ERR!|fallen off", re.IGNORECASE)
_DRIVER_SAYS = re.compile(r"NVML|NVIDIA-SMI|No devices|device handle")
_ABSENT = re.compile(r"not running|does not exist|init pid")
_STUCK = (124, 137)  # exit statuses of timeout
_NO_DEVICES, _MISMATCH = 6, 18  # exit statuses of nvidia-smi
_DAEMONS = ("nvidia-persiste", "nvidia-persistenced", "dcgm", "nv-hostengine", "nvidia-smi")

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Owner:
    """A process on a GPU; ``vmid`` None is the node itself, ``tag`` the run it belongs to.

    pid: as the node sees it; inside_pid: as its container does.
    """

    pid: int
    command: str
    memory_bytes: int | None
    user: str | None = None
    vmid: int | None = None
    age_s: int | None = None
    tag: str | None = None
    inside_pid: int | None = None

    def text(self) -> str:
        """Return "CT 105 pid 48122 python serve.py", or "run fresh7 (CT 200 pid 48122, ...)"."""
        where = "node" if self.vmid is None else f"CT {self.vmid}"
        inside = "" if self.inside_pid is None else f", {self.inside_pid} inside"
        if self.tag is not None:
            return f"run {self.tag} ({where} pid {self.pid}{inside})"
        inside = inside and f" ({inside[2:]})"
        return f"{where} pid {self.pid}{inside} {self.command[:80]}"


@dataclass(frozen=True)
class GpuState:
    """One card. ``reason`` says why it is not idle.

    state: idle; ours (a run's, or locked for one); foreign (another process); orphaned (memory held
    by no process); failed (lost, or uncorrected ECC errors); wedged (its driver hangs); unknown.
    """

    index: int | None
    uuid: str
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_frac: float | None
    state: str
    reason: str = ""
    owners: tuple[Owner, ...] = ()


@dataclass(frozen=True)
class View:
    """What nvidia-smi said inside a container: its cards, or ``problem``.

    listed: False where nvidia-smi itself said nothing; without a ``problem`` there is none there.
    """

    uuids: tuple[str, ...]
    problem: str = ""
    listed: bool = True


@dataclass(frozen=True)
class Probe:
    """Answer of one node; ``problem`` is what the driver said instead of rows.

    wedged: nvidia-smi hangs. mismatch: driver and library differ, or there are no devices.
    """

    gpus: tuple[GpuState, ...]
    problem: str = ""
    installed: bool = True
    wedged: bool = False
    mismatch: bool = False
    locks: tuple[Lock, ...] = ()
    views: tuple[tuple[int, View], ...] = ()

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


def probe(
    transport: Transport,
    *,
    from_node: bool = True,
    inside: Mapping[int, Sequence[str]] | None = None,
) -> Probe:
    """Ask the GPUs of the place; one round trip.

    inside: commands of the node that list the GPUs as containers see them, by vmid. from_node:
    False where the place is a container, which does not see other containers' processes.
    Raises: what ``run_program`` raises.
    """
    commands = {str(vmid): list(argv) for vmid, argv in (inside or {}).items()}
    return parse(ask(transport, "look", inside=commands), from_node=from_node)


def parse(answer: Raw, *, from_node: bool = True, token: str = "") -> Probe:
    """Turn the answer of remote/gpus.py into states; locks of ``token`` are the asker's own."""
    locks = read_locks(answer)
    if not answer["installed"]:
        return Probe((), "nvidia-smi is not installed", installed=False, locks=locks)
    judge = _Judge(answer, others(locks, token), from_node=from_node)
    rows = answer["gpus"]
    gpus = [gpu for line in rows["rows"] if (gpu := judge.card(line)) is not None]
    gpus += judge.failed(rows, gpus)
    problem = str(rows["problem"])
    wedged = rows["rc"] is None or (answer["apps"]["rc"] is None and bool(rows["rows"]))
    if wedged:
        problem = _wedged_text(answer["stuck"])
        gpus = [gpu if gpu.state == "failed" else replace(gpu, state="wedged") for gpu in gpus]
        gpus += [_unseen("wedged", None, card, problem) for card in answer["cards"] if not gpus]
    elif rows["rc"] and not problem:
        problem = f"nvidia-smi ended with status {rows['rc']}"
    views = tuple((int(vmid), _view(raw)) for vmid, raw in answer.get("inside", {}).items())
    return Probe(
        tuple(sorted(gpus, key=lambda gpu: (gpu.index is None, gpu.index or 0))),
        problem,
        wedged=wedged,
        mismatch=rows["rc"] in (_NO_DEVICES, _MISMATCH),
        locks=locks,
        views=views,
    )


def _wedged_text(stuck: Raw | None) -> str:
    text = "nvidia-smi gave no answer within 10 s (driver stuck?)"
    if stuck is None or stuck.get("age_s", 0) < 30:
        return text
    return (
        f"nvidia-smi hangs: pid {stuck['pid']} of {stuck['age_s']} s ago is still stuck"
        f" (state {stuck['state']}), so no other was started"
    )


def _view(raw: Raw) -> View:
    text, rc = str(raw["text"]), raw["rc"]
    if rc in (None, *_STUCK):
        return View((), "its nvidia-smi gave no answer within 10 s", listed=False)
    uuids = tuple(re.findall(r"UUID: (GPU-[0-9A-Za-z-]+)", text))
    said = " ".join(text.split())[-300:]
    if rc == 0 or _DRIVER_SAYS.search(text):
        return View(uuids, "" if rc == 0 else said)
    if _ABSENT.search(text) or rc in (126, 127):  # it does not run, or has no nvidia-smi
        return View((), listed=False)
    return View((), f"it cannot be asked: {said or f'exit status {rc}'}", listed=False)


class _Judge:
    """Judges each card by what the whole answer says."""

    def __init__(self, answer: Raw, locks: Mapping[str, Lock], *, from_node: bool) -> None:
        self._locks = locks
        self._from_node = from_node
        self._cards = list(answer.get("cards", ()))
        self._devices: Raw = answer.get("devices", {})
        self._waiting: Sequence[Raw] = answer.get("waiting", ())
        facts = {raw["pid"]: raw for raw in answer.get("processes", ())}
        self._owners, unlisted = _owners(answer["apps"]["apps"], facts)
        self._apps_known = answer["apps"]["rc"] == 0 and not unlisted

    def card(self, line: str) -> GpuState | None:
        """Return the state of a row; None when it is no row."""
        words = [word.strip() for word in line.split(",")]
        if len(words) < 8 or not words[0].isdigit():
            return None
        index, uuid = int(words[0]), words[1]
        used, total, utilization = _mib(words[-5]), _mib(words[-4]), _percent(words[-3])
        owners = tuple(self._owners.get(uuid, ()))
        errors = int(words[-2]) if words[-2].isdigit() else 0
        if used is None and _LOST.search(words[-5]):
            state, reason = "failed", f"the driver says {words[-5]} of its memory"
        elif errors:
            state, reason = "failed", f"{errors} uncorrected ECC errors since the driver was loaded"
            reason = "; ".join([reason, *(owner.text() for owner in owners)])
        elif owners:
            state = "ours" if all(owner.tag is not None for owner in owners) else "foreign"
            reason = "; ".join(owner.text() for owner in owners)
        elif used is None:
            state, reason = "unknown", f"the driver says {words[-5]} of its memory"
        else:
            state, reason = self._without_process(index, uuid, used, utilization)
        name = ", ".join(words[2:-5])
        return GpuState(index, uuid, name, used, total, utilization, state, reason, owners)

    def _without_process(
        self, index: int, uuid: str, used_bytes: int, utilization: float | None
    ) -> tuple[str, str]:
        """Judge a card on which the driver lists no process."""
        if used_bytes >= _IDLE_BYTES:
            return self._held(index, uuid, f"{used_bytes / _MIB:.0f} MiB held")
        if utilization is not None and utilization >= _IDLE_FRAC:
            return "foreign", f"utilisation {utilization:.0%}, and no process is listed"
        if not self._apps_known:
            return "unknown", "the driver does not list its processes"
        if uuid in self._locks:
            return "ours", f"locked: {self._locks[uuid].text()}"
        return "idle", ""

    def _held(self, index: int, uuid: str, what: str) -> tuple[str, str]:
        """Say who may hold memory that the driver gives to no process."""
        if not self._from_node:
            return "foreign", f"{what}, owner unknown: it is seen only from inside a container"
        if not self._apps_known:
            return "unknown", f"{what}, and the driver does not list its processes"
        minors = [card["minor"] for card in self._cards if card["uuid"] == uuid]
        minor = minors[0] if minors else str(index)
        holders = [
            raw
            for raw in self._devices.get(minor, ())
            if not raw["command"].rpartition("/")[2].startswith(_DAEMONS)
        ]
        told = f"/dev/nvidia{minor} is open in " + (
            "; ".join(_process_text(raw) for raw in holders) or "no process"
        )
        if any(raw["state"] not in "DZX" for raw in holders):
            return "foreign", f"{what}, and the driver lists no process; {told}"
        waiting = [raw for raw in self._waiting if raw not in holders]
        tasks = "; ".join(_process_text(raw) for raw in waiting[:5])
        return "orphaned", (
            f"{what} by no process, even on the node; {told}"
            + (f"; in state D: {tasks}" if tasks else "")
        )

    def failed(self, rows: Raw, seen: Sequence[GpuState]) -> list[GpuState]:
        """Return the cards that gave no row, as far as they are known by number or bus."""
        found = []
        for index, text in rows.get("failed", {}).items():
            card = self._card_at(text)
            found.append(_unseen("failed", int(index), card, str(text)))
        if not found and rows["rc"] and rows["rows"]:
            card = self._card_at(str(rows["problem"]))
            if card and card["uuid"] not in {gpu.uuid for gpu in seen}:
                found.append(_unseen("failed", None, card, str(rows["problem"])))
        return found

    def _card_at(self, text: str) -> Raw:
        """Return what the kernel module knows of the card whose bus the driver names."""
        named = {match[2].lower() for match in _BUS_ID.finditer(text)}
        for card in self._cards:
            if any(str(card["bus_id"]).lower().endswith(bus) for bus in named):
                return dict(card)
        return {}


def _unseen(state: str, index: int | None, card: Raw, text: str) -> GpuState:
    """Return a card that gave no row; ``card`` is what the kernel module knows of it."""
    uuid, name = str(card.get("uuid", "")), str(card.get("name", ""))
    return GpuState(index, uuid, name, None, None, None, state, text)


def _process_text(raw: Raw) -> str:
    where = "node" if raw["vmid"] is None else f"CT {raw['vmid']}"
    return f"{where} pid {raw['pid']} {raw['command'][:60]} (state {raw['state']})"


def _owners(apps: Sequence[str], facts: Mapping[int, Raw]) -> tuple[dict[str, list[Owner]], bool]:
    """Return the processes by GPU uuid, and whether a line could not be read."""
    owners: dict[str, list[Owner]] = {}
    unlisted = False
    for line in apps:
        head, _, memory = line.rpartition(",")
        words = [word.strip() for word in head.split(",", 2)]  # a process name may hold commas
        if len(words) != 3 or not words[1].isdigit():
            unlisted = unlisted or not line.startswith("No running")
            continue
        uuid, pid, name = words
        owner = _owner(int(pid), name, _mib(memory), facts.get(int(pid)))
        owners.setdefault(uuid, []).append(owner)
    return owners, unlisted


def _owner(pid: int, name: str, memory_bytes: int | None, facts: Raw | None) -> Owner:
    if facts is None:
        return Owner(pid, name, memory_bytes)
    command = str(facts["command"]) or name
    run = _RUN_DIR.search(command)
    return Owner(
        pid=pid,
        command=command,
        memory_bytes=memory_bytes,
        user=facts["user"],
        vmid=facts["vmid"],
        age_s=facts["age_s"],
        tag=run[2] if run and "trainer" in command else None,
        inside_pid=facts["inside_pid"],
    )


def _mib(text: str) -> int | None:
    text = text.strip()
    return int(text) * _MIB if text.isdigit() else None


def _percent(text: str) -> float | None:
    text = text.strip()
    return int(text) / 100 if text.isdigit() else None
