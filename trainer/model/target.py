"""The frozen target: loading it, its taps, its embedding and head.

Id l means the OUTPUT of the 0-based decoder layer l (Hugging Face's hidden_states[l + 1]). Taps
come from forward hooks, because hidden_states[-1] is taken after the final norm and a wrapper may
not pass output_hidden_states on. Several documents go through as right-padded rows or as one packed
row; model/batching.py proves at the start that neither mixes them.
"""

import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trainer.contract.config import DraftModelConfig, TargetConfig
from trainer.contract.model_directory import faults
from trainer.errors import TargetError
from trainer.model import packed_attention, recurrent_kernels
from trainer.model.compiled_target import CompiledTarget
from trainer.model.scaled_head import ScaledHead

FULL, WINDOWED = "full_attention", frozenset(("sliding_attention", "chunked_attention"))
ROWS, PACKED = "rows", "packed"
# What one more forward costs, in tokens: reading the weights takes a GPU as long as a product with
# its FLOP/s : bytes/s (70 of a 3090, 180 of an H200 at their peaks, twice that in practice).
_FORWARD_COST_TOKENS = 256


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return the published choice of taps, rounded half to even.

    Raises: TargetError when the target has too few layers for that many taps.
    Source: z-lab dflash; 64 layers and 5 taps give 1, 16, 31, 46, 61.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = (num_target_layers - 3) - 1
    ids = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if len(set(ids)) < num_taps or list(ids) != sorted(ids):
        raise TargetError(
            f"{num_taps} taps do not fit a target of {num_target_layers} layers; set"
            " draft.target_layer_ids or a smaller draft.num_taps"
        )
    return ids


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and head, never trained.

    fp8: the head once more, for a loss whose products run in FP8. Shapes: embedding and lm_head
    [V, D], one tensor if tied.
    """

    embedding: Tensor
    lm_head: Tensor
    fp8: ScaledHead | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FrozenHead":
        """Return it on another device or in another dtype; tied weights stay one tensor.

        Without its FP8 form, which belongs to one device.
        """
        embedding = self.embedding.to(device, dtype)
        tied = self.lm_head is self.embedding
        return FrozenHead(embedding, embedding if tied else self.lm_head.to(device, dtype))


class _AllTapsSeenError(Exception):
    """Ends a forward after the last tap; never leaves this module."""


@dataclass
class _Capture:
    """What one forward of one thread collects."""

    stop: bool
    taps: dict[int, Tensor] = field(default_factory=dict)


class Target:
    """A frozen model with taps; several threads may use one instance.

    .model is the whole model (verification needs its head), .text_config its text part, .layers its
    decoder layers. .batching is how ``document_features`` joins documents: rows or packed.
    ``forward_tokens``: tokens of one such forward, padding included; one document may have more.
    .compiled takes over where it is set (model/settling.py) and no document is too long for it.
    """

    batching = ROWS
    compiled: CompiledTarget | None = None

    def __init__(
        self, model: Any, target_layer_ids: Sequence[int], *, forward_tokens: int = 32768
    ) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.text_config: Any = self.model.config.get_text_config()
        self.target_layer_ids = tuple(target_layer_ids)
        self.num_layers = int(self.text_config.num_hidden_layers)
        self._forward_tokens = forward_tokens
        self._decoder: Any = self.model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or len(layers) < self.num_layers:
            raise TargetError(f"{type(model).__name__} has no list of decoder layers to tap")
        self.layers: Sequence[nn.Module] = layers
        if self.target_layer_ids[-1] >= self.num_layers:
            raise TargetError(
                f"draft.target_layer_ids {list(self.target_layer_ids)}: the target has layers 0.."
                f"{self.num_layers - 1}"
            )
        self.head = _frozen_head(self.model, self.text_config)
        self._local = threading.local()
        for number in self.target_layer_ids:
            layers[number].register_forward_hook(self._hook(number))
        # transformers renamed the keyword within version 5.
        known = inspect.signature(self.model.forward).parameters
        self._cache_key = "cache" if "cache" in known else "past_key_values"

    @property
    def decoder(self) -> Any:
        """The module with the embedding and the layers."""
        return self._decoder

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and so of the taps."""
        return self.head.embedding.dtype

    @property
    def layer_kinds(self) -> frozenset[str]:
        """Kinds of its layers: full_attention, WINDOWED ones, or recurrent ones by any other name.

        A recurrent layer carries a state that cannot be cropped and that runs on in a packed row.
        """
        kinds = getattr(self.text_config, "layer_types", None)
        if kinds is None:
            windowed = getattr(self.text_config, "sliding_window", None)
            kinds = ["sliding_attention"] if windowed else [FULL]
        stateful = getattr(self.model, "_is_stateful", False) and not self._recurrent(kinds)
        return frozenset([*kinds, "recurrent"] if stateful else kinds)

    @property
    def recurrent_kinds(self) -> frozenset[str]:
        """The kinds of its layers that are no attention; not empty for a hybrid target."""
        return self._recurrent(self.layer_kinds)

    @staticmethod
    def _recurrent(kinds: Sequence[str] | frozenset[str]) -> frozenset[str]:
        return frozenset(kinds) - {FULL} - WINDOWED

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation configuration or the text one."""
        for holder in (getattr(self.model, "generation_config", None), self.text_config):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    def _hook(self, number: int) -> Any:
        last = self.target_layer_ids[-1]

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            capture: _Capture | None = getattr(self._local, "capture", None)
            if capture is None:
                return
            capture.taps[number] = output[0] if isinstance(output, tuple) else output
            if capture.stop and number == last:
                raise _AllTapsSeenError

        return keep

    @torch.no_grad()
    def document_features(
        self, documents: Sequence[Tensor], batching: str | None = None
    ) -> list[Tensor]:
        """Return the taps of every document, in the order given.

        ``batching``: rows or packed, with no compiled layers, instead of the target's own way. A
        forward ends after the last tapped layer: neither the layers behind it nor the final norm
        and the head run. Shapes: [length] ids each -> [length, n * D] each, on its device.
        """
        lengths = [len(document) for document in documents]
        compiled = self.compiled if batching is None else None
        if compiled is not None and max(lengths, default=0) <= compiled.sizes[-1]:
            return compiled.features(documents)
        packed = (batching or self.batching) == PACKED
        group_up = _in_order if packed else _by_length
        features: dict[int, Tensor] = {}
        for group in group_up(lengths, self._forward_tokens):
            rows = [documents[i].long() for i in group]
            made = self._packed_features(rows) if packed else self._row_features(rows)
            features |= zip(group, made, strict=True)
        return [features[i] for i in range(len(documents))]

    def _row_features(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """One document a row, padded on the right: a causal model needs no mask then."""
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        taps = self._run_to_last_tap(ids.to(self.device))
        for number, row in enumerate(rows):
            yield torch.cat([tap[number, : len(row)] for tap in taps], -1)

    def _packed_features(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """All documents in one row, each from position 0, with no mask and no cache."""
        lengths = [len(row) for row in rows]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(self.device)
        options: dict[str, Tensor | int] = {"position_ids": positions}
        if self.recurrent_kinds:  # the names under which kernels of recurrent layers look
            ends = packed_attention.boundaries_of(lengths)
            numbers = torch.arange(len(rows), dtype=torch.int32)
            owner = numbers.repeat_interleave(torch.tensor(lengths))[None]
            options |= {"cu_seq_lens_q": ends.to(self.device), "seq_idx": owner.to(self.device)}
        with packed_attention.packed_row(lengths):
            taps = self._run_to_last_tap(torch.cat(list(rows))[None].to(self.device), **options)
        pieces = zip(*(torch.split(tap[0], lengths) for tap in taps), strict=True)
        yield from (torch.cat(piece, -1) for piece in pieces)

    def _run_to_last_tap(self, ids: Tensor, **options: Any) -> list[Tensor]:
        capture = self._local.capture = _Capture(stop=True)
        try:
            self._decoder(input_ids=ids, use_cache=False, **options)
        except _AllTapsSeenError:
            pass
        finally:
            self._local.capture = None
        return [capture.taps[number] for number in self.target_layer_ids]

    def attend_by_document(self) -> None:
        """Make packed rows possible; nothing else changes. Not while a forward runs.

        Raises: TargetError for attention that cannot be done document by document.
        """
        name, kinds = type(self.model).__name__, self.layer_kinds
        if kinds & WINDOWED:
            raise TargetError(f"{name} has windowed layers, which a packed row does not keep apart")
        if self._decoder.config._attn_implementation == packed_attention.NAME:
            return
        if self._decoder.config._attn_implementation == "sdpa":
            self._decoder.set_attn_implementation(packed_attention.NAME)
        if self._decoder.config._attn_implementation != packed_attention.NAME:
            raise TargetError(f"{name} does not attend through SDPA, which a packed row needs")

    @torch.no_grad()
    def verify(self, ids: Tensor, cache: Any, keep_logits: int = 0) -> tuple[Tensor, Tensor]:
        """Run the whole model over further tokens of one sequence, with its cache.

        ``keep_logits``: 0 for logits of every token, n for the last n. Shapes: ids [1, T] ->
        (logits [1, T or n, V] fp32, taps [1, T, n * D]).
        """
        capture = self._local.capture = _Capture(stop=False)
        try:
            out = self.model(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=keep_logits,
                **{self._cache_key: cache},
            )
        finally:
            self._local.capture = None
        taps = torch.cat([capture.taps[number] for number in self.target_layer_ids], -1)
        return out.logits.float(), taps


def load_target(
    config: TargetConfig, draft: DraftModelConfig, device: torch.device | str
) -> Target:
    """Load the target from a local directory or the hub, frozen, on ``device``.

    Raises: TargetError naming the directory and its missing or damaged files, before any memory of
    the device is taken; or the weights that the files do not hold.
    """
    transformers_logging.disable_progress_bar()  # it fills a log with carriage returns
    directory = Path(config.path)
    if directory.is_dir():
        check_target_directory(directory)
    elif directory.is_absolute() or config.path.startswith(".") or config.path.count("/") > 1:
        raise TargetError(f"target.path {config.path}: no such directory")
    where = f"{config.path} (revision {config.revision or 'default'})"
    # trust_remote_code=False: a model with code of its own is an error, not a question at a prompt.
    source = {"revision": config.revision, "trust_remote_code": False}
    try:
        known = AutoConfig.from_pretrained(config.path, **source)
        text = known.get_text_config()
        _refuse_quantised(where, known, text)
        recurrent_kernels.offer_convolution(str(getattr(text, "model_type", "")))
        num_layers = int(text.num_hidden_layers)
        ids = draft.target_layer_ids or default_target_layer_ids(num_layers, draft.num_taps)
        model, told = model_class(known).from_pretrained(
            config.path,
            dtype=getattr(torch, config.dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below
            **source,
        )
    except TargetError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"target.path {where} cannot be loaded: {error}") from error
    # transformers only warns, and fills what it does not find with random numbers.
    absent = sorted([*told["missing_keys"], *(key[0] for key in told["mismatched_keys"])])
    if absent:
        raise TargetError(
            f"target.path {where}: {type(model).__name__} finds no weights for {len(absent)} of its"
            f" tensors, first {absent[0]}; the files are of another model than config.json"
        )
    return Target(model.to(device), ids, forward_tokens=config.forward_tokens)


def _refuse_quantised(where: str, *configs: Any) -> None:
    for config in configs:
        found = getattr(config, "quantization_config", None)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            raise TargetError(
                f"target.path {where}: its weights are quantised ({method}); name a model with"
                " float32, bfloat16 or float16 weights"
            )


def model_class(known: Any) -> Any:
    """Return what loads a model: the class for causal language models, else the one it names.

    For a multimodal configuration the former is its text part alone, where there is one.
    """
    if type(known) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    for name in getattr(known, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise TargetError(
        f"target.path: transformers {transformers.__version__} has no language model for"
        f" {type(known).__name__} with architectures {getattr(known, 'architectures', None)}"
    )


def check_target_directory(directory: Path) -> None:
    """Look for missing or half-copied files; the weights' headers are read, not the weights.

    Raises: TargetError naming every bad file, what is wrong with it and the next step.
    """
    found = faults(directory)
    if found:
        hints = "; ".join(dict.fromkeys(fault.hint for fault in found))
        texts = "; ".join(fault.text for fault in found)
        raise TargetError(f"target.path {directory}: {texts}. To mend it: {hints}")


def _frozen_head(model: Any, text_config: Any) -> FrozenHead:
    """Return embedding and head; refuse what the draft's plain products would not reproduce."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise TargetError(f"{type(model).__name__} has no output head")
    refused = [
        (getattr(head, "bias", None) is not None, "a bias in its head"),
        (bool(getattr(text_config, "final_logit_softcapping", None)), "capped logits"),
        (hasattr(embedding, "embed_scale"), "scaled embeddings"),
    ]
    for found, what in refused:
        if found:
            raise TargetError(f"{type(model).__name__} has {what}, which drafting does not support")
    if head.weight.shape != embedding.weight.shape:
        shapes = f"{list(embedding.weight.shape)} and {list(head.weight.shape)}"
        raise TargetError(f"{type(model).__name__}: embedding and head differ in shape, {shapes}")
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    weight: Tensor = embedding.weight.detach()
    return FrozenHead(weight, weight if tied else head.weight.detach())


def _by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices, longest first, into the rows that cost least; each within ``max_tokens``.

    A group costs rows x longest tokens and ``_FORWARD_COST_TOKENS``; one document may be longer.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    best: list[tuple[int, int]] = [(0, 0)]  # of the first n in order: (cost, where its last begins)
    for stop in range(1, len(order) + 1):
        costs = []
        for start in range(stop):
            tokens = (stop - start) * lengths[order[start]]
            if tokens <= max_tokens or stop - start == 1:
                costs.append((best[start][0] + tokens + _FORWARD_COST_TOKENS, start))
        best.append(min(costs))
    groups, stop = [], len(order)
    while stop:
        start = best[stop][1]
        groups.append(order[start:stop])
        stop = start
    return groups[::-1]


def _in_order(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices in their order, so that a group has no more than ``max_tokens``."""
    groups: list[list[int]] = []
    left = 0
    for i, length in enumerate(lengths):
        if not groups or length > left:
            groups.append([])
            left = max_tokens
        groups[-1].append(i)
        left -= length
    return groups
