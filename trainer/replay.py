"""Runs a batch again whose loss or gradient was not finite, and names the first bad tensor.

``python -m trainer replay --run-dir DIR --batch DIR/failed_batch_00000012_rank0.safetensors``: the
batch, its hidden states and the draft's weights come from the file, the head from the target. What
happens is looked at in the order in which it is computed. Status 1 when something is not finite.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from trainer import assembly
from trainer.compile_gate import CompileGate
from trainer.device import current_device
from trainer.errors import DataError
from trainer.learning_rate import Schedule
from trainer.model.attention import Attention, KeyValue, Mask
from trainer.model.masks import BlockLayout, MaskRule
from trainer.workers.drafter import Replica, forward_backward
from trainer.workers.failed_batch import FailedBatch, load_failed

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Findings:
    """What was looked at, and what was not finite, in order."""

    num_looked_at: int = 0
    bad: list[str] = field(default_factory=list)

    def look(self, name: str, tensor: Tensor) -> None:
        """Look at one tensor; whole numbers are finite by themselves."""
        if not tensor.is_floating_point():
            return
        self.num_looked_at += 1
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            num_nan = int(torch.isnan(tensor).sum())
            num_infinite = int((~finite).sum()) - num_nan
            self.bad.append(
                f"{name} {list(tensor.shape)}: {num_nan} NaN and {num_infinite} infinite of"
                f" {tensor.numel()}"
            )


@dataclass(frozen=True)
class SeenAttention:
    """The run's own attention, with all else uncompiled: every module is seen by its hook."""

    of_run: Attention

    def masks(self, layout: BlockLayout, rules: dict[str, MaskRule]) -> dict[str, Mask]:
        """Return the masks of the run's attention."""
        return self.of_run.masks(layout, rules)

    def attend(self, query: Tensor, context: KeyValue, own: KeyValue, mask: Mask) -> Tensor:
        """Attend as the run does. Shapes: as Attention.attend."""
        return self.of_run.attend(query, context, own, mask)

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return ``fn`` as it is."""
        return fn


def replay(run_dir: Path, path: Path) -> bool:
    """Run forward and backward of the batch in ``path``; True when everything is finite.

    Raises: TrainerError or ContractError by name.
    """
    manifest, config = assembly.read_manifest(run_dir)
    failed = load_failed(path)
    devices = assembly.devices_of(manifest, config)
    gate = CompileGate(assembly.gate_settings(config, 1), report=_print)
    try:
        (target,) = assembly.load_targets(config, devices.targets[:1]).values()
        device = devices.drafters[failed.rank % len(devices.drafters)]
        of_run = assembly.attention_of(config, assembly.draft_config(config, target), gate)
        replica = assembly.build_replica(
            config,
            target,
            (failed.rank, device),
            SeenAttention(of_run),
            Schedule(1, 0, 1.0),
            None,
        )
        (replica,), _ = assembly.scale_heads(config, [replica])
        _take_weights(replica, failed, path)
        _print(failed.reason)
        _print(f"batch {failed.prepared.batch.index}, samples {failed.prepared.batch.sample_ids}")
        found = Findings()
        with current_device(device):
            _look_at_inputs(found, replica, failed)
            watch(replica.draft, found)
            sums = forward_backward(replica, gate, failed.prepared, config, failed.progress)
            found.look("loss sum", sums.loss_sum)
            for name, gradient in replica.optimizer.gradients().items():
                found.look(f"gradient of {name}", gradient)
    finally:
        gate.close()
    for line in found.bad:
        _print(f"not finite: {line}")
    if found.bad:
        _print(f"first non-finite tensor: {found.bad[0]}")
    else:
        _print(f"all {found.num_looked_at} tensors are finite on {device}: not reproduced")
    return not found.bad


def _take_weights(replica: Replica, failed: FailedBatch, path: Path) -> None:
    try:
        replica.draft.load_state_dict(failed.draft)
    except RuntimeError as error:
        raise DataError(f"{path} holds another draft than the run's: {error}") from error
    replica.draft.train()


def _look_at_inputs(found: Findings, replica: Replica, failed: FailedBatch) -> None:
    found.look("target_hidden", failed.prepared.target_hidden)
    found.look("the target's embedding", replica.head.embedding)
    found.look("the target's head", replica.head.lm_head)
    for name, tensor in replica.draft.state_dict().items():
        found.look(f"weight {name}", tensor)


def watch(draft: nn.Module, found: Findings) -> None:
    """Look at what every module without children gives, and at its gradient on the way back."""
    for name, module in draft.named_modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(_forward_hook(name, found))


def _forward_hook(name: str, found: Findings) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        if not isinstance(output, Tensor):
            return
        found.look(f"output of {name}", output.detach())
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: found.look(f"gradient at the output of {name}", grad)
            )

    return hook


def _print(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
