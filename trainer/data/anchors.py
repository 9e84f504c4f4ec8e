"""Where blocks start: random positions, drawn again on every visit of a sample.

The draw of a document depends on its own seed alone, so threads and a resumed run agree whatever
else is in the batch; only how many of its positions are used can depend on the row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Seed = tuple[int, int, int]


def anchor_seed(run_seed: int, epoch: int, sample_id: int) -> Seed:
    """Return the seed of one visit of one sample."""
    return (run_seed, epoch, sample_id)


def valid_anchors(
    loss_mask: npt.NDArray[np.bool_], document_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Return where a block may start: on a trained token whose successor is trained as well.

    The rest of the block may run past the end (those slots weigh nothing), so that short answers
    are not starved. Shapes: [S], [S] -> [S].
    """
    valid = np.zeros_like(loss_mask)
    valid[:-1] = loss_mask[:-1] & loss_mask[1:] & (document_ids[:-1] == document_ids[1:])
    return valid & (document_ids >= 0)


def sample_anchors(
    loss_mask: npt.NDArray[np.bool_],
    document_ids: npt.NDArray[np.int32],
    num_anchors: int,
    seeds: Sequence[Seed],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draw the anchors of every row without replacement, ascending, padded to num_anchors.

    ``seeds[d]`` belongs to document d. A row with more valid positions than anchors shares them
    among its documents in proportion to their valid positions. Shapes: [R, S], [R, S] ->
    positions [R, num_anchors] (0 where padded), keep [R, num_anchors].
    """
    rows = loss_mask.shape[0]
    positions = np.zeros((rows, num_anchors), np.int64)
    keep = np.zeros((rows, num_anchors), np.bool_)
    for row in range(rows):
        valid = np.flatnonzero(valid_anchors(loss_mask[row], document_ids[row]))
        owner = document_ids[row, valid]
        documents, counts = np.unique(owner, return_counts=True)
        chosen = [
            np.random.default_rng(seeds[int(document)]).permutation(valid[owner == document])[
                :quota
            ]
            for document, quota in zip(documents, quotas(counts, num_anchors), strict=True)
        ]
        if chosen:
            drawn = np.sort(np.concatenate(chosen))
            positions[row, : len(drawn)] = drawn
            keep[row, : len(drawn)] = True
    return positions, keep


def quotas(counts: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Share ``total`` in proportion to ``counts``, never above them; largest remainders first.

    Ties go to the earlier one. Shapes: [documents] -> [documents].
    """
    if counts.sum() <= total:
        return counts.copy()
    share: npt.NDArray[np.int64]
    exact = counts * total
    share = exact // counts.sum()
    order = np.argsort(-(exact % counts.sum()), kind="stable")
    share[order[: total - share.sum()]] += 1
    return share
