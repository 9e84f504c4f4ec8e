"""What each serving engine requires of an export beyond what all share.

Sources, read in 2026: vLLM model_executor/models/qwen3_dflash.py and its speculators reader, SGLang
srt/models/dflash.py and srt/speculative/dflash_utils.py, speculators 0.9.0, llama.cpp's converter,
z-lab dflash/model_mlx.py.
"""

from collections.abc import Iterator
from typing import Any

from trainer.export import speculators
from trainer.export.files import CONFIG
from trainer.export.findings import FAIL, OK, WARN, Finding
from trainer.export.rules import Rule, Subject
from trainer.export.zlab import block_causality
from trainer.model.masks import SLIDING

_TO_ZLAB = "python -m trainer convert SRC DST --to zlab"
_FULL_CONTEXT_WIDTHS = (64, 128, 256)  # head_dim that every attention backend has
_MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 8
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FLAGS = "is_causal, dflash_config.causal"
# Which of the two flags an engine reads; both hold for every layer at once.
_READS_BOTH, _READS_TOP = ("is_causal", "causal"), ("is_causal",)


def vllm(subject: Subject) -> Iterator[Finding]:
    """Both layouts; aux layers are target_layer_ids + 1."""
    yield from _architecture(subject, "vLLM", {"DFlashDraftModel", "DFlash2DraftModel"})
    yield from _domino(subject, "vLLM has no Domino head: the draft would be served without it")
    yield from _head_dim(subject)
    yield from _last_tap(subject)
    if subject.is_zlab:
        yield from _causality(subject, _READS_BOTH)
        if subject.method.get("use_swa") and SLIDING not in subject.draft.layer_types:
            told = "true makes every layer a sliding one, whatever layer_types says"
            where = f"{CONFIG}: dflash_config.use_swa"
            yield Finding(FAIL, "window", told, where, "remove use_swa", (43,))
    elif subject.raw.get("sliding_window_non_causal"):
        told = "not every version reads it; the others run sliding layers causally"
        where = f"{CONFIG}: sliding_window_non_causal"
        yield Finding(WARN, "causality", told, where, "compare the acceptance length", (43,))
    if len(set(subject.draft.layer_types)) > 1:
        told = "sliding and full layers together need the V2 model runner"
        where = subject.key("layer_types")
        yield Finding(WARN, "window", told, where, "set VLLM_USE_V2_MODEL_RUNNER=1", (43,))
    draft = subject.draft
    size = draft.block_size - (not subject.raw.get("sample_from_anchor", False))
    yield Finding(OK, "serving", f"method dflash, num_speculative_tokens {size}")


def sglang(subject: Subject) -> Iterator[Finding]:
    """The z-lab layout alone; dflash_config wins over the top level."""
    if not subject.is_zlab:
        told = "the nested configuration of speculators is not read"
        where = f"{CONFIG}: transformer_layer_config"
        yield Finding(FAIL, "layout", told, where, _TO_ZLAB, (46, 30))
        return
    known = {"DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel"}
    yield from _architecture(subject, "SGLang", known)
    yield from _last_tap(subject, sglang=True)
    yield from _causality(subject, _READS_TOP)
    method = subject.method
    for one, other in (
        ("conv_kernel_size", "conv_group_size"),
        ("selector_rank", "selector_top_k"),
    ):
        if bool(method.get(one)) != bool(method.get(other)):
            where = f"{CONFIG}: dflash_config.{one}"
            told = f"{method.get(one)} beside {other} {method.get(other)}"
            yield Finding(FAIL, "method", told, where, "write both or neither")
    if method.get("projector_type") == "domino":
        yield from _sglang_domino(method)
    yield Finding(
        OK, "serving", f"DFLASH, --speculative-num-draft-tokens {subject.draft.block_size}"
    )


def speculators_library(subject: Subject) -> Iterator[Finding]:
    """Its own layout; a z-lab directory is looked at as its converter would."""
    if subject.is_zlab:
        refused = speculators.refusals(subject.raw)
        fix = "serve the z-lab directory itself"
        for text in refused:
            key, _, told = text.partition(": ")
            where = f"{CONFIG}: {key}"
            yield Finding(FAIL, "layout", f"not representable: {told}", where, fix, (30,))
        if SLIDING in subject.draft.layer_types:
            yield _own_window(subject)
        if not refused:
            told = "convertible: python -m trainer convert SRC DST --to speculators --target DIR"
            yield Finding(OK, "layout", told)
        return
    yield from _last_tap(subject)
    yield from _proposal(subject)
    if SLIDING in subject.draft.layer_types:
        yield _own_window(subject)


