"""warmup.json in a compile cache: for which code, torch, driver, GPUs and shapes it was filled.

``python -m trainer warmup`` writes it last; launch compares it with the run that it is to start.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.contract.durable import write_by_rename
from trainer.contract.manifest import Manifest

NAME = "warmup.json"
VERSION = 1
FACTS = ("release", "torch", "driver", "gpus")
# Settings that decide what is compiled, besides all of draft and loss.
_SETTINGS: dict[str, Iterable[str]] = {
    "target": ("dtype", "batching", "forward_tokens", "compile", "fp8"),
    "data": (
        *("max_length", "token_budget", "max_batch_size", "packing", "max_anchors"),
        "row_lengths",
    ),
    "optim": ("name",),
    "compile": ("mode", "attention", "allow_fallback", "caching_precompile"),
}


def conditions(manifest: Manifest) -> dict[str, Any]:
    """Return what a warm-up of this run is good for: the FACTS, and ``shapes`` by setting."""
    config: dict[str, Any] = json.loads(json.dumps(manifest.config))  # tuples become lists
    chosen = _SETTINGS | {"draft": config["draft"], "loss": config["loss"]}
    shapes = {"target.path": manifest.target_revision}
    for section, names in chosen.items():
        shapes |= {f"{section}.{name}": config[section][name] for name in names}
    if not config["data"]["packing"]:
        shapes["data.path"] = manifest.dataset_sha256  # the rows have the lengths of the chats
    return {
        "release": manifest.release,
        "torch": manifest.packages.get("torch"),
        "driver": manifest.driver,
        "gpus": sorted({gpu.name for gpu in manifest.gpus if gpu.name}),
        "shapes": shapes,
    }


def differences(stamp: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words what differs between a stamp and the ``conditions`` of a run."""
    texts = [
        f"{name} {_short(now[name])}, the warm-up had {_short(stamp.get(name))}"
        for name in FACTS
        if stamp.get(name) != now[name]
    ]
    then = stamp.get("shapes")
    if not isinstance(then, Mapping):
        return [*texts, "the warm-up noted no shapes"]
    return texts + [
        f"{name} {_short(value)}, the warm-up had {_short(then.get(name))}"
        for name, value in now["shapes"].items()
        if then.get(name) != value
    ]


def write_stamp(manifest: Manifest, devices: list[dict[str, Any]], ended_unix_s: float) -> None:
    """Write the stamp into the run's cache directory; ``devices`` is what was reported of each."""
    stamp = {"v": VERSION, "ended_unix_s": round(ended_unix_s, 3), "devices": devices}
    directory = Path(manifest.cache_dir)
    directory.mkdir(parents=True, exist_ok=True)
    document = json.dumps(stamp | conditions(manifest), indent=1)
    write_by_rename(directory / NAME, (document + "\n").encode())


def _short(value: object) -> str:
    """Return a value in words; a digest by its first digits."""
    text = "none" if value in (None, []) else str(value)
    if isinstance(value, list):
        text = " + ".join(str(item) for item in value) or "none"
    return text.removeprefix("sha256:")[:12] if len(text) >= 40 and " " not in text else text[:80]
