"""How much of the trained tokens an epoch reaches.

A block trains the tokens after its anchor, so a trained token counts as covered when an anchor is
drawn among the B - 1 positions before it. Anchors of a document are drawn without replacement;
the chance of missing all of a token's positions follows from their number alone, and nothing has
to be drawn to know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.anchors import quotas, valid_anchors
from trainer.data.packing import Batch

_FEW = 0.5  # below this, an epoch leaves most of what the answers say unseen


@dataclass(frozen=True)
class Coverage:
    """Expected shares of trained tokens: of one epoch, of the whole run, and of any epoch.

    reachable: the first token of an answer has no anchor before it and is never trained.
    """

    num_trained: int
    num_anchors: int
    per_epoch: float
    whole_run: float
    reachable: float

    @property
    def is_low(self) -> bool:
        """Whether an epoch leaves most of what it could reach out."""
        return self.per_epoch < _FEW * self.reachable

    def lines(self, epochs: float, max_anchors: int) -> list[str]:
        """Return what a person should know at the start of a run."""
        told = [
            (
                f"coverage: {self.per_epoch:.1%} of the trained tokens lie in a block an epoch,"
                f" {self.whole_run:.1%} in {epochs:.3g} epochs (at most {self.reachable:.1%});"
                f" {self.num_trained / max(1, self.num_anchors):.1f} trained tokens a block"
            )
        ]
        if self.is_low:
            told.append(
                f"coverage is low: data.max_anchors {max_anchors} leave most trained tokens of an"
                " epoch out; raise it, or train more epochs"
            )
        return told


def expected_coverage(
    batches: Sequence[Batch], num_anchors: int, block_size: int, epochs: float
) -> Coverage:
    """Return what ``num_anchors`` a row of these batches cover, on average over all draws.

    epochs: visits of the data in the whole run; a part of one visits that share of its batches.
    """
    missed: list[npt.NDArray[np.float64]] = [np.zeros(0)]
    drawn = 0
    for batch in batches:
        mask, owner = batch.loss_mask.numpy(), batch.document_ids.numpy()
        for row in range(len(mask)):
            found, used = _missed(mask[row], owner[row], num_anchors, block_size)
            missed.append(found)
            drawn += used
    chances = np.concatenate(missed)
    whole, part = divmod(epochs, 1.0)
    never = chances**whole * (1 - part * (1 - chances))
    return Coverage(
        len(chances),
        drawn,
        float(1 - chances.mean()) if len(chances) else 0.0,
        float(1 - never.mean()) if len(chances) else 0.0,
        float((chances < 1).mean()) if len(chances) else 0.0,
    )


def _missed(
    mask: npt.NDArray[np.bool_], owner: npt.NDArray[np.int32], num_anchors: int, block_size: int
) -> tuple[npt.NDArray[np.float64], int]:
    """Return, a trained token, the chance that no block holds it; and the blocks of the row.

    Shapes: [S], [S] -> [trained].
    """
    valid = valid_anchors(mask, owner)
    documents, starts = np.unique(owner[owner >= 0], return_index=True)
    counts = np.array([valid[owner == document].sum() for document in documents], np.int64)
    shares = quotas(counts, num_anchors)
    total, share = np.zeros(len(mask), np.int64), np.zeros(len(mask), np.int64)
    begin = np.zeros(len(mask), np.int64)
    for document, start, count, quota in zip(documents, starts, counts, shares, strict=True):
        inside = owner == document
        total[inside], share[inside], begin[inside] = count, quota, start
    before = np.concatenate([[0], np.cumsum(valid)])  # valid places before each position
    here = np.flatnonzero(mask & (owner >= 0))
    near = before[here] - before[np.maximum(here - block_size + 1, begin[here])]
    return _none_drawn(total[here], near, share[here]), int(shares.sum())


def _none_drawn(
    total: npt.NDArray[np.int64], near: npt.NDArray[np.int64], share: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the chance that ``share`` of ``total`` places, drawn at once, hold none of ``near``.

    C(total - near, share) / C(total, share), as a product over ``near``.
    """
    chance = np.ones(len(total))
    for taken in range(int(near.max(initial=0))):
        counts = taken < near
        left = np.maximum(total - taken, 1)
        chance = np.where(counts, chance * np.maximum(total - share - taken, 0) / left, chance)
    return chance
