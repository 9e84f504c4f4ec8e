"""The loss of a batch: decayed cross-entropy of every drafted slot, as sums.

Sums and not means, because the weight sum that normalises them is that of the global batch. The
head is frozen, so its gradient with respect to the hidden states is made chunk by chunk in the
forward and the whole logits never exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.model.draft import DraftModel
from trainer.model.masks import BlockLayout
from trainer.model.target import FrozenHead


@dataclass(frozen=True)
class LossSums:
    """What a micro-batch adds to the global batch; tensors stay on the device, nothing waits.

    loss_sum: differentiable. weight_sum: what the loss is divided by. num_anchors: blocks.
    hits, counts [B - 1]: right guesses and trained slots by position 1..B-1. accepted_sum: leading
    right guesses, teacher-forced, over all blocks. With loss.head_sample a guess is right among
    the sampled rows only, so accuracies read too high then.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    num_anchors: Tensor
    hits: Tensor
    counts: Tensor
    accepted_sum: Tensor

    def detach(self) -> "LossSums":
        """Return the same sums outside the graph."""
        return LossSums(**{name: value.detach() for name, value in vars(self).items()})

    @classmethod
    def total(cls, parts: Sequence["LossSums"]) -> "LossSums":
        """Add micro-batches; all on one device."""
        return cls(
            **{
                name: sum(vars(p)[name] for p in parts[1:]) + vars(parts[0])[name]
                for name in vars(parts[0])
            }
        )

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
    draft: DraftModel, embedding: Tensor, batch: Batch, targets: BlockTargets, target_hidden: Tensor
) -> Tensor:
    """Run the draft over every block. Shapes: target_hidden [R, S, n * D] -> [R, N, B, D]."""
    layout = BlockLayout.of(
        batch.anchor_positions, batch.anchor_keep, batch.document_ids, batch.position_ids
    )
    hidden: Tensor = draft(
        F.embedding(targets.block_ids.flatten(1), embedding),
        target_hidden,
        batch.position_ids,
        targets.position_ids.flatten(1),
        draft.attention.masks(layout, draft.config.rules),
    )
    return hidden.view(*targets.labels.shape, -1)


def draft_loss(
    draft: DraftModel, head: FrozenHead, batch: Batch, target_hidden: Tensor, config: TrainConfig
) -> LossSums:
    """Return the sums of one micro-batch; everything on the draft's device.

    Shapes: target_hidden [R, S, n * D] as data.packing.place_features lays it.
    """
    size = draft.config.block_size
    targets = block_targets(batch, size, draft.config.mask_token_id, config.position_decay)
    hidden = block_hidden(draft, head.embedding, batch, targets, target_hidden)
    weights = targets.weights[..., 1:]  # the anchor's own slot never reaches the head
    rows, labels = hidden[..., 1:, :].flatten(0, 2), targets.labels[..., 1:].flatten()
    wanted = weights.flatten()
    used: Tensor | None = None
    if not rows.is_cuda:  # fewer products; on CUDA the changing shape and the wait cost more
        used = wanted.nonzero().squeeze(1)
        rows, labels, wanted = rows[used], labels[used], wanted[used]
    table, labels = _head_rows(head, labels, wanted, config, batch.index)
    loss_sum, hit = head_loss(rows, table, labels, wanted, config.loss.chunk_rows)
    if used is not None:
        hit = torch.zeros(weights.numel(), dtype=torch.bool).index_put((used,), hit)
    trained = weights > 0
    right = hit.view(weights.shape) & trained
    return LossSums(
        loss_sum=loss_sum,
        weight_sum=weights.sum(),
        num_anchors=batch.anchor_keep.sum(),
        hits=right.sum((0, 1)),
        counts=trained.sum((0, 1)),
        accepted_sum=right.int().cumprod(-1).sum(),
    )


def _head_rows(
    head: FrozenHead, labels: Tensor, weights: Tensor, config: TrainConfig, index: int
) -> tuple[Tensor, Tensor]:
    """Return the head's rows in use and the labels as row numbers.

    With loss.head_sample n: the rows of all labels that weigh something and n random ones. The
    draw depends on seed and batch index alone, so replicas and a resumed run agree.
    """
    count = config.loss.head_sample
    if count == 0:
        return head.lm_head, labels
    generator = torch.Generator().manual_seed(((config.seed << 32) ^ index) % (1 << 63))
    drawn = torch.randint(len(head.lm_head), (count,), generator=generator)
    ids: Tensor = torch.unique(torch.cat((labels[weights > 0], drawn.to(labels.device))))
    # A label of weight 0 may be absent; any row serves, because its gradient is zero.
    return head.lm_head[ids], torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)


def head_loss(
    x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Return sum of weights x cross-entropy(x @ head.T, labels), and which argmax was right.

    Shapes: x [M, D], head [V, D], labels and weights [M] -> loss [] fp32, hit [M] bool.
    """
    apply: Any = _HeadLoss.apply  # torch gives it no types
    made: tuple[Tensor, Tensor] = apply(x, head, labels, weights, chunk_rows)
    return made


class _HeadLoss(torch.autograd.Function):
    """Makes the gradient in the forward: a chunk needs two products and is then forgotten."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the hits, as head_loss says."""
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad = torch.empty_like(x)
        hit = torch.empty_like(labels, dtype=torch.bool)
        for start in range(0, len(x), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = x[part] @ head.t()
            label = labels[part, None]
            hit[part] = logits.argmax(-1) == labels[part]
            slope = F.log_softmax(logits, -1, dtype=torch.float32)
            total -= (slope.gather(1, label).squeeze(1) * weights[part]).sum()
            slope.exp_()  # softmax, in place: this is the largest tensor of a step
            slope.scatter_add_(1, label, slope.new_full((1, 1), -1.0).expand_as(label))
            slope.mul_(weights[part, None])
            torch.mm(slope.to(x.dtype), head, out=grad[part])
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hit)
        return total, hit

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        """Scale the stored gradient."""
        (grad,) = ctx.saved_tensors
        return grad * upstream[0].to(grad.dtype), None, None, None, None
