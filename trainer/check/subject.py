"""What is checked: the run's configuration and data, its target, and small drafts made from them.

Everything is made once, when a check first asks for it. The fast check stands on a miniature of the
target and the first chats; the full one on the target itself and the whole data set.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from trainer import assembly
from trainer.check.miniature import build_miniature, layer_count, tap_ids
from trainer.contract.config import DraftModelConfig, TrainConfig
from trainer.data.chat import BadRecordError, ChatEncoder, parse_line
from trainer.data.dataset import BadLine, ChatDataset, Dataset, Sample, load_tokenizer
from trainer.data.packing import Batch, BatchMaker, BatchPlan
from trainer.data.shards import ShardDataset, open_dataset
from trainer.errors import DataError, TargetError
from trainer.loss import BlockTargets, block_targets
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.masks import TILE
from trainer.model.target import Target, default_target_layer_ids

FAST_CHATS = 64  # samples that the fast check looks at
_FAST_LINES = 2048  # of a file that are read at most to find them
_SHORT = 192  # tokens of a chat that the small batches take
_SEED = 20  # of everything random here; any would do
_MAX_WINDOW = 24  # keys of the window that the small drafts slide
_MAX_DRAFT_LAYERS = 2
_FEW_BLOCKS = 8
_SMALL_HEAD_DIM = 16
_SMALL_INTERMEDIATE = 96


@dataclass(frozen=True)
class Scene:
    """A packed batch of made-up documents with hidden states and what its blocks should give."""

    config: TrainConfig
    batch: Batch
    targets: BlockTargets
    embedding: Tensor
    hidden: Tensor


class Subject:
    """A run directory under check."""

    def __init__(self, run_dir: Path, *, fast: bool) -> None:
        self.fast = fast
        self.manifest, self.config = assembly.read_manifest(run_dir)

    @cached_property
    def known(self) -> Any:
        """The target's own configuration, whole. Raises: TargetError."""
        config = self.config.target
        try:
            return AutoConfig.from_pretrained(
                config.path, revision=config.revision, trust_remote_code=False
            )
        except Exception as error:  # its validation has error classes of its own, and others
            raise TargetError(
                f"target.path {config.path}: no configuration can be read: {error}"
            ) from error

    @cached_property
    def written(self) -> dict[str, Any]:
        """The text part of config.json as written; other defaults than ours cannot hide in it."""
        path = Path(self.config.target.path) / "config.json"
        raw: dict[str, Any] = (
            json.loads(path.read_text()) if path.is_file() else self.known.to_dict()
        )
        inner = [raw[name] for name in self.known.sub_configs if isinstance(raw.get(name), dict)]
        text = [part for part in inner if "num_hidden_layers" in part and "vocab_size" in part]
        return text[0] if text else raw

    @property
    def tied(self) -> bool:
        """Whether the target's configuration says that its head is its embedding."""
        text = self.known.get_text_config()
        said = getattr(text, "tie_word_embeddings", None)
        return bool(getattr(self.known, "tie_word_embeddings", False) if said is None else said)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.config.target.path, self.config.target.revision)

    @cached_property
    def data(self) -> Dataset:
        """The samples looked at: the first ones in the fast check, all in the full one."""
        if self.fast:
            return first_samples(self.tokenizer, self.config)
        data = self.config.data
        return open_dataset(data.path, self.tokenizer, data.max_length)

    @cached_property
    def draft_config(self) -> DraftConfig:
        """The shape of the run's draft. Raises: TargetError for one that does not fit."""
        text = self.known.get_text_config()
        return DraftConfig.from_target(text, self.config.draft, int(text.num_hidden_layers))

    @cached_property
    def small_config(self) -> TrainConfig:
        """The run's configuration with the draft cut to the miniature, in fp32 on the CPU."""
        config = self.config
        kinds = tuple(dict.fromkeys(self.draft_config.layer_types))
        layers = max(len(kinds), min(_MAX_DRAFT_LAYERS, config.draft.num_draft_layers))
        types = (*kinds, *kinds)[:layers]
        window = config.draft.sliding_window
        draft = replace(
            config.draft,
            num_draft_layers=layers,
            target_layer_ids=self.miniature.target_layer_ids,
            num_taps=len(self.miniature.target_layer_ids),
            layer_types=types,
            sliding_window=None if window is None else min(window, self.small_window),
            dtype="float32",
            **_narrow(config.draft),
        )
        return replace(
            config,
            draft=draft,
            target=replace(config.target, dtype="float32"),
            run=replace(config.run, device="cpu"),
            loss=replace(config.loss, head_sample=0, head_fp8="off"),
        )

    @property
    def small_window(self) -> int:
        """Keys that the small drafts' sliding layers see; at least a block."""
        return max(_MAX_WINDOW, self.config.draft.block_size)

    @cached_property
    def miniature(self) -> Target:
        """The small random target, in fp32 on the CPU. Raises: NotApplicableError."""
        text, ids = self.known.get_text_config(), self.config.draft.target_layer_ids
        num_taps = len(ids) if ids is not None else self.config.draft.num_taps
        num_layers = layer_count(text, num_taps)
        model = build_miniature(self.known, num_layers, _SEED)
        return Target(model, tap_ids(num_layers, num_taps))

    @cached_property
    def target(self) -> Target:
        """The target under check: the miniature in the fast check, else the real one."""
        if self.fast:
            return self.miniature
        device = assembly.devices_of(self.manifest, self.config).targets[0]
        return assembly.load_targets(self.config, [device])[str(device)]

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """The run's taps, from the configuration or the formula."""
        ids = self.config.draft.target_layer_ids
        layers = int(self.known.get_text_config().num_hidden_layers)
        return ids or default_target_layer_ids(layers, self.config.draft.num_taps)

    @cached_property
    def draft(self) -> DraftModel:
        """The small draft with weights that hide nothing."""
        return self.small_draft()

    def small_draft(self, **changes: Any) -> DraftModel:
        """Return a small draft with random weights and ``changes`` in its shape."""
        text, config = self.miniature.text_config, self.small_config
        shape = DraftConfig.from_target(text, config.draft, self.miniature.num_layers)
        return loud(DraftModel(replace(shape, **changes), seed=_SEED))

    @cached_property
    def scene(self) -> Scene:
        """Three made-up documents in one row, every valid position an anchor, some padding."""
        size = self.config.draft.block_size
        return self._scene((self.small_window + size + 9, size + 21, size + 13), num_prompt=3)

    @cached_property
    def wide_scene(self) -> Scene:
        """A row of several tiles of keys, with anchors behind their edges."""
        return self._scene((TILE + 16, TILE + 16), num_prompt=TILE - 16)

    @cached_property
    def sparse_scene(self) -> Scene:
        """The same documents with few blocks: whole rows of logits are made of them."""
        size = self.config.draft.block_size
        lengths = (self.small_window + size + 9, size + 21, size + 13)
        return self._scene(lengths, num_prompt=3, max_anchors=_FEW_BLOCKS)

    def _scene(
        self, lengths: tuple[int, ...], num_prompt: int, max_anchors: int | None = None
    ) -> Scene:
        config, rng = self.small_config, np.random.default_rng(_SEED)
        samples = tuple(self._made_up(rng, i, n, num_prompt) for i, n in enumerate(lengths))
        data = replace(
            config.data,
            max_length=max(lengths),
            token_budget=sum(lengths) + 7,
            max_batch_size=len(lengths),
            packing=True,
            max_anchors=max_anchors or sum(int(sample.loss_mask.sum()) for sample in samples),
        )
        config = replace(config, data=data)
        batch = make_batch(samples, config)
        width = self.draft.config.num_taps * self.draft.config.hidden_size
        generator = torch.Generator().manual_seed(_SEED)
        return Scene(
            config=config,
            batch=batch,
            targets=targets_of(batch, config),
            embedding=self.miniature.head.embedding,
            hidden=torch.randn(*batch.input_ids.shape, width, generator=generator),
        )

    def _made_up(
        self, rng: np.random.Generator, number: int, length: int, num_prompt: int
    ) -> Sample:
        """Return random tokens: a prompt, an answer, and a second answer of the last four."""
        mask_token_id, vocab = self.config.draft.mask_token_id, self.draft_config.vocab_size
        ids = rng.integers(vocab, size=length).astype(np.int32)
        ids[ids == mask_token_id] = (mask_token_id + 1) % vocab
        trained = np.arange(length) >= min(num_prompt, length - 8)
        trained[-6:-4] = False
        return Sample(number, ids, trained)

    @cached_property
    def short_samples(self) -> tuple[Sample, ...]:
        """A few of the run's own samples, cut short, for forwards on a CPU."""
        found: list[Sample] = []
        for number in range(min(FAST_CHATS, len(self.data.samples))):
            sample = self.data.samples[number]
            ids, mask = sample.input_ids[:_SHORT], sample.loss_mask[:_SHORT]
            if (mask[:-1] & mask[1:]).any():
                found.append(Sample(len(found), np.asarray(ids), np.asarray(mask)))
            if len(found) == 4:
                break
        if not found:  # long prompts: any tokens of the run serve to compare two ways of one thing
            ids = self.data.samples[0].input_ids[:_SHORT]
            found = [Sample(0, np.asarray(ids), np.ones(len(ids), np.bool_))]
        return tuple(found)


