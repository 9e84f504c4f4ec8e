"""Whether the compile cache of a run to come is warm, by the stamps of warm-ups over there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.contract.config import TrainConfig
from trainer.contract.manifest import Manifest
from trainer.contract.warmup_stamp import conditions, differences

_MAX_TOLD = 4


@dataclass(frozen=True)
class Warmth:
    """state: fresh, stale (of something else than this run) or none. why: in words; "" if fresh."""

    state: str
    why: str


def warmth_of(manifest: Manifest, stamps: Sequence[dict[str, Any]]) -> Warmth:
    """Compare a run with the stamps of its workspace (oldest first, each with its cache ``key``).

    The stamp of the run's own cache decides; where there is none, the nearest one tells what is
    different now.
    """
    key, now = manifest.cache_dir.rpartition("/")[2], conditions(manifest)
    own = [stamp for stamp in stamps if stamp.get("key") == key]
    if not stamps:
        return Warmth("none", "no warm-up was made here")
    nearest = min(reversed(own or stamps), key=lambda stamp: len(differences(stamp, now)))
    changed = differences(nearest, now)
    if own and not changed:
        return Warmth("fresh", "")
    more = f"; and {len(changed) - _MAX_TOLD} more" if len(changed) > _MAX_TOLD else ""
    told = "; ".join(changed[:_MAX_TOLD]) or f"its cache is {nearest.get('key')}, not {key}"
    return Warmth("stale", f"the warm-up is stale: {told}{more}")


def needs_warmth(config: TrainConfig) -> bool:
    """Say whether the run compiles anything."""
    return config.run.device == "cuda" and config.compile.mode != "off"
