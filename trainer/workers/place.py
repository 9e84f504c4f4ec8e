"""Where a worker thread works: its device, a stream of its own there, the cores near the GPU."""

import os
from pathlib import Path
from typing import Any

import torch

SYS_ROOT = Path("/sys")
_URGENT = -1  # priority of a stream; lower goes first


def take_place(device: torch.device, cpu_threads: int | None, *, urgent: bool = False) -> None:
    """Settle the calling thread on ``device``; called once, before its first tensor.

    On a GPU it gets a stream of its own, so that two roles on one card never wait for each other's
    kernels when the host waits for one's; what the default stream still does comes first. Its cores
    are those of the GPU's memory node, where there are several. On the CPU: its intra-op threads.
    ``urgent``: its kernels go before those of other threads on the card, which fill its pauses.
    """
    if device.type != "cuda":
        if cpu_threads is not None:
            torch.set_num_threads(cpu_threads)
        return
    torch.cuda.set_device(device)
    make: Any = torch.cuda.Stream  # torch gives it no types
    stream = make(device, priority=_URGENT if urgent else 0)
    stream.wait_stream(torch.cuda.default_stream(device))
    torch.cuda.set_stream(stream)
    address = _pci_address(device)
    if address is not None:
        stay_near(address)


def stay_near(pci_address: str, sys_root: Path = SYS_ROOT) -> frozenset[int]:
    """Keep the calling thread on the cores near a device; returns them, empty: nothing was changed.

    Cores that this process may not use (a container's share) are left out.
    """
    cores = cores_near(pci_address, sys_root) & os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)  # 0: this thread alone, and those it will start
    return cores


def cores_near(pci_address: str, sys_root: Path = SYS_ROOT) -> frozenset[int]:
    """Return the cores of a PCI device's memory node; none where there is one node or no word."""
    nodes = sys_root / "devices" / "system" / "node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:  # one node is near to all
            return frozenset()
        device = sys_root / "bus" / "pci" / "devices" / pci_address
        node = int((device / "numa_node").read_text(encoding="ascii"))
        if node < 0:  # the firmware does not tell
            return frozenset()
        text = (nodes / f"node{node}" / "cpulist").read_text(encoding="ascii")
        return _cores(text.strip())
    except (OSError, ValueError):
        return frozenset()


def _cores(text: str) -> frozenset[int]:
    """Return the numbers of a kernel list such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _pci_address(device: torch.device) -> str | None:
    """Return domain:bus:device.function as sysfs writes it; None where torch does not tell."""
    facts: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, number = facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
