"""Rules that every engine has: files, tensors, dtype, taps, blocks, windows, rope."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.export import speculators
from trainer.export.files import CARD, CONFIG, TensorFiles
from trainer.export.findings import FAIL, OK, WARN, Finding
from trainer.export.target_files import TargetFiles
from trainer.export.zlab import name_problems, tensor_problem, tensor_shapes
from trainer.model.draft import DraftConfig
from trainer.model.masks import FULL, SLIDING

LICENSE_TO_SET = "set-a-license"  # what the model card holds until its owner chooses
_DTYPES = ("bfloat16", "float32")
_MIB = 1 << 20


@dataclass(frozen=True)
class Subject:
    """An opened export. raw: its config.json; draft: what that describes."""

    directory: Path
    raw: Mapping[str, Any]
    layout: str
    draft: DraftConfig
    target: TargetFiles | None

    @cached_property
    def files(self) -> TensorFiles:
        """The tensors' headers."""
        return TensorFiles(self.directory)

    @property
    def is_zlab(self) -> bool:
        """Whether the directory is in the z-lab layout."""
        return self.layout == "zlab"

    @property
    def method(self) -> Mapping[str, Any]:
        """dflash_config; empty in the speculators layout."""
        held: Mapping[str, Any] = self.raw.get("dflash_config") or {}
        return held

    @property
    def layers(self) -> Mapping[str, Any]:
        """The keys of the transformer layers."""
        held: Mapping[str, Any] = self.raw if self.is_zlab else self.raw["transformer_layer_config"]
        return held

    def key(self, name: str) -> str:
        """Return where a key of the transformer layers stands."""
        return f"{CONFIG}: {name if self.is_zlab else f'transformer_layer_config.{name}'}"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that must be there."""
        return tensor_shapes(self.draft)

    def beside(self) -> dict[str, tuple[int, ...]]:
        """Return what the speculators layout may hold beside them."""
        if self.is_zlab:
            return {}
        draft, rows = self.draft, int(self.raw["draft_vocab_size"])
        whole, head = (draft.vocab_size, draft.hidden_size), (rows, draft.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {
            speculators.EMBEDDING: whole,
            speculators.HEAD: head,
            "verifier_lm_head.weight": head,
            "verifier_norm.weight": (draft.hidden_size,),
            speculators.TO_DRAFT: (draft.vocab_size,),
            speculators.TO_TARGET: (rows,),
        }
        return shapes


Rule = Callable[[Subject], Iterator[Finding]]


def files_rule(subject: Subject) -> Iterator[Finding]:
    """Files open, shards are those of the index, sizes sum up."""
    files = subject.files
    for problem in files.problems:
        fix = "copy the export again, whole"
        yield Finding(FAIL, "files", problem.what, problem.where, fix, (50,))
    if not files.problems:
        shards = len({info.file for info in files.infos.values()})
        size = sum(info.num_bytes for info in files.infos.values()) / _MIB
        yield Finding(OK, "files", f"{shards} files of weights, {size:.1f} MiB, whole")


def tensors_rule(subject: Subject) -> Iterator[Finding]:
    """Exactly the tensors of the layout, each of its shape."""
    wanted, infos = subject.tensors(), subject.files.infos
    body = {name: info for name, info in infos.items() if name not in subject.beside()}
    fix = "export the draft again; a renamed or missing tensor is not loaded, and nothing says so"
    problems = name_problems(body, wanted)
    for problem in problems:
        yield Finding(FAIL, "tensors", problem.what, problem.where, fix, (50,))
    shapes = wanted | {n: s for n, s in subject.beside().items() if n in infos}
    wrong = [n for n in sorted(shapes.keys() & infos) if infos[n].shape != shapes[n]]
    for name in wrong:
        text = f"is {list(infos[name].shape)}, config.json makes it {list(shapes[name])}"
        yield Finding(FAIL, "tensors", text, f"{infos[name].file}: {name}", fix, (42,))
    if not problems and not wrong:
        yield Finding(OK, "tensors", f"{len(infos)} tensors, names and shapes as config.json says")


def values_rule(subject: Subject) -> Iterator[Finding]:
    """One dtype, the one config.json names, and no NaN or infinity."""
    dtype = subject.draft.dtype
    if dtype not in _DTYPES:
        text = f"{dtype}: a draft in fp16 overflows in the fused features and nothing is accepted"
        fix = "export in bfloat16 or float32 (draft.dtype)"
        yield Finding(FAIL, "dtype", text, f"{CONFIG}: dtype", fix, (45,))
    wrong = 0
    mappings = (speculators.TO_DRAFT, speculators.TO_TARGET)
    for name, info in sorted(subject.files.infos.items()):
        if name in mappings:
            continue
        found = tensor_problem(subject.files.read(name), info.shape, dtype)
        if found:
            wrong += 1
            fix = "write the tensors in the dtype that config.json names, from finite weights"
            yield Finding(FAIL, "values", found, f"{info.file}: {name}", fix, (16, 36))
    if not wrong and subject.files.infos:
        yield Finding(OK, "values", f"every tensor is {dtype}, as config.json says, and finite")


def taps_rule(subject: Subject) -> Iterator[Finding]:
    """Layer ids ascend, exist, and are as many as fc has inputs."""
    draft, infos = subject.draft, subject.files.infos
    ids, last = list(draft.target_layer_ids), draft.num_target_layers - 1
    name, add = (
        ("dflash_config.target_layer_ids", 0)
        if subject.is_zlab
        else ("aux_hidden_state_layer_ids", 1)
    )
    where = f"{CONFIG}: {name}"
    ascending = ids == sorted(set(ids)) and bool(ids)
    if not ascending or ids[0] < 0 or ids[-1] > last:
        told = f"{[i + add for i in ids]}: expected ascending numbers of {add}..{last + add}"
        fix = "set the layers that were tapped in training, in their order"
        yield Finding(FAIL, "taps", told, where, fix, (22,))
    fc = infos.get("fc.weight")
    columns = len(ids) * draft.hidden_size
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != columns:
        told = f"{len(ids)} taps of {draft.hidden_size} make {columns}, fc has {fc.shape[1]}"
        yield Finding(FAIL, "taps", told, where, "name as many layers as were tapped", (42,))
    elif ascending:
        of_all = f" of {draft.num_target_layers}" if subject.is_zlab else ""
        told = f"{len(ids)} taps, outputs of layers {ids}{of_all}"
        yield Finding(OK, "taps", told)


def block_size_rule(subject: Subject) -> Iterator[Finding]:
    """The block size is told once, or the same in both places."""
    places = {f"{CONFIG}: block_size": subject.raw.get("block_size")}
    if subject.is_zlab:
        places[f"{CONFIG}: dflash_config.block_size"] = subject.method.get("block_size")
    size = subject.draft.block_size
    bad = {where: value for where, value in places.items() if value != size}
    if bad or size < 2:
        where, value = next(iter(bad.items()), (next(iter(places)), size))
        told = f"{value}, the other place says {size}" if bad else f"{size}: nothing to draft"
        fix = "write the trained block size in both places: engines differ in which one they read"
        yield Finding(FAIL, "block size", told, where, fix, (24,))
    else:
        yield Finding(OK, "block size", f"{size}: one anchor and {size - 1} drafted tokens")


def shape_rule(subject: Subject) -> Iterator[Finding]:
    """Heads divide evenly; nothing that engines compute otherwise."""
    draft, layers = subject.draft, subject.layers
    heads, narrow, dim = draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim
    rules = [
        (heads % narrow == 0, "num_attention_heads", f"{heads} is no multiple of {narrow} kv"),
        (dim % 2 == 0, "head_dim", f"{dim}: rotary positions need an even one"),
        (
            layers.get("hidden_act", "silu") == "silu",
            "hidden_act",
            f"{layers.get('hidden_act')!r}: engines compute silu",
        ),
        (
            not layers.get("attention_bias", False),
            "attention_bias",
            "true: the layout has no biases",
        ),
    ]
    for good, key, told in rules:
        if not good:
            fix = "train a draft of a shape that engines run"
            yield Finding(FAIL, "shape", told, subject.key(key), fix, (40,))
    if all(good for good, _, _ in rules):
        yield Finding(OK, "shape", f"{heads} heads, {narrow} of keys and values, {dim} wide")


def window_rule(subject: Subject) -> Iterator[Finding]:
    """Sliding layers have one window, and it is switched on."""
    draft, layers, where = subject.draft, subject.layers, subject.key("sliding_window")
    kinds = draft.layer_types
    if len(kinds) != draft.num_draft_layers or not set(kinds) <= {FULL, SLIDING}:
        told = f"{list(kinds)}: expected {draft.num_draft_layers} times {FULL} or {SLIDING}"
        yield Finding(FAIL, "window", told, subject.key("layer_types"), "name each layer", (43,))
        return
    if SLIDING not in kinds:
        yield Finding(OK, "window", "every layer sees the whole context")
        return
    window = layers.get("sliding_window")
    told_twice = subject.method.get("swa_window_size", window)
    fix = "write the trained window where each engine looks for it"
    if not window or told_twice != window:
        told = f"sliding_window {window}, dflash_config.swa_window_size {told_twice}"
        yield Finding(FAIL, "window", told, where, fix, (43,))
    elif not layers.get("use_sliding_window", False):
        told = "use_sliding_window is false: transformers' Qwen3 clears the window on reading"
        yield Finding(FAIL, "window", told, subject.key("use_sliding_window"), fix, (43,))
    elif window < draft.block_size:
        told = f"{window} is below the block size {draft.block_size}"
        yield Finding(FAIL, "window", told, where, "train with a window of at least a block", (43,))
    else:
        count = kinds.count(SLIDING)
        yield Finding(OK, "window", f"{window} keys in {count} of {len(kinds)} layers")


def rope_rule(subject: Subject) -> Iterator[Finding]:
    """Theta is the same wherever a reader looks, and the target's."""
    layers, theta = subject.layers, subject.draft.rope_theta
    held = layers.get("rope_parameters") or {}
    fix = f"write rope_theta {theta:g} at both places"
    for key, value in (
        ("rope_theta", layers.get("rope_theta")),
        ("rope_parameters.rope_theta", held.get("rope_theta")),
    ):
        if value is None and subject.is_zlab:
            told = "is not there; some readers look here and take a default otherwise"
            yield Finding(FAIL, "rope", told, subject.key(key), fix, (25,))
        elif value is not None and value != theta:
            told = f"{value:g}, elsewhere {theta:g}"
            yield Finding(FAIL, "rope", told, subject.key(key), fix, (25,))
    scaled = layers.get("rope_scaling") or held.get("rope_type", "default") != "default"
    if scaled:
        told = f"{layers.get('rope_scaling') or held}: drafts are trained with plain positions"
        fix = "leave rope_scaling null"
        yield Finding(FAIL, "rope", told, subject.key("rope_scaling"), fix, (40,))
    elif layers.get("rope_theta", theta) == held.get("rope_theta", theta) == theta:
        yield Finding(OK, "rope", f"theta {theta:g}, plain positions")


def card_rule(subject: Subject) -> Iterator[Finding]:
    """The model card is there and its owner has chosen a license."""
    path = subject.directory / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    if text is None:
        fix = "python -m trainer export --run-dir DIR writes one"
        yield Finding(WARN, "card", "there is no model card", CARD, fix, (52,))
    elif LICENSE_TO_SET in text:
        told = "no license is chosen; without one nobody may use the weights"
        fix = f"replace {LICENSE_TO_SET} by the license's identifier"
        yield Finding(WARN, "card", told, f"{CARD}: license", fix)
    else:
        yield Finding(OK, "card", f"{CARD} is there")


RULES: tuple[Rule, ...] = (
    files_rule,
    tensors_rule,
    values_rule,
    taps_rule,
    block_size_rule,
    shape_rule,
    window_rule,
    rope_rule,
    card_rule,
)
