"""Checkpoints: all that a resumed run needs to go on as if it had never stopped.

A checkpoint is a directory step_00000100 with masters.safetensors (fp32 weights),
optimizer.safetensors, extras.safetensors (random states, tap scale), state.json and, last,
COMPLETE.json. It is written under another name, synced and renamed: a kill leaves either all of it
or a ``.partial`` directory that the next save removes.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from trainer.errors import CheckpointError

VERSION = 1
_MASTERS, _OPTIMIZER, _EXTRAS = (
    "masters.safetensors",
    "optimizer.safetensors",
    "extras.safetensors",
)
_STATE = "state.json"


@dataclass
class CheckpointState:
    """The state after ``step`` optimiser steps.

    next_index: first batch index of the plan that no step has used. identity: facts that must not
    change between the runs (see ``check_identity``). extras: other tensors, such as random states.
    """

    step: int
    next_index: int
    tokens_total: int
    anchors_total: int
    identity: dict[str, Any]
    masters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    extras: dict[str, Tensor] = field(default_factory=dict)

    def check_identity(self, own: dict[str, Any]) -> None:
        """Refuse to continue another run's weights.

        Raises: CheckpointError naming every fact that differs.
        """
        changed = [
            f"{name} was {self.identity.get(name)!r}, now {own.get(name)!r}"
            for name in sorted(self.identity.keys() | own.keys())
            if self.identity.get(name) != own.get(name)
        ]
        if changed:
            raise CheckpointError(
                f"the checkpoint of step {self.step} belongs to another configuration:"
                f" {'; '.join(changed)}; launch a new tag instead of resuming"
            )


def save(root: Path, state: CheckpointState, *, keep: int) -> Path:
    """Write the checkpoint of ``state.step`` below ``root`` and keep the newest ``keep``.

    A whole checkpoint of the same step is kept as it is: the same step of the same run is the
    same state. Raises: OSError when the disk is full; nothing that was complete is lost then.
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
    _rotate(root, keep)
    return final


def _fill(partial: Path, state: CheckpointState) -> None:
    """Write and sync every file of a checkpoint, COMPLETE.json last."""
    partial.mkdir()
    for name, tensors in (
        (_MASTERS, state.masters),
        (_OPTIMIZER, state.optimizer),
        (_EXTRAS, state.extras),
    ):
        # A copy without the flat storage behind it: safetensors refuses tensors that share one.
        own = {k: t.detach().to("cpu", copy=True) for k, t in tensors.items()}
        save_file(own, partial / name)
        sync(partial / name)
    facts = {
        "v": VERSION,
        "step": state.step,
        "next_index": state.next_index,
        "tokens_total": state.tokens_total,
        "anchors_total": state.anchors_total,
        "identity": state.identity,
    }
    _write(partial / _STATE, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    _write(partial / COMPLETE, describe(partial, (_MASTERS, _OPTIMIZER, _EXTRAS, _STATE)))
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
            tokens_total=int(facts["tokens_total"]),
            anchors_total=int(facts["anchors_total"]),
            identity=dict(facts["identity"]),
            masters=load_file(path / _MASTERS),
            optimizer=load_file(path / _OPTIMIZER),
            extras=load_file(path / _EXTRAS),
        )
    except (CompletionError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error


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


def _rotate(root: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints beyond ``keep``; damaged ones are left to be seen."""
    complete = [p for p in root.iterdir() if step_of(p.name) is not None and _is_complete(p)]
    complete.sort(key=lambda path: step_of(path.name) or 0)
    for path in complete[: -max(1, keep)]:
        # Renamed first: a kill in the middle of the removal must not leave a half directory.
        doomed = path.with_name(path.name + PARTIAL_SUFFIX)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
