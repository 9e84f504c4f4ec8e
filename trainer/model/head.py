"""Cross-entropy against a frozen head: the whole logits never exist.

The gradient with respect to the hidden states is made chunk by chunk in the forward, where a
chunk's logits are at hand anyway, and only scaled in the backward. All chunks use the same memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.model import scaled_head
from trainer.model.logits import kernels_for, logits_memory, padded, score
from trainer.model.scaled_head import ScaledHead, scale_rows

# (cross-entropies [m], given weights [m]) -> weights [m]; the rows are whole blocks.
Weigh = Callable[[Tensor, Tensor], Tensor]

# Of the logits of a chunk and what is made of them. Long chunks fill a GPU: the gradient's product
# has m / 128 x D / 256 tiles, so with few rows its last tiles leave most of the card idle.
CHUNK_BYTES = 2_000_000_000


@dataclass(frozen=True)
class HeadPass:
    """How rows go through the head.

    chunk_rows: rows of logits that exist at one time. weigh: makes the weights of a chunk from its
    cross-entropies; None takes them as given. block_rows: rows of a block, which a chunk never
    parts when ``weigh`` is given. top_k: how many of the best logits of a row are wanted as well.
    fp8: the same head in FP8, for products that shall run so.
    """

    chunk_rows: int
    weigh: Weigh | None = None
    block_rows: int = 1
    top_k: int = 0
    fp8: ScaledHead | None = None

    def chunks(self, num_rows: int) -> list[slice]:
        """Return the rows of each chunk."""
        unit = 1 if self.weigh is None else self.block_rows
        most, units = max(1, self.chunk_rows // unit), -(-num_rows // unit)
        num_chunks = max(1, -(-units // most))
        step = max(1, -(-units // num_chunks)) * unit  # equal ones: one shape, one graph
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def weights(self, entropy: Tensor, given: Tensor) -> Tensor:
        """Return the weights of a chunk's rows. Shapes: [m] twice -> [m]."""
        return given if self.weigh is None else self.weigh(entropy, given)


@dataclass(frozen=True)
class HeadResult:
    """What rows gave.

    Shapes: loss [] fp32, differentiable; hit [M] bool; weights [M] fp32; top [M, k] the best
    logits, differentiable, best first; top_rows [M, k] their rows of the head.
    """

    loss: Tensor
    hit: Tensor
    weights: Tensor
    top: Tensor
    top_rows: Tensor


def head_loss(
    x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, how: HeadPass
) -> HeadResult:
    """Return the sum of weights x cross-entropy(x @ head.T, labels), and what came with it.

    Shapes: x [M, D], head [V, D], labels and weights [M].
    """
    apply: Any = _HeadLoss.apply  # torch gives it no types
    return HeadResult(*apply(x, head, labels, weights, how))


