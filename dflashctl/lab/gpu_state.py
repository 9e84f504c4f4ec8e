"""gpu.json of a host: what the stand-in nvidia-smi says. docs/lab.md describes its keys."""

from typing import Any

from dflashctl.errors import LabError
from dflashctl.lab.state import SiteState, read_json, write_json

# What nvidia-smi as a whole does, and what happens to one GPU.
WHOLE = ("ok", "no_driver", "mismatch", "no_devices", "hung")
SINGLE: dict[str, dict[str, Any]] = {
    "lost": {"lost": True},
    "lost_rows": {"lost": "row"},
    "ecc": {"ecc": 4},
    "mig": {"mig": True},
    "busy": {"apps": [{"pid": 31337, "name": "python3", "mem": 21504}]},
}


def set_gpu_state(site: SiteState, host: str, value: str) -> None:
    """Apply "ok", "no_driver", ... to all GPUs of a host or "lost:N", "busy:N", ... to GPU N.

    Raises: LabError when the value is none of these.
    """
    path = site.shared(host) / "gpu.json"
    count = site.spec.hosts[host].gpus
    kind, colon, index = value.partition(":")
    if not colon and kind in WHOLE:
        write_json(path, fresh_gpu_state(count, kind))
        return
    if kind not in SINGLE or not index.isdecimal() or int(index) >= count:
        single = ", ".join(f"{name}:N" for name in SINGLE)
        raise LabError(
            f"found {value!r}, expected {', '.join(WHOLE)}, or {single} with N below {count}",
            place=host,
            hint="dflashctl lab fault",
        )
    state = read_json(path) or fresh_gpu_state(count)
    state["gpus"][int(index)].update(SINGLE[kind])
    write_json(path, state)


def fresh_gpu_state(count: int, state: str = "ok") -> dict[str, Any]:
    """gpu.json of `count` healthy, idle GPUs."""
    gpus: list[dict[str, Any]] = [{} for _ in range(count)]
    return {"state": state, "hide_container_processes": True, "gpus": gpus}