def first_samples(tokenizer: Any, config: TrainConfig) -> ChatDataset:
    """Return the first samples of the run's data without reading the rest. Raises: DataError."""
    path = Path(config.data.path)
    if path.is_dir():
        prepared = ShardDataset(path)
        prepared.check_run(tokenizer, config.data.max_length)
        count = min(FAST_CHATS, len(prepared.samples))
        return ChatDataset(str(path), prepared.sha256, tuple(prepared.samples[:count]))
    encoder = ChatEncoder(tokenizer, config.data.max_length)
    samples: list[Sample] = []
    bad: list[BadLine] = []
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if len(samples) == FAST_CHATS or number > _FAST_LINES:
                    break
                try:
                    encoded = encoder.encode(parse_line(line)) if line.strip() else None
                except BadRecordError as error:
                    bad.append(BadLine(number, str(error)))
                    continue
                if encoded is not None:
                    samples.append(Sample(len(samples), encoded.input_ids, encoded.loss_mask))
    except OSError as error:
        raise DataError(f"data.path {path}: {error.strerror or error}") from error
    if not samples:
        told = "; ".join(str(one) for one in bad[:3]) or "the file is empty"
        raise DataError(f"data.path {path}: no usable chat in its first lines ({told})")
    return ChatDataset(str(path), "", tuple(samples), tuple(bad))


