"""Cross-entropy against a frozen head: the whole logits never exist.

The gradient with respect to the hidden states is made chunk by chunk in the forward, where a
chunk's logits are at hand anyway, and only scaled in the backward. All chunks use the same memory.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# (cross-entropies [m], given weights [m]) -> weights [m]; the rows are whole blocks.
Weigh = Callable[[Tensor, Tensor], Tensor]

# Of the logits of a chunk and what is made of them. Long chunks fill a GPU: the gradient's product
# has m / 128 x D / 256 tiles, so with few rows its last tiles leave most of the card idle.
CHUNK_BYTES = 2_000_000_000
_ROW_UNIT = 16  # elements; every row of logits begins aligned, whatever the vocabulary


@dataclass(frozen=True)
class HeadPass:
    """How rows go through the head.

    chunk_rows: rows of logits that exist at one time. weigh: makes the weights of a chunk from its
    cross-entropies; None takes them as given. block_rows: rows of a block, which a chunk never
    parts when ``weigh`` is given. top_k: how many of the best logits of a row are wanted as well.
    """

    chunk_rows: int
    weigh: Weigh | None = None
    block_rows: int = 1
    top_k: int = 0

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


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton's kernels; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    return head_kernels


def rows_at_once(head: Tensor) -> int:
    """Return how many rows CHUNK_BYTES hold, at least one. Shapes: head [V, D].

    On CUDA the gradient takes the place of the logits; elsewhere both and an fp32 copy exist.
    """
    size = head.element_size()
    each = size if head.is_cuda else 2 * size + torch.float32.itemsize
    return max(1, CHUNK_BYTES // (len(head) * each))


def logits_memory(parts: list[slice], num_columns: int, like: Tensor) -> Tensor:
    """Return memory for the logits of the longest of the chunks. Shapes: [m, num_columns].

    Its rows begin aligned: products and kernels are as fast, and compile once, for any number of
    columns.
    """
    most = max((part.stop - part.start for part in parts), default=0)
    return like.new_empty(most, -(-num_columns // _ROW_UNIT) * _ROW_UNIT)[:, :num_columns]


@dataclass(frozen=True)
class ChunkLoss:
    """What a chunk's logits gave.

    Shapes: entropy and weights [m] fp32, hit [m] bool, steep [m, V] in the logits' dtype, the
    gradient of the weighted sum of the entropies.
    """

    entropy: Tensor
    weights: Tensor
    hit: Tensor
    steep: Tensor


def chunk_loss(
    logits: Tensor, labels: Tensor, given: Tensor, how: HeadPass, share: float = 1.0
) -> ChunkLoss:
    """Return the losses of a chunk; its gradient is that of ``share`` times the weighted sum.

    The gradient may take the place of the logits. Shapes: logits [m, V], labels and given weights
    [m].
    """
    kernels = _kernels() if logits.is_cuda else None
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
        memory = logits_memory(parts, len(head), x)
        for part in parts:
            logits = torch.mm(x[part], head.t(), out=memory[: part.stop - part.start])
            if how.top_k:
                top[part], top_rows[part] = logits.topk(how.top_k, -1)
            made = chunk_loss(logits, labels[part], weights[part], how)
            hit[part], used[part] = made.hit, made.weights
            total += (made.entropy * made.weights).sum()
            torch.mm(made.steep, head, out=grad[part])
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
