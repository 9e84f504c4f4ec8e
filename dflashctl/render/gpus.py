"""What ``gpus`` and ``locks`` print: tables of cards and of the locks on them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dflashctl.gpu_locks import Lock
from dflashctl.operations.gpus import GpuRow, HostGpus
from dflashctl.operations.locks import HostLock, LocksResult
from dflashctl.render.tables import format_table

_GIB = 1 << 30
_LOUD = ("unknown", "failed", "orphaned", "wedged")


def gpus_text(hosts: Sequence[HostGpus]) -> str:
    """Return the table of ``gpus``; a host that failed has a row of its own."""
    headers = ("HOST", "GPU", "NAME", "UUID", "UTIL", "MEMORY", "STATE", "FOR", "HELD BY")
    rows: list[tuple[str, ...]] = []
    for host in hosts:
        rows += [_gpu_row(host, row) for row in host.rows]
        if host.error and not any(row.gpu.state in _LOUD for row in host.rows):
            rows.append((host.host, "?", "", "", "?", "?", host.state.upper(), "", host.error))
        elif not host.rows and not host.error:
            rows.append((host.host, "-", "", "", "", "", "no GPU", "", ""))
    return format_table(headers, rows)


def _gpu_row(host: HostGpus, row: GpuRow) -> tuple[str, ...]:
    gpu = row.gpu
    used = "?" if gpu.memory_used_bytes is None else f"{gpu.memory_used_bytes / _GIB:.1f}"
    total = "?" if gpu.memory_total_bytes is None else f"{gpu.memory_total_bytes / _GIB:.1f}"
    return (
        host.host,
        "?" if gpu.index is None else str(gpu.index),
        gpu.name,
        gpu.uuid[:12],
        "?" if gpu.utilization_frac is None else f"{gpu.utilization_frac:.0%}",
        f"{used}/{total} GiB",
        gpu.state.upper() if gpu.state in _LOUD else gpu.state,
        ", ".join(row.roles),
        gpu.reason,
    )


def locks_text(locks: Sequence[HostLock]) -> str:
    """Return the table of ``locks list``."""
    headers = ("HOST", "GPU", "TAG", "PLACE", "TAKEN BY", "SINCE", "STATE", "WHY")
    rows = [
        (
            one.node,
            one.lock.uuid[:12],
            one.lock.tag,
            one.lock.place,
            one.lock.by,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.lock.created_unix_s)),
            one.lock.state,
            one.lock.why,
        )
        for one in locks
    ]
    return format_table(headers, rows) if rows else "no GPU is locked\n"


def cleared_text(locks: Sequence[HostLock]) -> str:
    """Return what ``locks clear`` removed, one lock a line."""
    return "".join(f"{one.node}  cleared GPU {one.lock.uuid}: {one.lock.text()}\n" for one in locks)


def locks_document(result: LocksResult) -> Mapping[str, Any]:
    """Return the document of ``locks``; the tokens stay out of it."""
    return {
        "locks": [{"node": one.node, **public_lock(one.lock)} for one in result.locks],
        "failures": [asdict(failure) for failure in result.failures],
    }


def public_lock(lock: Lock) -> dict[str, Any]:
    """Return a lock without its token, by which it could be let go."""
    return {key: value for key, value in asdict(lock).items() if key != "token"}
