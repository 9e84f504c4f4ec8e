"""The frozen target: loading it, its taps, its embedding and head.

Id l means the OUTPUT of the 0-based decoder layer l (Hugging Face's hidden_states[l + 1]). Taps
come from forward hooks, because hidden_states[-1] is taken after the final norm and a wrapper may
not pass output_hidden_states on.
"""

import inspect
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trainer.contract.config import DraftModelConfig, TargetConfig
from trainer.errors import TargetError

# Padded tokens of one forward over documents of a batch; more only costs memory.
MAX_FORWARD_TOKENS = 32768


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
    """The target's embedding and head, never trained. Shapes: [V, D] each; one tensor if tied."""

    embedding: Tensor
    lm_head: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FrozenHead":
        """Return it on another device or in another dtype; tied weights stay one tensor."""
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

    .model is the whole model (verification needs its head), .text_config its text part.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.text_config: Any = self.model.config.get_text_config()
        self.target_layer_ids = tuple(target_layer_ids)
        self.num_layers = int(self.text_config.num_hidden_layers)
        self._decoder: Any = self.model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or len(layers) < self.num_layers:
            raise TargetError(f"{type(model).__name__} has no list of decoder layers to tap")
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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and so of the taps."""
        return self.head.embedding.dtype

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
    def document_features(self, documents: Sequence[Tensor]) -> list[Tensor]:
        """Return the taps of every document, in the order given.

        Rows are padded on the right and grouped by length; a causal model needs no attention mask
        then, and the forward ends after the last tapped layer. Shapes: [length] ids each ->
        [length, n * D] each, on the target's device.
        """
        features: dict[int, Tensor] = {}
        for group in _by_length([len(d) for d in documents], MAX_FORWARD_TOKENS):
            rows = [documents[i] for i in group]
            ids = nn.utils.rnn.pad_sequence([r.long() for r in rows], batch_first=True)
            taps = self._run_to_last_tap(ids.to(self.device))
            for row, i in enumerate(group):
                features[i] = torch.cat([tap[row, : len(rows[row])] for tap in taps], -1)
        return [features[i] for i in range(len(documents))]

    def _run_to_last_tap(self, ids: Tensor) -> list[Tensor]:
        capture = self._local.capture = _Capture(stop=True)
        try:
            self._decoder(input_ids=ids, use_cache=False)
        except _AllTapsSeenError:
            pass
        finally:
            self._local.capture = None
        return [capture.taps[number] for number in self.target_layer_ids]

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
    the device is taken.
    """
    transformers_logging.disable_progress_bar()  # it fills a log with carriage returns
    directory = Path(config.path)
    if directory.is_dir():
        check_target_directory(directory)
    elif directory.is_absolute() or config.path.startswith(".") or config.path.count("/") > 1:
        raise TargetError(f"target.path {config.path}: no such directory")
    try:
        known = AutoConfig.from_pretrained(config.path, revision=config.revision)
        num_layers = int(known.get_text_config().num_hidden_layers)
        ids = draft.target_layer_ids or default_target_layer_ids(num_layers, draft.num_taps)
        model = AutoModelForCausalLM.from_pretrained(
            config.path, revision=config.revision, dtype=getattr(torch, config.dtype)
        )
    except (OSError, ValueError, SafetensorError) as error:
        where = f"{config.path} (revision {config.revision or 'default'})"
        raise TargetError(f"target.path {where} cannot be loaded: {error}") from error
    return Target(model.to(device), ids)


def check_target_directory(directory: Path) -> None:
    """Look for missing or half-copied files; the weights' headers are read, not the weights.

    Raises: TargetError naming every bad file and what is wrong with it.
    """
    faults = [f"{name} is missing" for name in ("config.json",) if not (directory / name).is_file()]
    names = {"tokenizer.json", "tokenizer.model", "vocab.json"}
    if not any((directory / name).is_file() for name in names):
        faults.append("tokenizer.json is missing")
    index = directory / "model.safetensors.index.json"
    wanted: dict[str, str] = {}
    if index.is_file():
        try:
            wanted = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            faults.append(f"{index.name} is not an index of weights ({error!r})")
        shards = sorted(set(wanted.values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        faults += _shard_faults(directory / shard, [k for k, v in wanted.items() if v == shard])
    if faults:
        raise TargetError(
            f"target.path {directory}: {'; '.join(faults)}. Copy the model again, whole"
        )


def _shard_faults(path: Path, wanted: Sequence[str]) -> list[str]:
    """Return what is wrong with one safetensors file; opening it checks its size."""
    if not path.is_file():
        return [f"{path.name} is missing"]
    try:
        with safe_open(path, framework="pt") as file:
            missing = sorted(set(wanted) - set(file.keys()))
    except (SafetensorError, OSError) as error:
        return [f"{path.name} is damaged or half copied ({path.stat().st_size} bytes; {error})"]
    return [f"{path.name} lacks {len(missing)} tensors, first {missing[0]}"] if missing else []


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
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    weight: Tensor = embedding.weight.detach()
    return FrozenHead(weight, weight if tied else head.weight.detach())


def _by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices, longest first, so that rows x longest stays within ``max_tokens``."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