def llamacpp(subject: Subject) -> Iterator[Finding]:
    """convert_hf_to_gguf.py reads the z-lab layout and the target's tokenizer."""
    if not subject.is_zlab:
        told = "the converter knows no speculators configuration"
        yield Finding(FAIL, "layout", told, f"{CONFIG}: speculators_model_type", _TO_ZLAB, (50,))
        return
    yield from _architecture(subject, "the converter", {"DFlashDraftModel"})
    yield from _domino(subject, "a GGUF has no Domino head: the draft would be served without it")
    yield from _causality(subject, ())
    if SLIDING in subject.draft.layer_types:
        told = "older versions ignore the draft's window"
        where = f"{CONFIG}: layer_types"
        yield Finding(WARN, "window", told, where, "compare the acceptance length", (43,))
    if subject.target is None:
        told = "the draft has no tokenizer; the converter takes the target's"
        fix = "convert with --target-model-dir; name the directory here with --target"
        yield Finding(WARN, "tokenizer", told, "--target", fix, (50,))
    elif not any((subject.target.directory / name).is_file() for name in _TOKENIZERS):
        told = f"none of {', '.join(_TOKENIZERS)}"
        where = subject.target.directory.name
        yield Finding(FAIL, "tokenizer", told, where, "copy the target again, whole", (50,))
    else:
        yield Finding(OK, "tokenizer", "the target directory has one, for --target-model-dir")


def mlx(subject: Subject) -> Iterator[Finding]:
    """The z-lab layout, in bf16 as its kernels prefer."""
    if not subject.is_zlab:
        told = "the nested configuration of speculators is not read"
        yield Finding(FAIL, "layout", told, f"{CONFIG}: transformer_layer_config", _TO_ZLAB, (30,))
        return
    yield from _architecture(subject, "MLX", {"DFlashDraftModel", "DFlash2DraftModel"})
    yield from _domino(subject, "MLX has no Domino head: the draft would be served without it")
    yield from _causality(subject, _READS_TOP)
    if subject.draft.dtype != "bfloat16":
        told = f"{subject.draft.dtype} is loaded, but takes twice the memory of bfloat16"
        yield Finding(WARN, "dtype", told, f"{CONFIG}: dtype", "export in bfloat16", (45,))
    else:
        yield Finding(OK, "dtype", "bfloat16")


def tensorrt_llm(subject: Subject) -> Iterator[Finding]:
    """The PyTorch backend reads target_layer_ids from the draft's config.json."""
    if not subject.is_zlab:
        told = "the nested configuration of speculators is not read"
        yield Finding(FAIL, "layout", told, f"{CONFIG}: transformer_layer_config", _TO_ZLAB, (30,))
        return
    yield from _architecture(subject, "TensorRT-LLM", {"DFlashDraftModel"})
    if subject.method.get("projector_type") == "domino":
        told, where = "newer versions alone have it", f"{CONFIG}: dflash_config.projector_type"
        yield Finding(WARN, "method", told, where, "use a version that has the Domino head")
    yield from _last_tap(subject)
    yield from _causality(subject, ())
    yield from _head_dim(subject)


ENGINES: dict[str, Rule] = {
    "vllm": vllm,
    "sglang": sglang,
    "speculators": speculators_library,
    "llamacpp": llamacpp,
    "mlx": mlx,
    "tensorrt-llm": tensorrt_llm,
}


def _architecture(subject: Subject, engine: str, known: set[str]) -> Iterator[Finding]:
    names = list(subject.raw.get("architectures") or [])
    where = f"{CONFIG}: architectures"
    if len(names) != 1 or names[0] not in known:
        told = f"{names}: {engine} has {', '.join(sorted(known))}"
        yield Finding(FAIL, "architecture", told, where, "export as one of these", (30,))
    elif names[0] != "DFlashDraftModel":
        told = f"{names[0]} is known to newer versions of {engine} alone"
        yield Finding(WARN, "architecture", told, where, "use a version that has the class")
    else:
        yield Finding(OK, "architecture", names[0])


def _domino(subject: Subject, told: str) -> Iterator[Finding]:
    if subject.method.get("projector_type") == "domino":
        where = f"{CONFIG}: dflash_config.projector_type"
        yield Finding(FAIL, "method", told, where, "serve it with SGLang")


def _sglang_domino(method: Any) -> Iterator[Finding]:
    wanted = [
        ("shift_label", isinstance(method.get("shift_label"), bool), "true or false"),
        ("pure_draft_prefix_len", method.get("pure_draft_prefix_len") == 1, "1"),
        ("gru_hidden_dim", bool(method.get("gru_hidden_dim")), "the width of the GRU"),
        ("emb_dim", bool(method.get("emb_dim")), "the width of the projection"),
    ]
    for key, good, expected in wanted:
        if not good:
            told = f"{method.get(key)}, a Domino draft needs {expected}"
            yield Finding(FAIL, "method", told, f"{CONFIG}: dflash_config.{key}", "write it", (24,))


