"""The model card (README.md) of an export: what was measured, how it was trained, how to serve it.

Every figure comes from the run's own records; a fact that no record holds is said to be absent.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.config import TrainConfig
from trainer.contract.durable import write_by_rename
from trainer.contract.errors import ManifestError
from trainer.contract.events import Event, EventDecoder
from trainer.contract.exit_record import ExitRecord
from trainer.contract.manifest import Manifest
from trainer.export.files import CARD, CONFIG, read_json
from trainer.export.rules import LICENSE_TO_SET
from trainer.export.zlab import draft_config, target_name
from trainer.model.draft import DraftConfig
from trainer.model.masks import SLIDING

ABSENT = "not recorded"
_ABOUT = """A block-diffusion draft model for speculative decoding (DFlash, arXiv 2602.06036). It
holds neither embedding nor head: both are the target's.
"""
_LICENSE = re.compile(r"^license: *(.+)$", re.MULTILINE)
_WEIGHTS = re.compile(r"^\| weights \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Training:
    """What metrics.jsonl and the exit records tell of all starts of a run.

    seconds: from the first to the last event of each start, added up. last: the newest step event.
    ends: how earlier and later starts ended, oldest first.
    """

    num_starts: int
    seconds: float
    last: Event
    num_samples: int | None
    ends: tuple[str, ...]

    @classmethod
    def read(cls, run_dir: Path) -> "Training":
        """Read the records of a run; a missing file makes everything absent."""
        path = run_dir / "metrics.jsonl"
        data = path.read_bytes() if path.is_file() else b""
        events = list(EventDecoder(lenient=True).feed(data + b"\n"))
        starts = list(_starts(events))
        steps = [e for e in events if e["kind"] == "step"]
        samples = [e["samples"] for e in events if isinstance(e.get("samples"), int)]
        return cls(
            num_starts=len(starts),
            seconds=sum(start[-1]["t_unix_s"] - start[0]["t_unix_s"] for start in starts),
            last=steps[-1] if steps else {},
            num_samples=samples[-1] if samples else None,
            ends=tuple(_ends(run_dir)),
        )


@dataclass(frozen=True)
class _Export:
    """What the card is about. weights: the checkpoint; names: what evaluation.json calls them."""

    draft: DraftConfig
    weights: str
    license_id: str
    names: tuple[str, ...]


def describe(run_dir: Path, draft: DraftConfig, weights: str) -> str:
    """Return the card of an export of this run; ``weights`` names the checkpoint it came from.

    Figures of evaluation.json go in only when it measured these weights, and no earlier export.
    Raises: ManifestError or ConfigError when the run's manifest cannot be read.
    """
    export = _Export(draft, weights, _license(run_dir / "export" / CARD), (weights,))
    return _card(run_dir, export)


def refresh(run_dir: Path) -> bool:
    """Write the card of the run's export anew after it was measured; False where there is none.

    The license that its owner chose stays.
    """
    path = run_dir / "export" / CARD
    if not path.is_file():
        return False
    found = _WEIGHTS.search(path.read_text(encoding="utf-8", errors="replace"))
    where = run_dir / "export" / CONFIG
    draft = draft_config(read_json(where), where)
    weights = found[1] if found else ABSENT
    text = _card(run_dir, _Export(draft, weights, _license(path), (weights, "export")))
    write_by_rename(path, text.encode())
    return True


def _card(run_dir: Path, export: _Export) -> str:
    try:
        manifest = Manifest.from_json((run_dir / "manifest.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{run_dir}/manifest.json: {error.strerror}") from error
    config = TrainConfig.from_dict(manifest.config)
    target, draft = target_name(config.target.path), export.draft
    parts = [
        _front_matter(export.license_id, target),
        f"# {draft.variant} drafter for {target}\n",
        _ABOUT,
        "## Measured\n",
        _measured(run_dir, export.names),
        "## Recipe\n",
        _table(_recipe(run_dir, manifest, config, export)),
        "## Serving\n",
        _serving(target, draft),
    ]
    return "\n".join(parts)


def _front_matter(license_id: str, target: str) -> str:
    base = f"base_model: {target}\n" if "/" in target else ""
    tags = "tags: [dflash, speculative-decoding, draft-model]\n"
    return f"---\nlicense: {license_id}\n{base}{tags}---\n"


def _license(path: Path) -> str:
    """Return the license that stands in an older card, else the one to set."""
    if not path.is_file():
        return LICENSE_TO_SET
    found = _LICENSE.search(path.read_text(encoding="utf-8", errors="replace"))
    return found[1].strip() if found else LICENSE_TO_SET


def _starts(events: list[Event]) -> Iterator[list[Event]]:
    """Yield the events of each start of the process; a start begins by reading the data."""
    start: list[Event] = []
    for event in events:
        if event["kind"] == "phase" and event.get("phase") == "data" and start:
            yield start
            start = []
        start.append(event)
    if start:
        yield start


def _ends(run_dir: Path) -> Iterator[str]:
    def number(path: Path) -> int:
        digits = path.stem.removeprefix("exit_")
        return int(digits) if digits.isdigit() else 1 << 30  # exit.json is the newest

    for path in sorted(run_dir.glob("exit*.json"), key=number):
        try:
            yield ExitRecord.from_json(path.read_text(encoding="utf-8")).state
        except (ManifestError, OSError):
            yield "unreadable exit record"


def _measured(run_dir: Path, names: tuple[str, ...]) -> str:
    path = run_dir / "evaluation.json"
    if not path.is_file():
        return "Nothing was measured yet: `python -m trainer evaluate` writes these figures.\n"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["draft"] not in names:
            other = "an earlier export" if found["draft"] == "export" else found["draft"]
            return (
                f"evaluation.json measured {other}, not these weights;"
                " `python -m trainer evaluate` measures these.\n"
            )
        return _figures(found)
    except (ValueError, KeyError, TypeError) as error:
        return f"evaluation.json cannot be read ({error!r}).\n"


def _figures(found: dict[str, Any]) -> str:
    low, high = found["acceptance_length_interval"]
    speed_up = found["speed_up"]
    told = "none claimed: outputs differ" if speed_up is None else f"{speed_up:.2f}"
    rows = [
        ("acceptance length", f"{found['acceptance_length']:.2f} (95 %: {low:.2f} to {high:.2f})"),
        ("accepted, by position", " ".join(f"{share:.2f}" for share in found["by_position"])),
        ("lossless", "yes" if found["lossless"] else "no"),
        ("equal to plain greedy decoding", f"{found['num_equal']} of {found['num_prompts']}"),
        ("speed-up, on the machine that measured", told),
        ("prompts", f"{found['num_prompts']}, sha256 {found['prompts_sha256']}"),
        ("new tokens at most", str(found["max_new_tokens"])),
        ("dtype of the target", found["target_dtype"]),
    ]
    text = (
        "Acceptance length: mean tokens a verify call emits (accepted + 1), by greedy decoding of"
        " held-out prompts with the real target.\n"
    )
    return f"{text}\n{_table(rows)}"


def _recipe(
    run_dir: Path, manifest: Manifest, config: TrainConfig, export: _Export
) -> list[tuple[str, str]]:
    training, optim, draft = Training.read(run_dir), config.optim, export.draft
    last = training.last
    packages = ", ".join(f"{n} {v}" for n, v in sorted(manifest.packages.items()))
    commit = (manifest.git_commit or ABSENT)[:12] + (", changed" if manifest.git_dirty else "")
    ended = f" (ended: {', '.join(training.ends)})" if training.ends else ""
    lr = f"{optim.lr:g}" if optim.adamw_lr is None else f"{optim.lr:g} and {optim.adamw_lr:g}"
    return [
        ("weights", export.weights),
        ("target", target_name(config.target.path)),
        ("target revision", manifest.target_revision),
        ("data, sha256", manifest.dataset_sha256),
        ("samples", _told(training.num_samples)),
        ("tokens trained on", _told(last.get("tokens_total"))),
        ("blocks trained on", _told(last.get("anchors_total"))),
        ("steps", f"{_told(last.get('step'))} of {_told(last.get('num_steps'))}"),
        ("epochs", f"{optim.epochs:g} planned, the last step was in epoch {_epoch(last)}"),
        ("optimiser", f"{optim.name}, lr {lr}, cosine after {optim.warmup_frac:g} of the steps"),
        ("weight decay, clip", f"{optim.weight_decay:g}, {optim.clip_norm:g}"),
        ("loss", _loss(config)),
        ("draft", _shape(draft)),
        ("taps", f"outputs of layers {list(draft.target_layer_ids)} of {draft.num_target_layers}"),
        ("dtype", f"draft {draft.dtype}, target {config.target.dtype}"),
        ("max length", f"{config.data.max_length} tokens"),
        ("hours", _hours(training) + ended),
        ("hardware", _hardware(manifest)),
        ("seed", str(manifest.seed)),
        ("versions", f"{packages}; trainer {manifest.release[:12]}, commit {commit}"),
    ]


def _told(value: Any) -> str:
    return ABSENT if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _epoch(last: Event) -> str:
    epoch = last.get("epoch")
    return ABSENT if epoch is None else f"{epoch + 1 if isinstance(epoch, int) else epoch}"


def _hours(training: Training) -> str:
    if not training.num_starts:
        return ABSENT
    hours, starts = training.seconds / 3600, training.num_starts
    return f"{hours:.3g} of wall clock in {starts} start{'s' if starts > 1 else ''}"


def _hardware(manifest: Manifest) -> str:
    roles = []
    for role in ("target", "drafter"):
        gpus = manifest.devices(role)
        names = sorted({gpu.name or "CPU" for gpu in gpus})
        roles.append(f"{role}: {len(gpus)} x {' / '.join(names)}" if gpus else f"{role}: {ABSENT}")
    return ", ".join(roles)


def _loss(config: TrainConfig) -> str:
    if config.loss.name == "decay":
        return f"cross-entropy, position decay gamma {config.position_decay:g}"
    return f"cross-entropy, {config.loss.name} with alpha {config.loss.dpace_alpha:g}"


def _shape(draft: DraftConfig) -> str:
    sliding = draft.layer_types.count(SLIDING)
    window = f", {sliding} of them sliding over {draft.sliding_window} tokens" if sliding else ""
    return (
        f"{draft.variant}, {draft.num_draft_layers} layers{window}, width {draft.hidden_size},"
        f" {draft.num_attention_heads}/{draft.num_key_value_heads} heads of {draft.head_dim}, block"
        f" size {draft.block_size}, mask token {draft.mask_token_id}"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines) + "\n"


def _serving(target: str, draft: DraftConfig) -> str:
    size = draft.block_size
    mixed = len(set(draft.layer_types)) > 1
    settings = '"method": "dflash", "model": "DIRECTORY"'
    vllm = (
        f"{'VLLM_USE_V2_MODEL_RUNNER=1 ' if mixed else ''}vllm serve {target} \\\n"
        f"  --speculative-config '{{{settings}, \"num_speculative_tokens\": {size - 1}}}'\n"
    )
    if draft.variant == "domino":
        vllm = "vLLM has no Domino head; it would serve this draft without it.\n"
    sglang = (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        "  --speculative-algorithm DFLASH --speculative-draft-model-path DIRECTORY \\\n"
        f"  --speculative-num-draft-tokens {size}\n"
    )
    told = (
        "DIRECTORY is this one. `python -m trainer validate DIRECTORY` applies the engines' rules."
    )
    return f"{told} No engine was run for this card.\n\n```\n{vllm}```\n\n```\n{sglang}```\n"
