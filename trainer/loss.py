"""The loss of a batch: weighted cross-entropy of every drafted slot, as sums.

Sums and not means, because the weight sum that normalises them is that of the global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import LossConfig, TrainConfig
from trainer.data.packing import Batch
from trainer.model.draft import DraftModel
from trainer.model.head import HeadPass, rows_at_once
from trainer.model.masks import BlockLayout
from trainer.model.target import FrozenHead
from trainer.model.variants.variant import BlockRows, HeadRows


@dataclass(frozen=True)
class LossSums:
    """What a micro-batch adds to the global batch; tensors stay on the device, nothing waits.

    loss_sum: differentiable. weight_sum: what the loss is divided by. num_anchors: blocks.
    hits, counts [B - 1]: right guesses and trained slots by position 1..B-1. accepted_sum: leading
    right guesses, teacher-forced, over all blocks. With loss.head_sample a guess is right among
    the sampled rows only, so accuracies read too high then. figures: of the variant, numerator and
    denominator [2] by their key in the step event.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    num_anchors: Tensor
    hits: Tensor
    counts: Tensor
    accepted_sum: Tensor
    figures: dict[str, Tensor] = field(default_factory=dict)

    def detach(self) -> "LossSums":
        """Return the same sums outside the graph."""
        plain = {name: value.detach() for name, value in self._sums().items()}
        return LossSums(**plain, figures={k: v.detach() for k, v in self.figures.items()})

    @classmethod
    def total(cls, parts: Sequence["LossSums"]) -> "LossSums":
        """Add micro-batches; all on one device."""
        total, *others = parts
        for one in others:
            theirs = one._sums()
            plain = {name: value + theirs[name] for name, value in total._sums().items()}
            figures = {key: value + one.figures[key] for key, value in total.figures.items()}
            total = cls(**plain, figures=figures)
        return total

    def _sums(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if name != "figures"}

    @property
    def loss(self) -> float:
        """Mean over the weights; 0 when nothing is trained. Waits for the device."""
        return float(self.loss_sum.detach()) / max(float(self.weight_sum), 1e-12)

    @property
    def slot_accuracy(self) -> list[float]:
        """Teacher-forced share of right guesses by slot position, 1..B-1. Waits."""
        return (self.hits / self.counts.clamp(min=1)).tolist()

    @property
    def expected_accepted(self) -> float:
        """Teacher-forced estimate of accepted tokens a block; not an acceptance length. Waits."""
        return float(self.accepted_sum) / max(float(self.num_anchors), 1.0)


@dataclass(frozen=True)
class BlockTargets:
    """What the blocks of a batch read and should give.

    Shapes: block_ids, labels, weights, position_ids [R, N, B]. Slot k predicts the token at
    anchor + k, its own position; slot 0 is the given anchor and weighs nothing.
    """

    block_ids: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor


def block_targets(
    batch: Batch, block_size: int, mask_token_id: int, position_decay: float
) -> BlockTargets:
    """Return block inputs, labels and weights.

    weight(k) = keep x in the row x same document x loss_mask x exp(-(k - 1) / position_decay).
    """
    anchors, length = batch.anchor_positions, batch.input_ids.shape[1]
    rows, num_anchors = anchors.shape
    slots = torch.arange(block_size, device=anchors.device)
    positions = anchors[..., None] + slots
    flat = positions.clamp(max=length - 1).flatten(1)
    shape = (rows, num_anchors, block_size)

    def at_slots(values: Tensor) -> Tensor:
        return values.gather(1, flat).view(shape)

    labels, documents = at_slots(batch.input_ids), at_slots(batch.document_ids)
    trained = batch.anchor_keep[..., None] & (positions < length) & at_slots(batch.loss_mask)
    trained = trained & (documents == documents[..., :1]) & (slots > 0)
    decay = torch.exp(-(slots - 1).float() / position_decay)
    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = labels[..., 0]
    first = batch.position_ids.gather(1, anchors)[..., None]
    return BlockTargets(block_ids, labels, trained * decay, first + slots)


def block_hidden(
    draft: DraftModel,
    embedding: Tensor,
    batch: Batch,
    targets: BlockTargets,
    target_hidden: Tensor,
    *,
    drafted: bool = False,
) -> Tensor:
    """Run the draft over every block.

    Shapes: target_hidden [R, S, n * D] -> [R, N, B, D]; [R, N, B - 1, D], without the anchors' own
    slots, when ``drafted``.
    """
    layout = BlockLayout.of(batch.anchor_positions, batch.anchor_keep, batch.document_ids)
    hidden: Tensor = draft(
        F.embedding(targets.block_ids.flatten(1), embedding),
        target_hidden,
        batch.position_ids,
        targets.position_ids.flatten(1),
        draft.attention.masks(layout, draft.config.rules),
        drafted=drafted,
    )
    return hidden.view(*targets.labels.shape[:2], -1, hidden.shape[-1])


