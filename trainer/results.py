"""What a finished or stopped run yields: evaluation.json and the export.

``python -m trainer evaluate --run-dir DIR --prompts FILE`` decodes held-out prompts with the run's
real target; ``python -m trainer export --run-dir DIR`` writes the newest checkpoint in the z-lab
layout. Both take another checkpoint with ``--best`` and the average of the weights with ``--ema``.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer import assembly, checkpoint
from trainer.checkpoint import CheckpointState
from trainer.contract.completion import digest_file, latest_complete, step_directory
from trainer.contract.config import TrainConfig
from trainer.contract.durable import write_by_rename
from trainer.contract.evaluations import EMA, RAW, Evaluations
from trainer.data.dataset import load_chats, load_tokenizer, split_answer
from trainer.errors import CheckpointError, StorageError
from trainer.evaluate import evaluate, walk
from trainer.export import CONFIG as EXPORT_CONFIG
from trainer.export import card, export_draft, load_export
from trainer.export.files import MAX_SHARD_BYTES
from trainer.model.draft import DraftModel
from trainer.model.target import Target

VERSION = 1


@dataclass(frozen=True)
class Choice:
    """Which weights of a run: the newest checkpoint's, unless told otherwise.

    best: of the checkpoint that the evaluations in training found best, and of that the ones (raw
    or average) that measured best. ema: the average.
    """

    best: bool = False
    ema: bool = False


@dataclass(frozen=True)
class EvaluationOptions:
    """What to decode.

    num_prompts: prompts decoded, None for all. walk_prompts: samples walked for the estimate.
    target_dtype: equality is exact in float32 alone; None keeps the run's.
    """

    prompts: Path
    num_prompts: int | None = None
    max_new_tokens: int = 128
    walk_prompts: int = 0
    target_dtype: str | None = "float32"
    choice: Choice = Choice()


def evaluate_run(run_dir: Path, options: EvaluationOptions) -> dict[str, Any]:
    """Measure the run's draft and write evaluation.json; returns its document.

    The export is measured where there is one, else the newest checkpoint, unless
    ``options.choice`` asks for weights. Prompts are chats: what
    stands before the first answer is the prompt. Raises: TrainerError or ContractError by name.
    """
    manifest, config = assembly.read_manifest(run_dir)
    device = assembly.devices_of(manifest, config).targets[0]
    if options.target_dtype is not None:
        config = replace(config, target=replace(config.target, dtype=options.target_dtype))
    tokenizer = load_tokenizer(config.target.path, config.target.revision)
    chats = load_chats(options.prompts, tokenizer, config.data.max_length, key="--prompts")
    _print(f"{len(chats.samples)} prompts in {options.prompts}")
    target = assembly.load_targets(config, [device])[str(device)]
    draft, source = run_draft(run_dir, config, target, options.choice)
    draft = draft.to(device).eval()
    chosen = chats.samples[: options.num_prompts]
    result = evaluate(
        target,
        draft,
        [split_answer(sample)[0] for sample in chosen],
        options.max_new_tokens,
        progress=_Progress(),
    ).to_dict()
    if options.walk_prompts:
        samples = chats.samples[: options.walk_prompts]
        result |= walk(target, draft, samples, progress=_Progress()).to_dict()
    result = {
        "v": VERSION,
        "run_id": manifest.run_id,
        "draft": source,
        "prompts_path": str(options.prompts),
        "prompts_sha256": digest_file(options.prompts),
        "made_unix_s": round(time.time(), 3),
    } | result
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_by_rename(run_dir / "evaluation.json", text.encode())
    lossless = "yes" if result["lossless"] else "no"
    _print(
        f"acceptance length {result['acceptance_length']:.3f} on {result['num_prompts']} prompts,"
        f" lossless: {lossless} ({result['num_equal']} of {result['num_prompts']} equal,"
        f" target {result['target_dtype']})"
    )
    if card.refresh(run_dir):
        _print("the model card of the export is up to date")
    return result


def export_run(
    run_dir: Path, choice: Choice = Choice(), *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """Write the newest complete checkpoint, or the chosen one, to export/; returns the directory.

    Weights above ``max_shard_bytes`` are split.

    Raises: CheckpointError when there is no such checkpoint, or no average in it, StorageError when
    the export cannot be written.
    """
    _manifest, config = assembly.read_manifest(run_dir)
    cpu = torch.device("cpu")
    target = assembly.load_targets(config, [cpu])[str(cpu)]
    draft, source = checkpoint_draft(run_dir, config, target, choice)
    path = run_dir / "export"
    text = card.describe(run_dir, draft.config, source)
    try:
        export_draft(draft, path, config.target, card=text, max_shard_bytes=max_shard_bytes)
    except (OSError, SafetensorError) as error:  # a full disk, a place that may not be written
        raise StorageError(f"{path} cannot be written ({error}); make room there") from error
    _print(f"exported {source} to {path}")
    return path


def run_draft(
    run_dir: Path, config: TrainConfig, target: Target, choice: Choice = Choice()
) -> tuple[DraftModel, str]:
    """Return the run's draft on the CPU and where it came from: the export or a checkpoint."""
    if choice == Choice() and (run_dir / "export" / EXPORT_CONFIG).is_file():
        return load_export(run_dir / "export"), "export"
    return checkpoint_draft(run_dir, config, target, choice)


def checkpoint_draft(
    run_dir: Path, config: TrainConfig, target: Target, choice: Choice = Choice()
) -> tuple[DraftModel, str]:
    """Return the draft of the chosen checkpoint, on the CPU, in its dtype, and its name.

    Raises: CheckpointError when there is no such checkpoint, or no average in it.
    """
    path, kind = _chosen(run_dir, choice)
    state = checkpoint.load(path)
    draft = DraftModel(assembly.draft_config(config, target))
    _fill(draft, state, state.weights(kind))
    return draft, path.name if kind == RAW else f"{path.name} {kind}"


def _chosen(run_dir: Path, choice: Choice) -> tuple[Path, str]:
    """Return the directory of the chosen checkpoint, and which of its weights."""
    if choice.best:
        best = Evaluations.read(run_dir).best()
        if best is None:
            raise CheckpointError(
                f"{run_dir} has no evaluation with a checkpoint; evaluation.every_steps makes them;"
                " leave out --best to take the newest checkpoint"
            )
        path = run_dir / "checkpoints" / step_directory(best.step)
        return path, EMA if choice.ema else best.weights
    newest, skipped = latest_complete(run_dir / "checkpoints")
    for one in skipped:
        _print(f"warning: checkpoint {one.path.name} skipped: {one.reason}")
    if newest is None:
        raise CheckpointError(
            f"{run_dir} has no complete checkpoint yet: wait for one, or stop the run, which makes"
            " one"
        )
    return newest, EMA if choice.ema else RAW


@torch.no_grad()
def _fill(draft: DraftModel, state: CheckpointState, weights: Mapping[str, Tensor]) -> None:
    names = dict(draft.named_parameters())
    if names.keys() != weights.keys():
        raise CheckpointError(f"the checkpoint of step {state.step} holds another draft")
    for name, param in names.items():
        param.copy_(weights[name])
    draft.tap_scale.copy_(state.extras["tap_scale"])


class _Progress:
    """Prints a line now and then, never more than one in two seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._last > 2.0:
            self._last = time.monotonic()
            _print(f"{what} {done}/{total}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
