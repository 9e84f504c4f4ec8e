"""The training configuration: every setting of train.yaml, with its default and its check.

The laptop reads YAML and checks it here before a GPU is taken; the manifest carries the whole
result, and the trainer reads it back with the same code. Standard library only.
"""

import contextlib
import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer.contract.errors import ConfigError

_MAX_EPOCHS = 1e6  # without max_steps every epoch is laid out once, to count its batches
_MAX_CPU_THREADS = 256  # torch starts them all at once; a typo would starve the machine
# Published with the method for these block sizes; others must be set (arXiv 2602.06036).
_POSITION_DECAY = {8: 4.0, 10: 5.0, 16: 7.0}
VARIANTS = ("dflash", "dflash2", "domino")  # each a module of trainer.model.variants
LOSSES = ("decay", "dpace")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen large model.

    path: directory in the container or hub id. revision: hub revision. dtype: float32 or bfloat16.
    cache_bytes: host memory for hidden states of samples already seen (0: none). batching: how a
    forward joins documents: rows (right-padded, of similar length), packed (one row, refused when
    a self-test at the start finds a leak) or auto (packed where every layer is full attention and
    the self-test passes, else rows). forward_tokens: tokens of one forward, padding included.
    """

    path: str = ""
    revision: str | None = None
    dtype: str = "bfloat16"
    cache_bytes: int = 0
    batching: str = "auto"
    forward_tokens: int = 32768


@dataclass(frozen=True)
class DataConfig:
    """Which samples, and how they are laid out.

    path: JSONL of chats in the container, or a directory that trainer prepare made with the same
    max_length. max_length: tokens a sample keeps. token_budget: tokens
    of one micro-batch, padding included. max_batch_size: samples of one micro-batch. packing: True
    lays samples one after another in a single row of token_budget tokens, False gives each its own
    right-padded row. max_anchors: anchors of a row.
    """

    path: str = ""
    max_length: int = 3072
    token_budget: int = 49152
    max_batch_size: int = 64
    packing: bool = True
    max_anchors: int = 1024


@dataclass(frozen=True)
class DraftModelConfig:
    """The draft network; None takes the value of the target's text configuration.

    target_layer_ids: 0-based layers whose output is tapped; None applies the published formula to
    num_taps. mask_token_id: an embedding row that never occurs in data. layer_types: per layer
    full_attention or sliding_attention; None is full everywhere. causal: True lets a slot see only
    itself and earlier slots of its block; engines run sliding layers so in any case, unless
    sliding_window_non_causal says otherwise. normalise_taps: divide each tap by its own RMS,
    measured once on the first samples; folded into fc on export.

    variant: dflash; dflash2 (conv_group_size: channels that share a kernel; selector_rank and
    selector_top_k: width of the codebooks, candidates of a slot; the published ones have sliding
    layers that are not causal); domino (gru_hidden_dim: state over the block's earlier tokens;
    emb_dim: rank of the correction of the logits).
    """

    num_draft_layers: int = 5
    block_size: int = 16
    mask_token_id: int = -1
    target_layer_ids: tuple[int, ...] | None = None
    num_taps: int = 5
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    causal: bool = False
    sliding_window_non_causal: bool = False
    normalise_taps: bool = False
    dtype: str = "bfloat16"
    variant: str = "dflash"
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    gru_hidden_dim: int = 1024
    emb_dim: int = 256


@dataclass(frozen=True)
class LossConfig:
    """Weighted cross-entropy of the drafted slots.

    name: decay weighs slot k by exp(-(k - 1) / position_decay), where None takes the published
    value of the block size; dpace weighs it by the draft's own confidence in the slots up to it,
    smoothed by dpace_alpha (arXiv 2605.18810). selector_weight: share of dflash2's selector loss.
    base_decay_frac: part of the steps over which domino's weight of the uncorrected logits falls
    from 1 to 0. head_sample: 0 uses the whole head; n uses the rows of the batch's labels and n
    random ones (training only, evaluation always uses the whole head). chunk_rows: rows of logits
    that exist at one time.
    """

    name: str = "decay"
    position_decay: float | None = None
    dpace_alpha: float = 0.5
    selector_weight: float = 1.0
    base_decay_frac: float = 0.5
    head_sample: int = 0
    chunk_rows: int = 2048


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule: cosine from lr to lr * min_lr_frac after a linear warm-up.

    name: adamw, or muon for the matrices of the layers with adamw (adamw_lr) for the rest.
    ema_decay: of an fp32 average of the weights, kept beside them (0.999, say); None keeps none.
    """

    name: str = "adamw"
    lr: float = 6e-4
    adamw_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_frac: float = 0.04
    min_lr_frac: float = 0.0
    clip_norm: float = 1.0
    grad_accumulation: int = 1
    epochs: float = 6.0
    max_steps: int | None = None
    ema_decay: float | None = None


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile and its gate.

    mode: auto (on for CUDA, off for CPU), on or off. gate: on, or off as an experiment that the
    manifest and the events mark. watchdog_s: seconds after which a compile or a worker without
    progress is reported with every thread's stack; limit_s: seconds after which the run ends.
    """

    mode: str = "auto"
    gate: str = "on"
    watchdog_s: float = 120.0
    limit_s: float = 1800.0


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy speculative decoding of held-out prompts while the run trains.

    every_steps: None never does it; the last step is then measured as well. prompts: JSONL files of
    chats in the container by the name of the data set; one path alone is named after its file.
    num_prompts: of each data set, the first ones. The checkpoint with the best acceptance length
    is kept beside the newest.
    """

    every_steps: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    num_prompts: int = 32
    max_new_tokens: int = 128