def loud(draft: DraftModel) -> DraftModel:
    """Give a draft weights under which every part of it matters; fresh ones would hide faults."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.add_(noise.to(parameter) * scale)
        if draft.config.normalise_taps:
            draft.tap_scale.copy_(torch.linspace(0.5, 2.0, draft.config.num_taps))
    return draft.eval()


def make_batch(samples: tuple[Sample, ...], config: TrainConfig) -> Batch:
    """Return the first batch of a data set of these samples."""
    dataset = ChatDataset("made up", "", samples)
    plan = BatchPlan([len(sample.input_ids) for sample in samples], config.data, config.seed)
    return BatchMaker(dataset, plan, config).make(0)


def targets_of(batch: Batch, config: TrainConfig) -> BlockTargets:
    """Return what the blocks of a batch read and should give, as the loss makes it."""
    draft = config.draft
    return block_targets(batch, draft.block_size, draft.mask_token_id, config.position_decay)


def _narrow(draft: DraftModelConfig) -> dict[str, Any]:
    """Return small widths in the place of the run's; None takes the miniature's own."""
    return {
        "intermediate_size": _SMALL_INTERMEDIATE,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "head_dim": _SMALL_HEAD_DIM,
        "conv_group_size": min(draft.conv_group_size, 16),
        "selector_rank": min(draft.selector_rank, 16),
        "gru_hidden_dim": min(draft.gru_hidden_dim, 32),
        "emb_dim": min(draft.emb_dim, 16),
    }
