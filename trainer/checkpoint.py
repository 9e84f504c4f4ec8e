"""Checkpoints: all that a resumed run needs to go on as if it had never stopped.

A checkpoint is a directory step_00000100 with masters.safetensors (fp32 weights),
optimizer.safetensors, extras.safetensors (random states, tap scale), average.safetensors where an
average of the weights is kept, state.json and, last, COMPLETE.json. It is written under another
name, synced and renamed: a kill leaves either all of it or a ``.partial`` directory that the next
save removes.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.contract.completion import (
    COMPLETE,
    PARTIAL_SUFFIX,
    describe,
    step_directory,
    step_of,
    verify,
)
from trainer.contract.durable import sync
from trainer.contract.errors import CompletionError
from trainer.contract.evaluations import RAW
from trainer.errors import CheckpointError

VERSION = 2
_ABSENT = object()
Visit = tuple[int, int]  # epoch, sample_id

_MASTERS, _OPTIMIZER, _EXTRAS = (
    "masters.safetensors",
    "optimizer.safetensors",
    "extras.safetensors",
)
_AVERAGE = "average.safetensors"
_STATE = "state.json"


@dataclass(frozen=True)
class Trained:
    """What a run has trained on since step 0, resumed runs included.

    samples_hash: the sum over all visits of a hash of (epoch, sample), modulo 2**64. It does not
    depend on their order, so two runs with equal numbers trained on the same multiset of samples.
    """

    tokens: int = 0
    anchors: int = 0
    samples: int = 0
    samples_hash: int = 0

    def after(self, num_tokens: int, num_anchors: int, visits: Iterable[Visit]) -> "Trained":
        """Return the totals after another step; ``visits`` are its (epoch, sample_id)."""
        hashes = [_visit_hash(visit) for visit in visits]
        return Trained(
            self.tokens + num_tokens,
            self.anchors + num_anchors,
            self.samples + len(hashes),
            (self.samples_hash + sum(hashes)) % (1 << 64),
        )


def _visit_hash(visit: Visit) -> int:
    digest = hashlib.blake2b(struct.pack("<QQ", *visit), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class CheckpointState:
    """The state after ``step`` optimiser steps.

    next_index: first batch index of the plan that no step has used. identity: facts of the run by
    name (see ``check_identity``). trained: what the weights have seen. extras: other tensors, such
    as random states. average: of the weights, or empty.
    """

    step: int
    next_index: int
    identity: dict[str, Any]
    masters: Mapping[str, Tensor]
    optimizer: dict[str, Tensor]
    trained: Trained = field(default_factory=Trained)
    extras: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)

    def weights(self, kind: str) -> Mapping[str, Tensor]:
        """Return the masters (raw) or their average (ema).

        Raises: CheckpointError when no average was kept.
        """
        if kind == RAW:
            return self.masters
        if not self.average:
            raise CheckpointError(
                f"the checkpoint of step {self.step} has no average; set optim.ema_decay in a run"
            )
        return self.average

    def check_identity(
        self,
        own: Mapping[str, Any],
        may_change: Callable[[str], bool] = lambda _name: False,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[str]:
        """Refuse to continue another run's weights; return the changes that are allowed, in words.

        defaults: of facts that a checkpoint made by an older trainer does not know.
        Raises: CheckpointError naming every fact that differs and must not.
        """
        # Through JSON, which makes lists of tuples: one side may come from a file.
        saved, plain = (
            json.loads(json.dumps(facts)) for facts in ({**defaults, **self.identity}, own)
        )
        changed: list[str] = []
        refused: list[str] = []
        for name in sorted(saved.keys() | plain.keys()):
            before, now = saved.get(name, _ABSENT), plain.get(name, _ABSENT)
            if before != now:
                words = f"{name} was {_word(before)}, now {_word(now)}"
                (changed if may_change(name) else refused).append(words)
        if refused:
            raise CheckpointError(
                f"the checkpoint of step {self.step} belongs to another configuration:"
                f" {'; '.join(refused)}; put the old value back, or launch a new tag"
            )
        return changed


def save(root: Path, state: CheckpointState, *, keep: int, best: int | None = None) -> Path:
    """Write the checkpoint of ``state.step`` below ``root`` and keep the newest ``keep``.

    That of step ``best`` is kept beside them. A whole checkpoint of the same step is kept as it is:
    the same step of the same run is the same state. Raises: OSError when the disk is full; nothing
    that was complete is lost then.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / step_directory(state.step)
    if _is_complete(final, digests=True):
        return final
    _remove_leftovers(root, final)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    try:
        _fill(partial, state)
    except SafetensorError as error:  # what safetensors makes of a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{partial.name}: {error}") from error
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync(root)
    _rotate(root, keep, best)
    return final