def draft_loss(
    draft: DraftModel,
    head: FrozenHead,
    batch: Batch,
    target_hidden: Tensor,
    config: TrainConfig,
    progress: float = 0.0,
) -> LossSums:
    """Return the sums of one micro-batch; everything on the draft's device.

    Shapes: target_hidden [R, S, n * D] as data.packing.place_features lays it. ``progress``: share
    of the run's steps that are done, 0 to below 1.
    """
    size = draft.config.block_size
    targets = block_targets(batch, size, draft.config.mask_token_id, config.position_decay)
    hidden = block_hidden(draft, head.embedding, batch, targets, target_hidden, drafted=True)
    chunk_rows = config.loss.chunk_rows or rows_at_once(head.lm_head)
    how = replace(_head_pass(config.loss, chunk_rows, size - 1), fp8=head.fp8)
    weights = targets.weights[..., 1:]  # the anchor's own slot never reaches the head
    used = _used_rows(weights, whole_blocks=how.weigh is not None)
    rows = _block_rows(hidden, targets, used)
    table, labels = _head_rows(head, rows.labels, rows.weights, config, batch.index)
    rows = replace(rows, labels=labels)
    made = draft.variant.loss(draft, rows, table, how, config.loss, progress)
    trained, hit = weights > 0, made.hit
    if used is not None:
        hit = torch.zeros(weights.numel(), dtype=torch.bool).index_put((used,), hit)
    right = hit.view(weights.shape) & trained
    return LossSums(
        loss_sum=made.total,
        weight_sum=made.weight_sum,
        num_anchors=batch.anchor_keep.sum(),
        hits=right.sum((0, 1)),
        counts=trained.sum((0, 1)),
        accepted_sum=right.int().cumprod(-1).sum(),
        figures=made.figures,
    )


def _head_pass(loss: LossConfig, chunk_rows: int, block_rows: int) -> HeadPass:
    """Return how rows go through the head: with fixed weights, or with those of D-PACE."""
    if loss.name != "dpace":
        return HeadPass(chunk_rows)

    def weigh(entropy: Tensor, given: Tensor) -> Tensor:
        blocks = (-1, block_rows)
        trained = given.view(blocks) > 0
        return dpace_weights(entropy.view(blocks), trained, loss.dpace_alpha).flatten()

    return HeadPass(chunk_rows, weigh, block_rows)


def dpace_weights(entropy: Tensor, trained: Tensor, alpha: float) -> Tensor:
    """Weigh each slot by how many slots the draft expects to get right from it on.

    weight_j = sum over m >= j of the product over i <= m of (1 - alpha) * exp(-entropy_i) + alpha;
    slots that are not trained add nothing and lessen no product. Shapes: [K, B - 1] twice ->
    [K, B - 1]. Source: D-PACE, arXiv 2605.18810.
    """
    confidence = (1 - alpha) * torch.exp(-entropy) + alpha
    reached = torch.where(trained, confidence, 1.0).cumprod(-1) * trained
    return reached.flip(-1).cumsum(-1).flip(-1) * trained


def _used_rows(weights: Tensor, *, whole_blocks: bool) -> Tensor | None:
    """Return which slots 1.. go to the head; None is all of them.

    Fewer rows are fewer products. On CUDA the changing shape and the wait cost more.
    """
    if weights.is_cuda:
        return None
    trained = weights > 0
    if whole_blocks:
        trained = trained.any(-1, keepdim=True).expand_as(trained)
    return trained.flatten().nonzero().squeeze(1)


def _block_rows(hidden: Tensor, targets: BlockTargets, used: Tensor | None) -> BlockRows:
    """Lay the slots 1.. of all blocks, or those of ``used``, one below the other."""

    def rows(values: Tensor) -> Tensor:
        laid = values.flatten(0, 2)
        return laid if used is None else laid[used]

    labels, weights = targets.labels, targets.weights
    tokens = labels.flatten(0, 1)
    return BlockRows(rows(hidden), rows(labels[..., 1:]), rows(weights[..., 1:]), tokens, used)


def _head_rows(
    head: FrozenHead, labels: Tensor, weights: Tensor, config: TrainConfig, index: int
) -> tuple[HeadRows, Tensor]:
    """Return the head's rows in use and the labels as row numbers.

    With loss.head_sample n: the rows of all labels that weigh something and n random ones. The
    draw depends on seed and batch index alone, so replicas and a resumed run agree.
    """
    count = config.loss.head_sample
    if count == 0:
        return HeadRows(head.lm_head, head.embedding), labels
    generator = torch.Generator().manual_seed(((config.seed << 32) ^ index) % (1 << 63))
    drawn = torch.randint(len(head.lm_head), (count,), generator=generator)
    ids: Tensor = torch.unique(torch.cat((labels[weights > 0], drawn.to(labels.device))))
    # A label of weight 0 may be absent; any row serves, because its gradient is zero.
    rows = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return HeadRows(head.lm_head[ids], head.embedding, ids), rows
