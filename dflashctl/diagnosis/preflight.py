"""What a launch makes of the room over there: disk, inodes, shared memory, limits, clock, tmux.

The facts are those of ``remote/facts.py``. What cannot work is refused, what may not is told.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflashctl.diagnosis.container import SKEW_S, SMALL_MEMLOCK_BYTES, SMALL_SHM_BYTES
from dflashctl.errors import RefusedError
from trainer.contract.config import TrainConfig

_GIB = 1 << 30
_MIB = 1 << 20
_LOG_BYTES = 16 * _MIB  # log, events and records of a short run
_INODES = 200  # a run has some dozen files and a checkpoint few; compiled code more
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")

Json = dict[str, Any]


def least_checkpoint_bytes(config: TrainConfig, target: Json) -> int | None:
    """Return what a checkpoint takes at least: the matrices of the draft's layers and moments.

    None when the target's sizes are not known here. The trainer's own count (`data doctor`) has
    norms, taps and variants besides.
    """
    if any(name not in target for name in _SIZES):
        return None
    draft, hidden = config.draft, int(target["hidden_size"])
    heads = int(draft.num_attention_heads or target["num_attention_heads"])
    key_heads = int(draft.num_key_value_heads or target.get("num_key_value_heads", heads))
    head_dim = int(draft.head_dim or target.get("head_dim", hidden // heads))
    attention = 2 * hidden * head_dim * (heads + key_heads)
    feed_forward = 3 * hidden * int(draft.intermediate_size or target["intermediate_size"])
    numbers = draft.num_draft_layers * (attention + feed_forward)
    moments = 1 if config.optim.name == "muon" else 2
    average = config.optim.ema_decay is not None
    return 4 * numbers * (1 + moments + average)


@dataclass(frozen=True)
class Preflight:
    """A run's configuration and the room that was found for it.

    num_checkpoints: for which there must be room. A new one is whole before the last one goes, so
    a new run needs two, and one that is resumed one more.
    """

    config: TrainConfig
    room: Json
    on_gpus: bool
    num_checkpoints: int = 2

    def require_room(self, place: str) -> None:
        """Raise RefusedError when log and checkpoints do not fit."""
        checkpoint_bytes = least_checkpoint_bytes(self.config, self.room["target"]) or 0
        needed = {
            "workspace": self.num_checkpoints * checkpoint_bytes + _LOG_BYTES,
            "log_dir": _LOG_BYTES,
        }
        for name, disk in self.room["disks"].items():
            if disk["free_bytes"] < needed[name]:
                what = "the log"
                if name == "workspace" and checkpoint_bytes:
                    what += f" and {self.num_checkpoints} checkpoints of {_size(checkpoint_bytes)}"
                text = f"{disk['path']} has {_size(disk['free_bytes'])} free; needed at least: "
                raise _no_room(f"{text}{_size(needed[name])}, for {what}", place, "disk-full")
            if disk["inodes"] and disk["free_inodes"] < _INODES:
                text = (
                    f"{disk['path']} has {disk['free_inodes']} free inodes; a run takes {_INODES}"
                )
                raise _no_room(text, place, "no-inodes")

    def warnings(self, place: str, skew_s: float) -> Iterator[str]:
        """Return what may go wrong, each with what to do."""
        doctor = f"dflashctl doctor -l {place}"
        if not self.room["tmux"]:
            yield (
                f"there is no tmux on {place}: the run starts with setsid and outlives this command"
                f" too, but `attach` does not work; {doctor} --fix installs it"
            )
        shm, memlock = self.room["shm_bytes"], self.room["memlock_bytes"]
        if shm is None or shm < SMALL_SHM_BYTES:
            shown = "is no mount" if shm is None else f"has {_size(shm)}"
            yield f"shared memory of {place} (/dev/shm) {shown}: bus errors may come; see {doctor}"
        if self.on_gpus and memlock is not None and memlock < SMALL_MEMLOCK_BYTES:
            yield (
                f"memlock on {place} is {memlock // 1024} KiB, pinned memory can fail; see {doctor}"
            )
        if abs(skew_s) > SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            yield f"the clock of {place} is {abs(skew_s):.0f} s {way} the one here; see {doctor}"
        for name in self.config.compile.experiments:
            yield f"{name} is an experiment: the run may crash, hang or be slow, and is marked"


def _no_room(text: str, place: str, code: str) -> RefusedError:
    hint = f"dflashctl runs gc --keep 1 -l {place}   (or set `workspace:` to a disk with room)"
    return RefusedError(text, hint=hint, place=place, code=code)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
