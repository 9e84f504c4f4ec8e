"""The rules of the training configuration that need no model; each names its key."""

from typing import Any

from trainer.contract.config.sections import (
    HEAD_FP8,
    LOSSES,
    POSITION_DECAY,
    VARIANTS,
    CompileConfig,
    DataConfig,
    DraftModelConfig,
    EvaluationConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    Sections,
    TargetConfig,
)
from trainer.contract.errors import ConfigError

_MAX_EPOCHS = 1e6  # without max_steps every epoch is laid out once, to count its batches
_MAX_CPU_THREADS = 256  # torch starts them all at once; a typo would starve the machine

_Rule = tuple[bool, str, Any, str]  # whether it holds, the key, what was found, what is expected


def check(config: Sections) -> None:
    """Apply the rules that need no model.

    Raises: ConfigError naming the key, what was expected and what was found.
    """
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
    _check_compiled(config)
    _check_head_fp8(config)
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
        _row_lengths(data),
        (
            data.token_budget >= data.max_length,
            "data.token_budget",
            data.token_budget,
            f"at least data.max_length ({data.max_length})",
        ),
    ]


def _row_lengths(data: DataConfig) -> _Rule:
    lengths = data.row_lengths
    good = lengths is None or (
        list(lengths) == sorted(set(lengths))
        and len(lengths) > 0
        and lengths[0] > 0
        and data.max_length <= lengths[-1] <= data.token_budget
        and not data.packing
    )
    expected = (
        "with data.packing off, ascending lengths of which the last one holds data.max_length"
        f" ({data.max_length}) and fits data.token_budget ({data.token_budget})"
    )
    return good, "data.row_lengths", lengths, expected


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
        _at_least("run.queue_bytes", run.queue_bytes, 0),
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


def _check_choices(config: Sections) -> None:
    dtypes = ("float32", "bfloat16")  # float16 overflows in the fused features
    choices: list[tuple[str, str, tuple[str, ...]]] = [
        ("target.dtype", config.target.dtype, dtypes),
        ("target.batching", config.target.batching, ("auto", "rows", "packed")),
        ("target.compile", config.target.compile, ("auto", "on", "off")),
        ("target.fp8", config.target.fp8, ("off", "rows")),
        ("draft.dtype", config.draft.dtype, dtypes),
        ("draft.variant", config.draft.variant, VARIANTS),
        ("loss.name", config.loss.name, LOSSES),
        ("loss.head_fp8", config.loss.head_fp8, HEAD_FP8),
        ("optim.name", config.optim.name, ("adamw", "muon")),
        ("run.device", config.run.device, ("cuda", "cpu")),
        ("compile.mode", config.compile.mode, ("auto", "on", "off")),
        ("compile.attention", config.compile.attention, ("auto", "spans", "flex")),
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


def _check_compiled(config: Sections) -> None:
    """Refuse what needs compiled code where there is none, before a GPU is taken for it."""
    on_cpu, mode = config.run.device == "cpu", config.compile.mode
    if mode == "on" and on_cpu:
        raise ConfigError(
            "compile.mode: on needs run.device cuda; on the CPU attention is SDPA and there is"
            " nothing to compile"
        )
    against = {
        "run.device is cpu": on_cpu,
        "compile.mode is off": mode == "off",
        "target.compile is off": config.target.compile == "off",
    }
    why = ", ".join(words for words, holds in against.items() if holds)
    if config.target.fp8 != "off" and why:
        raise ConfigError(
            f"target.fp8: {config.target.fp8} needs compiled layers on a GPU, but {why}; set"
            " target.fp8 to off"
        )


def _check_head_fp8(config: Sections) -> None:
    """Refuse what products of the head in FP8 do not go with."""
    chosen = config.loss.head_fp8
    against = {
        "run.device is cpu": config.run.device == "cpu",
        f"draft.dtype is {config.draft.dtype}": config.draft.dtype != "bfloat16",
        "loss.head_sample takes other rows of the head each step": config.loss.head_sample > 0,
    }
    why = ", ".join(words for words, holds in against.items() if holds)
    if chosen != "off" and why:
        raise ConfigError(
            f"loss.head_fp8: {chosen} needs the whole head and a bfloat16 draft on a GPU, but"
            f" {why}; set loss.head_fp8 to off"
        )
    if chosen == "both" and config.draft.variant == "domino":
        raise ConfigError(
            "loss.head_fp8: the correction of draft.variant domino needs the slopes of the logits"
            " in bfloat16; set loss.head_fp8 to logits"
        )


def _check_draft(config: Sections) -> None:
    draft = config.draft
    decays = config.loss.name == "decay" and config.loss.position_decay is None
    if decays and draft.block_size not in POSITION_DECAY:
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