def _head_dim(subject: Subject) -> Iterator[Finding]:
    dim, where = subject.draft.head_dim, subject.key("head_dim")
    if dim > _MAX_HEAD_DIM or dim % _HEAD_DIM_STEP:
        told = f"{dim}: attention backends take multiples of 8 up to 256"
        yield Finding(FAIL, "head_dim", told, where, "train with draft.head_dim 128", (40,))
    elif dim not in _FULL_CONTEXT_WIDTHS:
        told = f"{dim}: not every attention backend has it (64, 128 and 256 are everywhere)"
        fix = "choose the backend, or train with draft.head_dim 128"
        yield Finding(WARN, "head_dim", told, where, fix, (40,))
    else:
        yield Finding(OK, "head_dim", f"{dim}: every attention backend has it")


def _last_tap(subject: Subject, *, sglang: bool = False) -> Iterator[Finding]:
    draft = subject.draft
    if draft.target_layer_ids[-1:] != (draft.num_target_layers - 1,):
        return
    last = draft.num_target_layers - 1
    where = f"{CONFIG}: dflash_config.target_layer_ids"
    fix = "train with taps below the last layer (the published rule ends three before)"
    told = f"{last} is the target's last layer: engines capture what enters the layer after a tap"
    if sglang:
        told = f"{last} is the target's last layer: SGLang ends with an IndexError"
    yield Finding(FAIL, "last tap", told, where, fix, (46, 41))


def _causality(subject: Subject, read: tuple[str, ...]) -> Iterator[Finding]:
    """Compare what config.json means with what an engine that reads these flags serves.

    An engine that is not known to read a flag is taken to read none.
    """
    meant = block_causality(subject.raw)
    flags = {"is_causal": subject.raw.get("is_causal"), "causal": subject.method.get("causal")}
    told_values = {value for value in flags.values() if value is not None}
    where = f"{CONFIG}: {_FLAGS}"
    fix = "write both flags alike, or neither where each layer follows its kind; export writes so"
    if len(told_values) > 1:
        told = f"is_causal {flags['is_causal']}, dflash_config.causal {flags['causal']}"
        yield Finding(FAIL, "causality", told, where, fix, (3, 43))
        return
    seen = next((flags[name] for name in read if flags[name] is not None), None)
    served = {kind: kind == SLIDING if seen is None else bool(seen) for kind in meant}
    told = ", ".join(
        f"{kind} {'causal' if causal else 'bidirectional'}" for kind, causal in served.items()
    )
    default = {kind: kind == SLIDING for kind in meant}
    if served != meant:
        told = f"in a block this engine runs {told}; config.json means otherwise"
        yield Finding(FAIL, "causality", told, where, fix, (3, 43))
    elif meant != default:
        told = f"in a block: {told}; versions that read no flag run each layer by its kind"
        yield Finding(WARN, "causality", told, where, "compare the acceptance length", (3, 43))
    else:
        yield Finding(OK, "causality", f"in a block: {told}")


def _own_window(subject: Subject) -> Finding:
    """Warn of the library's own forward: its window ends at the anchor, not at each slot."""
    told = (
        f"trained on in the library itself, every slot sees the {subject.draft.sliding_window} keys"
        " before the anchor; engines and this trainer count from each slot"
    )
    fix = "serve it with vLLM as it is; measure again after training on with the library"
    return Finding(WARN, "window", told, subject.key("sliding_window"), fix, (43,))


def _proposal(subject: Subject) -> Iterator[Finding]:
    raw, where = subject.raw, f"{CONFIG}: speculators_config"
    held = raw.get("speculators_config") or {}
    methods = {m.get("proposal_type"): m for m in held.get("proposal_methods") or []}
    chosen = methods.get(held.get("default_proposal_method"))
    tokens = subject.draft.block_size - (not raw.get("sample_from_anchor", False))
    if chosen is None:
        told = f"default_proposal_method {held.get('default_proposal_method')!r} is no method"
        yield Finding(FAIL, "proposal", told, where, "name one of proposal_methods", (30,))
    elif chosen.get("speculative_tokens") != tokens:
        told = f"speculative_tokens {chosen.get('speculative_tokens')}, the block drafts {tokens}"
        fix = f"write {tokens}: the block size, less the anchor unless it is sampled from"
        yield Finding(FAIL, "proposal", told, f"{where}.proposal_methods", fix, (24, 46))
    else:
        yield Finding(OK, "proposal", f"{tokens} tokens a block")
    name = str((held.get("verifier") or {}).get("name_or_path") or "")
    if not name or name.startswith(("/", ".", "~")):
        told = f"{name or 'no name'}: readers load the target by it, on any machine"
        fix = "convert with --verifier and the target's hub id"
        yield Finding(WARN, "verifier", told, f"{where}.verifier.name_or_path", fix)
    else:
        yield Finding(OK, "verifier", name)
