"""Coverage: the share of trained tokens that drawn blocks reach, worked out and counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainer.assembly import Data, step_range
from trainer.contract.config import TrainConfig
from trainer.data.coverage import expected_coverage
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import BatchMaker, BatchPlan


def maker(masks: list[str], **settings: Any) -> tuple[BatchMaker, TrainConfig]:
    """Batches of documents whose trained tokens are the 1s."""
    data, config = laid_out(masks, **settings)
    return data.maker, config


def laid_out(
    masks: list[str], *, num_anchors: int, block_size: int = 3, packing: bool = True, **data: Any
) -> tuple[Data, TrainConfig]:
    """Documents whose trained tokens are the 1s, and the plan over them."""
    samples = tuple(
        Sample(i, np.zeros(len(mask), np.int32), np.array([c == "1" for c in mask]))
        for i, mask in enumerate(masks)
    )
    config = TrainConfig.from_dict(
        {
            "target": {"path": "unused"},
            "data": {
                "path": "unused",
                "max_length": 64,
                "token_budget": 256,
                "packing": packing,
                "max_anchors": num_anchors,
            }
            | data,
            "draft": {"mask_token_id": 5, "block_size": block_size},
            "loss": {"position_decay": 3.0},
        }
    )
    dataset = ChatDataset("made", "", samples)
    plan = BatchPlan(dataset.lengths, config.data, 0)
    return Data(dataset, plan, BatchMaker(dataset, plan, config)), config


def test_chance_of_every_token_is_that_of_an_anchor_in_the_places_before_it():
    # Anchors may stand on 1, 2, 3. Of blocks of 3, token 2 needs one on 1; 3 one on 1 or 2; 4 one
    # on 2 or 3; token 1 has none before it. One anchor: 0, 1/3, 2/3, 2/3; two: 0, 2/3, 1, 1.
    for num_anchors, epoch, run in (
        (1, (0 + 1 / 3 + 2 / 3 + 2 / 3) / 4, (0 + 5 / 9 + 8 / 9 + 8 / 9) / 4),
        (2, (0 + 2 / 3 + 1 + 1) / 4, (0 + 8 / 9 + 1 + 1) / 4),
        (9, 3 / 4, 3 / 4),
    ):
        batches, _ = maker(["01111"], num_anchors=num_anchors)
        found = expected_coverage([batches.make(0)], num_anchors, 3, epochs=2)
        assert found.per_epoch == pytest.approx(epoch)
        assert found.whole_run == pytest.approx(run)
        assert found.reachable == 3 / 4
        assert (found.num_trained, found.num_anchors) == (4, min(num_anchors, 3))


def test_run_that_ends_within_an_epoch_covers_that_share_of_it():
    # Tokens as above, one anchor: an epoch reaches 0, 1/3, 2/3, 2/3 of them.
    batches, _ = maker(["01111"], num_anchors=1)
    quarter = expected_coverage([batches.make(0)], 1, 3, epochs=0.25)
    assert quarter.whole_run == pytest.approx((1 / 3 + 2 / 3 + 2 / 3) / 4 / 4)
    # One epoch and a half leave out 1, 2/3 * 5/6, 1/3 * 2/3, 1/3 * 2/3.
    more = expected_coverage([batches.make(0)], 1, 3, epochs=1.5)
    assert more.whole_run == pytest.approx((0 + 4 / 9 + 7 / 9 + 7 / 9) / 4)


def test_steps_of_a_run_say_how_often_it_visits_the_data():
    # Eight rows of four make two batches an epoch; three steps of one batch are 1.5 visits.
    data, config = laid_out(["01111"] * 8, num_anchors=1, packing=False, max_batch_size=4)
    limited = replace(config, optim=replace(config.optim, epochs=6.0, max_steps=3))
    steps = step_range(limited, data.plan, 1)
    assert (data.plan.batches_in_epoch, data.epochs(steps)) == (2, 1.5)
    assert data.coverage(limited, steps).whole_run == pytest.approx((0 + 4 / 9 + 7 / 9 + 7 / 9) / 4)


def test_blocks_of_one_document_cover_nothing_of_the_next():
    # Each has one place, before its last token; the quota gives each its anchor.
    batches, _ = maker(["11", "11"], num_anchors=2, block_size=8)
    found = expected_coverage([batches.make(0)], 2, 8, epochs=1)
    assert (found.per_epoch, found.reachable) == (0.5, 0.5)


@pytest.mark.parametrize("packing", [True, False])
def test_expected_coverage_is_what_draws_give_on_average(packing: bool):
    rng = np.random.default_rng(2)
    masks = [
        "0" * int(rng.integers(1, 9))
        + "1" * int(rng.integers(2, 40))
        + "0" * int(rng.integers(0, 3))
        for _ in range(6)
    ] + ["0011110001111111110"]
    batches, config = maker(masks, num_anchors=7, block_size=5, packing=packing)
    plan = BatchPlan([len(mask) for mask in masks], config.data, 0)
    first = [batches.make(i) for i in range(plan.num_batches(1))]
    wanted = expected_coverage(first, 7, 5, epochs=1).per_epoch
    drawn = [counted(batches, plan, epoch, block_size=5) for epoch in range(400)]
    # the mean of 400 epochs: its standard error is measured, not guessed
    assert np.mean(drawn) == pytest.approx(wanted, abs=5 * np.std(drawn) / 20)


def counted(batches: BatchMaker, plan: BatchPlan, epoch: int, block_size: int) -> float:
    """Count the trained tokens that lie in a block of this epoch."""
    trained = covered = 0
    start, end = plan.num_batches(epoch) if epoch else 0, plan.num_batches(epoch + 1)
    for index in range(start, end):
        batch = batches.make(index)
        mask, owner = batch.loss_mask.numpy(), batch.document_ids.numpy()
        hit = np.zeros_like(mask)
        for row, anchor in zip(*np.nonzero(batch.anchor_keep.numpy()), strict=True):
            at = int(batch.anchor_positions[row, anchor])
            part = slice(at + 1, at + block_size)
            hit[row, part] |= owner[row, part] == owner[row, at]
        trained += mask.sum()
        covered += (mask & hit).sum()
    return float(covered / trained)


def test_low_coverage_is_told_with_what_to_change():
    batches, _ = maker(["0" + "1" * 60], num_anchors=2)
    found = expected_coverage([batches.make(0)], 2, 3, epochs=2)
    first, second = found.lines(2, 2)
    assert first.startswith(f"coverage: {found.per_epoch:.1%} of the trained tokens lie in a block")
    assert "30.0 trained tokens a block" in first
    assert "raise it, or train more epochs" in second
    full = expected_coverage([maker(["0" + "1" * 60], num_anchors=59)[0].make(0)], 59, 3, 2)
    assert len(full.lines(2, 59)) == 1


def test_row_without_a_trained_token_counts_nothing():
    batches, _ = maker(["000"], num_anchors=2)
    found = expected_coverage([batches.make(0)], 2, 3, epochs=1)
    assert (found.num_trained, found.per_epoch, found.reachable) == (0, 0.0, 0.0)
