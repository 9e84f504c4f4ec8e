"""Checks of the target: which layer a tap is, what batching and serving do to it, its head."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache

from trainer import assembly
from trainer.check.findings import FaultFoundError, NotApplicableError
from trainer.check.subject import Subject, make_batch
from trainer.data.packing import Batch, BatchMaker, BatchPlan
from trainer.errors import TargetError
from trainer.learning_rate import Schedule
from trainer.model.attention import SdpaAttention
from trainer.model.batching import settle_batching
from trainer.model.target import Target
from trainer.workers.target import FeatureCache, batch_features

# Difference of features, as a share of their size, that rounding explains: a batch sums in another
# order than a document alone, layer after layer. In fp32 of any token; in bf16 of the mean one,
# because a token whose experts nearly tie may go to another one there.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
_TOKENS = 24
_COPY_AGAIN = "copy the model again, whole"
_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_HEAD_NAMES = ("lm_head.weight", "output.weight", "embed_out.weight")


def target_loads(subject: Subject) -> str:
    """Build or load the target that the other checks look at."""
    target = subject.target
    kind = "miniature of the same class" if subject.fast else "the target itself"
    kinds = ", ".join(sorted(target.layer_kinds))
    return (
        f"{type(target.model).__name__}, {kind}: {target.num_layers} layers ({kinds}),"
        f" {_dtype(target)}, on {target.device}"
    )


def layer_offset(subject: Subject) -> str:
    """Tap l is the output of decoder layer l, before any norm, for the last layer too."""
    target, ids = subject.target, _tokens(subject)
    (found,) = target.document_features([ids])
    outputs, states = layer_outputs(target, ids)
    wanted = torch.cat([outputs[number] for number in target.target_layer_ids], -1)
    if found.shape != wanted.shape:
        raise FaultFoundError(f"taps have shape {list(found.shape)}, expected {list(wanted.shape)}")
    width = wanted.shape[-1] // len(target.target_layer_ids)
    for place, number in enumerate(target.target_layer_ids):
        part = slice(place * width, (place + 1) * width)
        if _error(found[:, part], wanted[:, part]) > TOLERANCE[_dtype(target)]:
            told = _nearest(found[:, part], outputs, states)
            raise FaultFoundError(f"the tap of layer {number} is not its output but {told}")
    told = _agrees_with_hidden_states(target, outputs, states)
    ids_told = ", ".join(map(str, target.target_layer_ids))
    run_ids = ", ".join(map(str, subject.layer_ids))
    which = "" if ids_told == run_ids else f" (the run taps {run_ids})"
    return f"taps {ids_told}{which} are their layers' outputs{told}"


def _agrees_with_hidden_states(target: Target, outputs: list[Tensor], states: Any) -> str:
    """Compare the outputs of the layers with hidden_states, one further on."""
    if not states:
        return "; the model passes no hidden_states on"
    last = target.num_layers - 1
    limit = TOLERANCE[_dtype(target)]
    for number in range(last):
        if _error(outputs[number], states[number + 1][0]) > limit:
            raise FaultFoundError(
                f"the output of layer {number} is not hidden_states[{number + 1}]",
                where=f"{type(target.model).__name__} of the installed transformers",
                fix="this kind of target is not understood; report it with its config.json",
            )
    if last in target.target_layer_ids:
        after_norm = states[last + 1][0]
        if _error(outputs[last], after_norm) <= limit:
            raise FaultFoundError(f"the tap of the last layer ({last}) is taken after the norm")
        return " = hidden_states[l + 1], the last one before the final norm"
    return " = hidden_states[l + 1]"


@torch.no_grad()
def layer_outputs(target: Target, ids: Tensor) -> tuple[list[Tensor], Any]:
    """Return the output of every decoder layer and hidden_states, by hooks of the check's own."""
    decoder = target.model.get_decoder()
    kept: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[number] = (output[0] if isinstance(output, tuple) else output)[0].detach()

        return hook

    layers = list(decoder.layers)[: target.num_layers]
    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        device_ids = ids[None].to(target.device)
        out = target.model(input_ids=device_ids, use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    return [kept[i] for i in range(target.num_layers)], getattr(out, "hidden_states", None)


def _nearest(found: Tensor, outputs: list[Tensor], states: Any) -> str:
    """Say what a wrong tap is most like."""
    places = {f"that of layer {i}": output for i, output in enumerate(outputs)}
    if states:
        places |= {"the embedding": states[0][0], "the output of the final norm": states[-1][0]}
    for shift in (1, -1):
        places |= {
            f"that of layer {i}, {abs(shift)} token {'left' if shift < 0 else 'right'}": torch.roll(
                output, shift, 0
            )
            for i, output in enumerate(outputs)
        }
    name = min(places, key=lambda name: _error(found[1:-1], places[name][1:-1]))
    return name if _error(found[1:-1], places[name][1:-1]) < 0.2 else "no layer's"


def batch_isolation(subject: Subject) -> str:
    """Features in the batch layout of the run equal those of each document alone."""
    target = subject.target
    try:
        settled = settle_batching(target, subject.config.target.batching)
    except TargetError as error:
        where, fix = "train.yaml: target.batching", "set target.batching to rows, or to auto"
        raise FaultFoundError(str(error), where=where, fix=fix) from error
    batch = _run_batch(subject)
    found = batch_features(target, batch, FeatureCache(0))
    documents = batch.document_tokens()
    worst = 0.0
    for document, tokens in zip(batch.documents, documents, strict=True):
        alone, _ = layer_outputs(target, tokens)
        wanted = torch.cat([alone[number] for number in target.target_layer_ids], -1)
        place = found[document.row, document.start : document.start + document.length]
        worst = max(worst, _error(place, wanted))
    limit = TOLERANCE[_dtype(target)]
    told = f"{len(documents)} documents in {batch.input_ids.shape[0]} row(s)"
    if worst > limit:
        raise FaultFoundError(
            f"{told}: features differ by {worst:.2g} of their size from those of the documents"
            f" alone, {_dtype(target)} allows {limit:g}"
        )
    moved = _leak(target, batch, found)
    if moved > limit:
        raise FaultFoundError(
            f"{told}: other tokens in one document move the features of another by {moved:.2g}"
        )
    kernels = ", ".join(f"{name} {how}" for name, how in sorted(settled.kernels.items()))
    return (
        f"{told} as {settled.batching}: within {worst:.1g} of each alone ({_dtype(target)} allows"
        f" {limit:g}; {kernels})"
    )


def _run_batch(subject: Subject) -> Batch:
    """Return a batch in the run's layout: its own in the full check, of short chats in the fast."""
    if subject.fast:
        return make_batch(subject.short_samples, subject.config)
    data, config = subject.data, subject.config
    return BatchMaker(data, BatchPlan(data.lengths, config.data, config.seed), config).make(0)


def _leak(target: Target, batch: Batch, before: Tensor) -> float:
    """Change the first document; return by how much any other one moves."""
    if len(batch.documents) == 1:
        return 0.0
    first, *others = batch.documents
    ids = batch.input_ids.clone()
    part = ids[first.row, first.start : first.start + first.length]
    ids[first.row, first.start : first.start + first.length] = part.flip(0)
    changed = Batch(**vars(batch) | {"input_ids": ids})
    after = batch_features(target, changed, FeatureCache(0))
    places = [(d.row, slice(d.start, d.start + d.length)) for d in others]
    return max(_error(after[place], before[place]) for place in places)


def serve_features(subject: Subject) -> str:
    """Taps made while decoding, piece by piece with a cache, are those made for training."""
    target, ids = subject.target, _tokens(subject)
    (trained,) = target.document_features([ids])
    cache = DynamicCache(config=target.model.config)
    device_ids = ids[None].to(target.device)
    cuts = [0, len(ids) // 2, len(ids) // 2 + 1, len(ids)]
    parts = [target.verify(device_ids[:, a:b], cache)[1][0] for a, b in itertools.pairwise(cuts)]
    error, limit = _error(torch.cat(parts), trained), TOLERANCE[_dtype(target)]
    if error > limit:
        raise FaultFoundError(
            f"taps of {len(ids)} tokens decoded in 3 pieces differ by {error:.2g} of their size"
            f" from those of the training forward, {_dtype(target)} allows {limit:g}"
        )
    return f"taps of {len(ids)} tokens in 3 cached pieces are within {error:.1g} of one forward"


def head_identity(subject: Subject) -> str:
    """The loss multiplies with the target's own embedding and head, tied as config.json says."""
    target = subject.target
    own = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    held = target.head.embedding, target.head.lm_head
    for name, mine, theirs in zip(("embedding", "lm_head"), held, own, strict=True):
        if mine.data_ptr() != theirs.data_ptr() or not torch.equal(mine, theirs):
            raise FaultFoundError(f"the {name} that trains is not the target's tensor")
    says, tied = subject.tied, held[0] is held[1]
    if says != tied:
        raise FaultFoundError(
            f"config.json says tie_word_embeddings {str(says).lower()}, the loaded head is"
            f" {'tied' if tied else 'untied'}",
            where=f"{subject.config.target.path}/config.json: tie_word_embeddings",
            fix="copy the model again, whole; its head must be the one it was trained with",
        )
    _check_replica(subject)
    if not subject.fast:
        _compare_with_files(subject)
    ids = _tokens(subject)
    outputs, states = layer_outputs(target, ids)
    told = _head_product(target, ids, outputs)
    if states and not torch.equal(states[0][0], own[0][ids.to(own[0].device)]):
        raise FaultFoundError(
            "the first layer's input is not the plain embedding (it is scaled or normed), so the"
            " draft would be served other inputs than the target's",
            where=f"{type(target.model).__name__}",
            fix="this kind of target is not supported",
        )
    return f"the target's own tensors, {'tied' if tied else 'untied'} as config.json says; {told}"


def _check_replica(subject: Subject) -> None:
    """A replica as a drafter thread gets it holds the target's head, in the draft's dtype."""
    target = subject.miniature
    schedule = Schedule.from_config(subject.config.optim, 10)
    place = 0, torch.device("cpu")
    parts = SdpaAttention(), schedule, None
    replica = assembly.build_replica(subject.small_config, target, place, *parts)
    for name in ("embedding", "lm_head"):
        mine, theirs = getattr(replica.head, name), getattr(target.head, name)
        if not torch.equal(mine, theirs.to(mine.dtype)):
            raise FaultFoundError(
                f"a drafter's {name} is not the target's", where="trainer/assembly.py"
            )


def _compare_with_files(subject: Subject) -> None:
    """The loaded embedding and head are those of the target's files, bit for bit."""
    held = {_EMBEDDING_NAMES: subject.target.head.embedding}
    if not subject.tied:
        held[_HEAD_NAMES] = subject.target.head.lm_head
    for path in _weight_files(subject):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                for endings, loaded in held.items():
                    if not name.endswith(endings) or file.get_slice(name).get_shape() != list(
                        loaded.shape
                    ):
                        continue
                    if not torch.equal(file.get_tensor(name).to(loaded), loaded):
                        raise FaultFoundError(f"the loaded {name} is not that of {path}")


@torch.no_grad()
def _head_product(target: Target, ids: Tensor, outputs: list[Tensor]) -> str:
    """Compare the target's logits with norm(last state) times the head, and nothing else."""
    norm = getattr(target.model.get_decoder(), "norm", None)
    if norm is None:
        return "its final norm was not found, so its logits were not compared"
    logits = target.model(input_ids=ids[None].to(target.device), use_cache=False).logits[0]
    plain = norm(outputs[-1]) @ target.head.lm_head.t()
    error, limit = _error(plain, logits), TOLERANCE[_dtype(target)]
    if error > limit:
        raise FaultFoundError(
            f"the target's logits are not its head times its normed state (off by {error:.2g}):"
            " they are scaled, capped or shifted",
            where=type(target.model).__name__,
            fix="this kind of target is not supported",
        )
    return f"its logits are the plain product (within {error:.1g})"


def tap_count(subject: Subject) -> str:
    """The taps side by side are as wide as the input of fc."""
    target, draft = subject.target, subject.draft
    (features,) = target.document_features([_tokens(subject)])
    width, columns = features.shape[-1], draft.fc.weight.shape[1]
    hidden, taps = int(target.text_config.hidden_size), len(target.target_layer_ids)
    if width != taps * hidden:
        raise FaultFoundError(f"features are {width} wide, {taps} taps x {hidden} were expected")
    small = len(subject.miniature.target_layer_ids) * draft.config.hidden_size
    shape = subject.draft_config
    if columns != small or shape.num_taps != len(subject.layer_ids):
        raise FaultFoundError(f"fc takes {columns} inputs, the taps are {small} wide")
    real = shape.num_taps * shape.hidden_size
    return f"{shape.num_taps} taps x {shape.hidden_size} = {real} inputs of fc"


def _tokens(subject: Subject) -> Tensor:
    """Return the first tokens of the run's data."""
    ids = subject.short_samples[0].input_ids[:_TOKENS]
    return torch.from_numpy(ids.astype("int64"))


def _dtype(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return how far a token's values are apart, as a share of their size: see TOLERANCE."""
    exact = wanted.dtype == torch.float32
    found, wanted = found.float().to(wanted.device), wanted.float()
    sizes = torch.linalg.vector_norm(wanted, dim=-1).clamp(min=1e-12)
    apart = torch.linalg.vector_norm(found - wanted, dim=-1)
    if not bool(torch.isfinite(apart).all()):
        return float("inf")
    shares = apart / sizes
    return float(shares.max() if exact else shares.mean())


def weights_on_disk(subject: Subject) -> str:
    """The files hold the head that config.json promises; nothing would be made up at loading."""
    names = _tensor_names(subject)
    tied = subject.tied
    heads = [name for name in names if name.endswith(_HEAD_NAMES)]
    tables = [name for name in names if name.endswith(_EMBEDDING_NAMES)]
    if not tables:
        raise FaultFoundError(f"no embedding among {len(names)} tensors", fix=_COPY_AGAIN)
    if not tied and not heads:
        raise FaultFoundError(
            "config.json says the head is its own (tie_word_embeddings false), but the files hold"
            " no lm_head.weight: it would be random",
            fix=_COPY_AGAIN,
        )
    rows, vocab = names[tables[0]][0], int(subject.known.get_text_config().vocab_size)
    if rows != vocab:
        raise FaultFoundError(f"{tables[0]} has {rows} rows, config.json says {vocab}")
    return f"{tables[0]} with {rows} rows; head {'tied to it' if tied else heads[0]}"


def _weight_files(subject: Subject) -> list[Path]:
    """Return the target's files of weights; none for a target from the hub."""
    directory = Path(subject.config.target.path)
    return sorted(directory.glob("*.safetensors")) if directory.is_dir() else []


def _tensor_names(subject: Subject) -> dict[str, Sequence[int]]:
    """Return name and shape of every tensor of the target's files, from their headers."""
    files = _weight_files(subject)
    if not files:
        raise NotApplicableError("the target is no directory of safetensors files")
    shapes: dict[str, Sequence[int]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes |= {name: file.get_slice(name).get_shape() for name in names}
    return shapes