@dataclass(frozen=True)
class RunConfig:
    """How the process behaves.

    device: cuda, or cpu (every GPU role then becomes a thread on the CPU). queue_depth: batches of
    hidden states between target and drafter threads. cpu_threads: intra-op threads of each worker
    on a CPU, None leaves torch's choice. checkpoint_every_steps and keep_checkpoints rotate;
    log_every_steps sets how often a step event is written. export_weights: what the export at the
    end holds, the last weights (raw), their average (ema) or the best measured (best). log_samples:
    write which samples each step trained on to samples.jsonl.
    """

    device: str = "cuda"
    queue_depth: int = 4
    cpu_threads: int | None = None
    checkpoint_every_steps: int = 500
    keep_checkpoints: int = 3
    log_every_steps: int = 1
    export_at_end: bool = True
    export_weights: str = "raw"
    log_samples: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """The whole training configuration; see the sections for each field."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    draft: DraftModelConfig = field(default_factory=DraftModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0

    @property
    def position_decay(self) -> float:
        """Gamma of the decay loss, from the configuration or the published table; else inf."""
        if self.loss.name != "decay":
            return math.inf
        chosen = self.loss.position_decay
        return _POSITION_DECAY[self.draft.block_size] if chosen is None else chosen

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, as the manifest stores them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "TrainConfig":
        """Check and build a configuration.

        Raises: ConfigError naming the dotted key, what was found and what was expected; unknown
        keys get a "did you mean".
        """
        config: TrainConfig = _build(cls, raw, "")
        _check(config)
        return config


def with_override(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``raw`` with the dotted ``key`` set; raises ConfigError."""
    head, _, rest = key.partition(".")
    if not head or (rest == "" and key.endswith(".")):
        raise ConfigError(f"{key!r} is not a dotted key such as optim.lr")
    copy = dict(raw)
    if not rest:
        copy[head] = value
        return copy
    inner = copy.get(head, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{head} is a value, not a section; it has no key {rest}")
    copy[head] = with_override(dict(inner), rest, value)
    return copy


def _build(kind: type[Any], raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'the configuration'}: expected a mapping, got {raw!r}")
    hints, known = get_type_hints(kind), [f.name for f in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"{dotted}: unknown key{hint}")
        values[key] = _convert(hints[key], value, dotted)
    return kind(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, path)
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(h for h in get_args(hint) if h is not type(None))
    if get_origin(hint) is dict:
        return _paths(value, path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        arms = get_args(hint)
        if arms[-1] is not Ellipsis and len(arms) != len(value):
            raise ConfigError(f"{path}: expected {len(arms)} values, got {value!r}")
        return tuple(_convert(arms[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 6e-4 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value!r}")
    return value


def _paths(value: Any, path: str) -> dict[str, str]:
    """Return files by name; a single path is named after its file."""
    if isinstance(value, str):
        return {PurePosixPath(value).stem: value} if value else {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a path, or paths by name, got {value!r}")
    for name, file in value.items():
        if not isinstance(name, str) or not isinstance(file, str) or not (name and file):
            raise ConfigError(f"{path}.{name}: expected a path, got {file!r}")
    return dict(value)


_Rule = tuple[bool, str, Any, str]  # whether it holds, the key, what was found, what is expected


def _check(config: TrainConfig) -> None:
    """Apply the rules that need no model; each names its key."""
    rules = [
        *_input_rules(config.target, config.data),
        *_draft_rules(config.draft, config.loss),
        *_optim_rules(config.optim),
        *_run_rules(config.run, config.compile),
        *_evaluation_rules(config.evaluation),
        (0 <= config.seed < 1 << 63, "seed", config.seed, "0 to 2**63 - 1"),
    ]
    for good, key, found, expected in rules:
        if not good:
            raise ConfigError(f"{key}: expected {expected}, got {found!r}")
    _check_choices(config)
    _check_draft(config)


def _at_least(key: str, found: float | None, least: float) -> _Rule:
    """Return the rule that a value, where given, is not below ``least``."""
    return found is None or found >= least, key, found, f"at least {least}"


def _positive(key: str, found: float | None) -> _Rule:
    return found is None or found > 0, key, found, "above 0"


def _input_rules(target: TargetConfig, data: DataConfig) -> list[_Rule]:
    return [
        (bool(target.path), "target.path", target.path, "the target's directory"),
        _at_least("target.cache_bytes", target.cache_bytes, 0),
        _at_least("target.forward_tokens", target.forward_tokens, 1),
        (bool(data.path), "data.path", data.path, "a JSONL file of chats or prepared shards"),
        _at_least("data.max_length", data.max_length, 2),
        _at_least("data.max_batch_size", data.max_batch_size, 1),
        _at_least("data.max_anchors", data.max_anchors, 1),
        (
            data.token_budget >= data.max_length,
            "data.token_budget",
            data.token_budget,
            f"at least data.max_length ({data.max_length})",
        ),
    ]


def _draft_rules(draft: DraftModelConfig, loss: LossConfig) -> list[_Rule]:
    return [
        (draft.mask_token_id >= 0, "draft.mask_token_id", draft.mask_token_id, "an embedding row"),
        _at_least("draft.block_size", draft.block_size, 2),
        _at_least("draft.num_draft_layers", draft.num_draft_layers, 1),
        _at_least("draft.num_taps", draft.num_taps, 1),
        _at_least("draft.intermediate_size", draft.intermediate_size, 1),
        _at_least("draft.num_attention_heads", draft.num_attention_heads, 1),
        _at_least("draft.num_key_value_heads", draft.num_key_value_heads, 1),
        _at_least("draft.head_dim", draft.head_dim, 1),
        _at_least("draft.sliding_window", draft.sliding_window, 1),
        _at_least("draft.conv_group_size", draft.conv_group_size, 1),
        _at_least("draft.selector_rank", draft.selector_rank, 1),
        _at_least("draft.selector_top_k", draft.selector_top_k, 1),
        _at_least("draft.gru_hidden_dim", draft.gru_hidden_dim, 1),
        _at_least("draft.emb_dim", draft.emb_dim, 1),
        _at_least("loss.head_sample", loss.head_sample, 0),
        _at_least("loss.chunk_rows", loss.chunk_rows, 1),
        _positive("loss.position_decay", loss.position_decay),
        (0 <= loss.dpace_alpha <= 1, "loss.dpace_alpha", loss.dpace_alpha, "0 to 1"),
        _at_least("loss.selector_weight", loss.selector_weight, 0),
        (
            0 < loss.base_decay_frac <= 1,
            "loss.base_decay_frac",
            loss.base_decay_frac,
            "above 0, to 1",
        ),
    ]


def _optim_rules(optim: OptimConfig) -> list[_Rule]:
    return [
        _positive("optim.lr", optim.lr),
        _positive("optim.adamw_lr", optim.adamw_lr),
        (all(0 <= beta < 1 for beta in optim.betas), "optim.betas", optim.betas, "0 to below 1"),
        _at_least("optim.weight_decay", optim.weight_decay, 0),
        (0 <= optim.warmup_frac < 1, "optim.warmup_frac", optim.warmup_frac, "0 to below 1"),
        (0 <= optim.min_lr_frac <= 1, "optim.min_lr_frac", optim.min_lr_frac, "0 to 1"),
        _positive("optim.clip_norm", optim.clip_norm),
        _at_least("optim.grad_accumulation", optim.grad_accumulation, 1),
        (
            0 < optim.epochs <= _MAX_EPOCHS,
            "optim.epochs",
            optim.epochs,
            f"above 0, to {_MAX_EPOCHS:g}",
        ),
        _at_least("optim.max_steps", optim.max_steps, 1),
        (
            optim.ema_decay is None or 0 < optim.ema_decay < 1,
            "optim.ema_decay",
            optim.ema_decay,
            "above 0, below 1",
        ),
    ]


def _run_rules(run: RunConfig, compilation: CompileConfig) -> list[_Rule]:
    watchdog_s, limit_s = compilation.watchdog_s, compilation.limit_s
    return [
        _at_least("run.queue_depth", run.queue_depth, 1),
        (
            run.cpu_threads is None or 1 <= run.cpu_threads <= _MAX_CPU_THREADS,
            "run.cpu_threads",
            run.cpu_threads,
            f"1 to {_MAX_CPU_THREADS}",
        ),
        _at_least("run.checkpoint_every_steps", run.checkpoint_every_steps, 1),
        _at_least("run.keep_checkpoints", run.keep_checkpoints, 1),
        _at_least("run.log_every_steps", run.log_every_steps, 1),
        _positive("compile.watchdog_s", watchdog_s),
        (limit_s >= watchdog_s, "compile.limit_s", limit_s, f"at least watchdog_s ({watchdog_s})"),
    ]


def _evaluation_rules(evaluation: EvaluationConfig) -> list[_Rule]:
    return [
        _at_least("evaluation.every_steps", evaluation.every_steps, 1),
        _at_least("evaluation.num_prompts", evaluation.num_prompts, 1),
        _at_least("evaluation.max_new_tokens", evaluation.max_new_tokens, 2),
        (
            evaluation.every_steps is None or bool(evaluation.prompts),
            "evaluation.prompts",
            evaluation.prompts,
            "JSONL files of held-out chats, as evaluation.every_steps is set",
        ),
    ]


def _check_choices(config: TrainConfig) -> None:
    dtypes = ("float32", "bfloat16")  # float16 overflows in the fused features
    choices: list[tuple[str, str, tuple[str, ...]]] = [
        ("target.dtype", config.target.dtype, dtypes),
        ("target.batching", config.target.batching, ("auto", "rows", "packed")),
        ("draft.dtype", config.draft.dtype, dtypes),
        ("draft.variant", config.draft.variant, VARIANTS),
        ("loss.name", config.loss.name, LOSSES),
        ("optim.name", config.optim.name, ("adamw", "muon")),
        ("run.device", config.run.device, ("cuda", "cpu")),
        ("compile.mode", config.compile.mode, ("auto", "on", "off")),
        ("compile.gate", config.compile.gate, ("on", "off")),
        ("run.export_weights", config.run.export_weights, ("raw", "ema", "best")),
    ]
    for key, found, allowed in choices:
        if found not in allowed:
            raise ConfigError(f"{key}: expected one of {', '.join(allowed)}, got {found!r}")
    needs = {
        "ema": ("optim.ema_decay", config.optim.ema_decay),
        "best": ("evaluation.every_steps", config.evaluation.every_steps),
    }
    needed, value = needs.get(config.run.export_weights, ("", 0))
    if value is None:
        raise ConfigError(f"run.export_weights: {config.run.export_weights} needs {needed}; set it")


def _check_draft(config: TrainConfig) -> None:
    draft = config.draft
    decays = config.loss.name == "decay" and config.loss.position_decay is None
    if decays and draft.block_size not in _POSITION_DECAY:
        raise ConfigError(
            "loss.position_decay: no published value for draft.block_size"
            f" {draft.block_size} (there is one for 8, 10 and 16); set it"
        )
    kinds = draft.layer_types
    if kinds is not None:
        if len(kinds) != draft.num_draft_layers:
            raise ConfigError(
                f"draft.layer_types: expected {draft.num_draft_layers} entries, got {len(kinds)}"
            )
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"draft.layer_types: unknown kind {kind!r}")
        if "sliding_attention" in kinds and not draft.sliding_window:
            raise ConfigError("draft.sliding_window: needed by a sliding_attention layer")
    if draft.causal and draft.sliding_window_non_causal:
        raise ConfigError(
            "draft.sliding_window_non_causal: draft.causal makes every layer causal; set one"
        )
    ids = draft.target_layer_ids
    if ids is not None and (list(ids) != sorted(set(ids)) or not ids or ids[0] < 0):
        raise ConfigError(f"draft.target_layer_ids: expected ascending layer numbers, got {ids}")