def _fill(partial: Path, state: CheckpointState) -> None:
    """Write and sync every file of a checkpoint, COMPLETE.json last."""
    partial.mkdir()
    files = {_MASTERS: state.masters, _OPTIMIZER: state.optimizer, _EXTRAS: state.extras}
    if state.average:
        files[_AVERAGE] = state.average
    for name, tensors in files.items():
        # A copy without the flat storage behind it: safetensors refuses tensors that share one. One
        # by one: a split master is made when it is asked for, and all at once take a GPU's room.
        own = {k: t.detach().to("cpu", copy=True) for k, t in tensors.items()}
        save_file(own, partial / name)
        sync(partial / name)
    facts = {
        "v": VERSION,
        "step": state.step,
        "next_index": state.next_index,
        "trained": asdict(state.trained),
        "identity": state.identity,
    }
    _write(partial / _STATE, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    _write(partial / COMPLETE, describe(partial, (*files, _STATE)))
    sync(partial)


def load(path: Path) -> CheckpointState:
    """Read a checkpoint after checking every file's size and digest.

    Raises: CheckpointError naming the directory and what is wrong with it.
    """
    try:
        verify(path, digests=True)
        facts = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if facts["v"] != VERSION:
            raise CheckpointError(
                f"{path.name}: version {facts['v']}, this trainer reads {VERSION}"
            )
        return CheckpointState(
            step=int(facts["step"]),
            next_index=int(facts["next_index"]),
            trained=Trained(**facts["trained"]),
            identity=dict(facts["identity"]),
            masters=load_file(path / _MASTERS),
            optimizer=load_file(path / _OPTIMIZER),
            extras=load_file(path / _EXTRAS),
            average=load_file(path / _AVERAGE) if (path / _AVERAGE).exists() else {},
        )
    except (CompletionError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's global generators, for ``extras``."""
    found = {"rng_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"rng_cuda_{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def set_random_state(extras: Mapping[str, Tensor]) -> None:
    """Put back what ``random_state`` gave."""
    torch.set_rng_state(extras["rng_cpu"])
    for number in range(torch.cuda.device_count()):
        state = extras.get(f"rng_cuda_{number}")
        if state is not None:
            torch.cuda.set_rng_state(state, number)


def _is_complete(path: Path, *, digests: bool = False) -> bool:
    try:
        verify(path, digests=digests)
    except CompletionError:
        return False
    return True


def _remove_leftovers(root: Path, final: Path) -> None:
    """Remove what a killed writer left, and a damaged directory that bears the new name."""
    for path in root.glob(f"step_*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path)
    if final.exists():
        shutil.rmtree(final)


def _rotate(root: Path, keep: int, best: int | None) -> None:
    """Remove the oldest complete checkpoints beyond ``keep``; damaged ones are left to be seen."""
    complete = [p for p in root.iterdir() if step_of(p.name) is not None and _is_complete(p)]
    complete.sort(key=lambda path: step_of(path.name) or 0)
    for path in complete[: -max(1, keep)]:
        if step_of(path.name) == best:
            continue
        # Renamed first: a kill in the middle of the removal must not leave a half directory.
        doomed = path.with_name(path.name + PARTIAL_SUFFIX)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _word(value: object) -> str:
    return "absent" if value is _ABSENT else repr(value)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
