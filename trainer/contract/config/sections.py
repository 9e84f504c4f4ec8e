"""The sections of the training configuration: every setting, what it means and its default."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

# Published with the method for these block sizes; others must be set (arXiv 2602.06036).
POSITION_DECAY = {8: 4.0, 10: 5.0, 16: 7.0}
VARIANTS = ("dflash", "dflash2", "domino")  # each a module of trainer.model.variants
LOSSES = ("decay", "dpace")
HEAD_FP8 = ("off", "logits", "both")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen large model.

    path: directory in the container or hub id. revision: hub revision. dtype: float32 or bfloat16.
    cache_bytes: host memory for hidden states of samples already seen (0: none). batching: how a
    forward joins documents: rows (right-padded, of similar length), packed (one row, refused when
    a self-test at the start finds a leak) or auto (packed where every layer is full attention and
    the self-test passes, else rows). forward_tokens: tokens of one forward, padding included.
    compile: compiled layers, always in one row: auto (where something is compiled, the layers are
    known and a self-test at the start passes), on (or it is an error) or off. fp8: off, or rows for
    products of compiled layers in FP8 with a scale a row (Ada GPUs and later); taps then differ.
    """

    path: str = ""
    revision: str | None = None
    dtype: str = "bfloat16"
    cache_bytes: int = 0
    batching: str = "auto"
    forward_tokens: int = 32768
    compile: str = "auto"
    fp8: str = "off"


@dataclass(frozen=True)
class DataConfig:
    """Which samples, and how they are laid out.

    path: JSONL of chats in the container, or a directory that trainer prepare made with the same
    max_length. max_length: tokens a sample keeps. token_budget: tokens
    of one micro-batch, padding included. max_batch_size: samples of one micro-batch. packing: True
    lays samples one after another in a single row of token_budget tokens, False gives each its own
    right-padded row. max_anchors: anchors of a row; short rows are padded to those that they have
    room for. row_lengths: without packing, the padded lengths that rows may have, ascending; a
    batch then has as many rows as token_budget allows, and these few shapes are all that a compiled
    run warms up and takes. None pads to the longest row.
    """

    path: str = ""
    max_length: int = 3072
    token_budget: int = 49152
    max_batch_size: int = 64
    packing: bool = True
    max_anchors: int = 1024
    row_lengths: tuple[int, ...] | None = None


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
    that exist at one time; None takes as many as 2 GB hold with what is made of them. head_fp8:
    products with the frozen head in FP8 while training (Ada GPUs and later, bfloat16 drafts): off,
    logits (their gradient stays bfloat16) or both; a self-test at the start holds them against
    bfloat16. Evaluation and export use the head as it is.
    """

    name: str = "decay"
    position_decay: float | None = None
    dpace_alpha: float = 0.5
    selector_weight: float = 1.0
    base_decay_frac: float = 0.5
    head_sample: int = 0
    chunk_rows: int | None = None
    head_fp8: str = "off"


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

    mode: auto (on for CUDA, off for CPU), on or off. attention: of the draft where mode is on;
    spans (Triton kernels of our own), flex (flex_attention), or auto: spans where head_dim is a
    power of two from 16 to 256, else flex. gate: on, or off as an experiment that the manifest and
    the events mark. watchdog_s: seconds after which a compile or a worker without progress is
    reported with every thread's stack; limit_s: seconds after which the run ends. A target thread
    that stands still is told and left out before, while another works.

    allow_fallback: what runs uncompiled is a warning and does not end the run.
    force_during_fx_trace, error_on_nested_fx_trace: torch's settings of these names, experiments as
    well. caching_precompile: keep traces and guards on disk too (torch 2.14 and later).
    """

    mode: str = "auto"
    attention: str = "auto"
    gate: str = "on"
    watchdog_s: float = 120.0
    limit_s: float = 1800.0
    allow_fallback: bool = False
    force_during_fx_trace: bool = False
    error_on_nested_fx_trace: bool = True
    caching_precompile: bool = False

    @property
    def experiments(self) -> tuple[str, ...]:
        """Settings under which a run proves nothing of others, as ``compile.gate=off``."""
        found = {
            "compile.gate=off": self.gate == "off",
            "compile.allow_fallback=true": self.allow_fallback,
            "compile.force_during_fx_trace=true": self.force_during_fx_trace,
            "compile.error_on_nested_fx_trace=false": not self.error_on_nested_fx_trace,
        }
        return tuple(name for name, chosen in found.items() if chosen)


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

    device: cuda, or cpu (every GPU role then becomes a thread on the CPU). queue_depth: how many
    batches the target threads may be ahead of the drafters (at least one a drafter), None for as
    many as queue_bytes hold. queue_bytes: of the hidden states that wait, all together; the batch
    needed next is let in in any case.
    cpu_threads: intra-op threads of each worker on a CPU, None leaves torch's choice.
    checkpoint_every_steps and keep_checkpoints rotate; log_every_steps sets how often a step event
    is written. export_weights: what the export at the end holds, the last weights (raw), their
    average (ema) or the best measured (best). log_samples: write which samples each step trained
    on to samples.jsonl.
    """

    device: str = "cuda"
    queue_depth: int | None = 4
    queue_bytes: int = 8_000_000_000
    cpu_threads: int | None = None
    checkpoint_every_steps: int = 500
    keep_checkpoints: int = 3
    log_every_steps: int = 1
    export_at_end: bool = True
    export_weights: str = "raw"
    log_samples: bool = False


@dataclass(frozen=True)
class Sections:
    """All settings; TrainConfig adds their check."""

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
        return POSITION_DECAY[self.draft.block_size] if chosen is None else chosen

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, as the manifest stores them."""
        return asdict(self)