def rows_at_once(head: Tensor) -> int:
    """Return how many rows CHUNK_BYTES hold, at least one. Shapes: head [V, D].

    On CUDA the gradient takes the place of the logits (in FP8 it has half as much beside them);
    elsewhere both and an fp32 copy exist.
    """
    size = head.element_size()
    each = size if head.is_cuda else 2 * size + torch.float32.itemsize
    return max(1, CHUNK_BYTES // (len(head) * each))


@dataclass(frozen=True)
class ChunkScore:
    """What a chunk's logits gave. Shapes: entropy and weights [m] fp32, hit [m] bool."""

    entropy: Tensor
    weights: Tensor
    hit: Tensor


@dataclass(frozen=True)
class ChunkLoss(ChunkScore):
    """The same, and ``steep``: the gradient of the weighted sum of the entropies.

    Shapes: steep [m, V] in the logits' dtype.
    """

    steep: Tensor


def chunk_loss(
    logits: Tensor, labels: Tensor, given: Tensor, how: HeadPass, share: float = 1.0
) -> ChunkLoss:
    """Return the losses of a chunk; its gradient is that of ``share`` times the weighted sum.

    The gradient may take the place of the logits. Shapes: logits [m, V], labels and given weights
    [m].
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        entropy, sums, best = kernels.score(logits, labels)
        weights = how.weights(entropy, given)
        steep = kernels.slope(logits, sums, labels, weights * share)
        return ChunkLoss(entropy, weights, best == labels, steep)
    hit = logits.argmax(-1) == labels
    wide = F.log_softmax(logits, -1, dtype=torch.float32)
    label = labels[:, None]
    entropy = -wide.gather(1, label).squeeze(1)
    weights = how.weights(entropy, given)
    wide.exp_()  # softmax, in place: this is the largest tensor of a step
    wide.scatter_add_(1, label, wide.new_full((1, 1), -1.0).expand_as(label))
    wide.mul_(weights[:, None] * share)
    return ChunkLoss(entropy, weights, hit, wide.to(logits.dtype))


class Products:
    """The products of rows with a head, a chunk at a time, all chunks in the same memory.

    Shapes: x [M, D], head [V, D]; ``parts``: the rows of each chunk.
    """

    def __init__(self, x: Tensor, head: Tensor, parts: list[slice], fp8: ScaledHead | None) -> None:
        self._x, self._head, self._fp8 = x, head, fp8
        width = len(head) if fp8 is None else padded(len(head))
        self._memory = logits_memory(parts, width, x)
        if fp8 is not None and fp8.columns is not None:
            self._shares = torch.empty_like(self._memory, dtype=torch.float8_e4m3fn)

    def logits(self, part: slice) -> Tensor:
        """Return the logits of a chunk; those of the last one are gone. Shapes: -> [m, V]."""
        memory = self._memory[: part.stop - part.start]
        if self._fp8 is None:
            return torch.mm(self._x[part], self._head.t(), out=memory)
        return self._fp8.logits(*scale_rows(self._x[part]), memory)

    def gradient(
        self, logits: Tensor, labels: Tensor, given: Tensor, how: HeadPass, out: Tensor
    ) -> ChunkScore:
        """Write the gradient with respect to a chunk's rows; its logits are gone then.

        Shapes: logits [m, V], labels and given weights [m], out [m, D].
        """
        if self._fp8 is None or self._fp8.columns is None:
            made = chunk_loss(logits, labels, given, how)
            torch.mm(made.steep, self._head, out=out)
            return made
        found = score(logits, labels)
        weights = how.weights(found.entropy, given)
        shares = self._shares[: len(logits)]
        scales = scaled_head.shares(logits, found, labels, weights, shares)
        self._fp8.gradient(shares, scales, out)
        scaled_head.add_label(out, self._head, found.entropy, labels, weights)
        return ChunkScore(found.entropy, weights, found.best == labels)


class _HeadLoss(torch.autograd.Function):
    """Makes the gradient in the forward: a chunk needs two products and is then forgotten."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, how: HeadPass
    ) -> tuple[Tensor, ...]:
        """Return the fields of HeadResult."""
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad, used = torch.empty_like(x), torch.empty_like(weights)
        hit = torch.empty_like(labels, dtype=torch.bool)
        top = x.new_empty(len(x), how.top_k)
        top_rows = labels.new_empty(len(x), how.top_k)
        parts = how.chunks(len(x))
        products = Products(x, head, parts, how.fp8)
        for part in parts:
            logits = products.logits(part)
            if how.top_k:
                top[part], top_rows[part] = logits.topk(how.top_k, -1)
            made = products.gradient(logits, labels[part], weights[part], how, grad[part])
            hit[part], used[part] = made.hit, made.weights
            total += (made.entropy * made.weights).sum()
        ctx.save_for_backward(grad, head, top_rows)
        ctx.mark_non_differentiable(hit, used, top_rows)
        return total, hit, used, top, top_rows

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        """Scale the stored gradient; that of a best logit is its row of the head."""
        grad, head, top_rows = ctx.saved_tensors
        made = grad * upstream[0].to(grad.dtype)
        if top_rows.numel():
            made += F.embedding_bag(
                top_rows, head, per_sample_weights=upstream[3].to(head.dtype), mode="sum"
            )
        return made, None, None, None, None
