"""Plans and batches: every sample once an epoch, budgets kept, pure in (seed, index)."""

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.contract.config import DataConfig, TrainConfig
from trainer.data.anchors import anchor_seed, sample_anchors
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import (
    Batch,
    BatchMaker,
    BatchPlan,
    anchors_of,
    most_anchors,
    place_features,
)
from trainer.errors import DataError

LENGTHS = np.random.default_rng(0).integers(5, 60, 300).tolist()


def data_config(*, packing: bool) -> DataConfig:
    return DataConfig(
        path="x", max_length=64, token_budget=256, max_batch_size=7, packing=packing, max_anchors=16
    )


def epoch_of(plan: BatchPlan, epoch: int) -> list[list[list[int]]]:
    start, end = (plan.num_batches(e) if e else 0 for e in (epoch, epoch + 1))
    found = [plan.batch(i) for i in range(start, end)]
    assert {e for e, _ in found} == {epoch}
    return [rows for _, rows in found]


@pytest.mark.parametrize("packing", [False, True])
def test_every_epoch_visits_every_sample_once_in_its_own_order(packing: bool):
    plan = BatchPlan(LENGTHS, data_config(packing=packing), seed=3)
    orders = [[s for rows in epoch_of(plan, e) for row in rows for s in row] for e in range(3)]
    assert [sorted(order) for order in orders] == [list(range(300))] * 3
    assert orders[0] != orders[1] != orders[2]


def test_rows_keep_both_budgets_with_padding():
    for rows in epoch_of(BatchPlan(LENGTHS, data_config(packing=False), seed=3), 0):
        longest = max(LENGTHS[row[0]] for row in rows)
        assert len(rows) <= 7
        assert len(rows) * -(-longest // 16) * 16 <= 256


def test_packed_batches_are_one_row_within_both_budgets():
    for rows in epoch_of(BatchPlan(LENGTHS, data_config(packing=True), seed=3), 0):
        assert len(rows) == 1
        assert len(rows[0]) <= 7
        assert sum(LENGTHS[s] for s in rows[0]) <= 256


def test_sorting_and_packing_leave_little_padding():
    lengths = np.random.default_rng(1).integers(256, 3072, 2000).tolist()
    for packing, least in ((False, 0.93), (True, 0.93)):
        config = DataConfig(path="x", token_budget=49152, max_batch_size=64, packing=packing)
        plan = BatchPlan(lengths, config, seed=0)
        padded = 0
        for rows in epoch_of(plan, 0):
            longest = max(lengths[row[0]] for row in rows)
            padded += 49152 if packing else len(rows) * -(-longest // 16) * 16
        assert sum(lengths) / padded > least


def test_epochs_in_parts_count_batches_in_parts():
    plan = BatchPlan([10] * 40, data_config(packing=False), seed=0)
    assert plan.batches_in_epoch == 6  # 40 samples, 7 a batch
    assert (plan.num_batches(2.5), plan.num_batches(0.5), plan.num_batches(0.01)) == (15, 3, 1)


def test_no_epoch_is_laid_out_beyond_the_batches_that_are_asked_for():
    plan = BatchPlan([10] * 40, data_config(packing=False), seed=0)
    # Laying out 10**15 epochs would not end; 3 epochs hold 18 batches.
    assert plan.num_batches(1e15, at_most=13) == 13
    assert (plan.num_batches(2, at_most=13), plan.num_batches(2.5, at_most=14)) == (12, 14)


def test_a_late_batch_is_the_same_for_a_plan_that_starts_there():
    config = data_config(packing=True)
    walked, jumped = BatchPlan(LENGTHS, config, seed=3), BatchPlan(LENGTHS, config, seed=3)
    last = walked.num_batches(4) - 1
    found = [walked.batch(i) for i in range(last + 1)][-1]
    assert jumped.batch(last) == found
    assert BatchPlan(LENGTHS, config, seed=4).batch(last) != found


def test_sample_longer_than_the_budget_is_refused():
    with pytest.raises(DataError, match="token_budget 256: the longest sample has 300"):
        BatchPlan([10, 300], data_config(packing=True), seed=0)


def dataset() -> ChatDataset:
    samples = []
    for i, length in enumerate(LENGTHS[:60]):
        ids = np.arange(length, dtype=np.int32) + i
        samples.append(Sample(i, ids, np.arange(length) >= 2))
    return ChatDataset("made", "0" * 64, tuple(samples))


@pytest.fixture
def maker(train_config: Callable[..., TrainConfig]) -> Callable[..., BatchMaker]:
    def make(packing: bool) -> BatchMaker:
        config = train_config(data={"packing": packing, "max_batch_size": 7})
        plan = BatchPlan(LENGTHS[:60], config.data, config.seed)
        return BatchMaker(dataset(), plan, config)

    return make


def test_packed_batch_has_the_constant_shape_and_restarts_positions(
    maker: Callable[..., BatchMaker],
):
    batch = maker(True).make(0)
    assert batch.input_ids.shape == (1, 256)
    assert batch.anchor_positions.shape == (1, 16)
    for number, document in enumerate(batch.documents):
        part = slice(document.start, document.start + document.length)
        assert set(batch.document_ids[0, part].tolist()) == {number}
        assert batch.position_ids[0, part].tolist() == list(range(document.length))
        wanted = [i + document.sample_id for i in range(document.length)]
        assert batch.input_ids[0, part].tolist() == wanted
    used = sum(d.length for d in batch.documents)
    assert batch.num_tokens == used
    assert set(batch.document_ids[0, used:].tolist()) <= {-1}
    assert not batch.loss_mask[0, used:].any()


def test_row_batch_is_padded_to_a_multiple_of_16(maker: Callable[..., BatchMaker]):
    batch = maker(False).make(0)
    longest = max(d.length for d in batch.documents)
    assert batch.input_ids.shape[1] == -(-longest // 16) * 16
    assert [d.row for d in batch.documents] == list(range(len(batch.documents)))
    assert all(d.start == 0 for d in batch.documents)


def test_anchors_stand_on_trained_tokens_and_are_counted(maker: Callable[..., BatchMaker]):
    for packing in (False, True):
        batch = maker(packing).make(1)
        at = batch.anchor_positions
        for mask in (batch.loss_mask.gather(1, at), batch.loss_mask.gather(1, at + 1)):
            assert mask[batch.anchor_keep].all()
        assert batch.num_anchors == int(batch.anchor_keep.sum())


def equal(first: Batch, second: Batch) -> bool:
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_threads_make_the_same_batches_in_any_order(maker: Callable[..., BatchMaker]):
    shared, alone = maker(True), maker(True)
    found: dict[int, Batch] = {}

    def work(first: int) -> None:
        for index in reversed(range(first, 24, 3)):
            found[index] = shared.make(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(found[i], alone.make(i)) for i in range(24))


def test_features_lie_where_their_documents_lie(maker: Callable[..., BatchMaker]):
    batch = maker(True).make(0)
    features = [t[:, None].float() for t in batch.document_tokens()]
    used_before = torch.full((1, 256, 1), 7.0)
    for placed in (place_features(features, batch), place_features(features, batch, used_before)):
        assert placed.shape == (1, 256, 1)
        assert torch.equal(placed[..., 0].long(), batch.input_ids)


def test_mask_token_in_the_data_stops_the_maker(train_config: Callable[..., TrainConfig]):
    config = train_config(draft={"mask_token_id": 5})
    plan = BatchPlan(LENGTHS[:60], config.data, 0)
    with pytest.raises(DataError, match="mask_token_id 5"):
        BatchMaker(dataset(), plan, config)


@pytest.mark.parametrize("packing", [True, False])
def test_plan_keeps_little_more_than_the_lengths(packing: bool):
    lengths = np.random.default_rng(1).integers(40, 3000, 100_000)
    config = DataConfig(path="x", packing=packing)
    tracemalloc.start()
    plan = BatchPlan(lengths, config, seed=0)
    plan.batch(plan.num_batches(3) - 1)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Two epochs may be kept, each 4 bytes a sample and 16 a batch; lists would take 100 a sample.
    assert kept < 16 * len(lengths)


def laid_out(config: TrainConfig) -> tuple[BatchPlan, BatchMaker]:
    plan = BatchPlan(LENGTHS[:60], config.data, config.seed)
    return plan, BatchMaker(dataset(), plan, config)


def test_declared_row_lengths_give_few_shapes_and_lose_no_sample(
    train_config: Callable[..., TrainConfig],
):
    rows = {"row_lengths": (16, 40, 64), "max_batch_size": 7}
    plan, maker = laid_out(train_config(data=rows))
    shapes = [(7, 16), (6, 40), (4, 64)]  # 256 tokens, 7 rows at most
    assert plan.shapes() == shapes
    batches = [maker.make(index) for index in range(plan.num_batches(4))]
    assert {tuple(batch.input_ids.shape) for batch in batches} <= set(shapes)
    first = [batch for batch in batches if batch.epoch == 0]
    assert sorted(i for batch in first for i in batch.sample_ids) == list(range(60))
    for batch in batches:  # a row beyond the samples holds nothing that is trained on
        filled = (batch.document_ids >= 0).any(1)
        assert int(filled.sum()) == len(batch.documents)
        assert not batch.anchor_keep[~filled].any()


@pytest.mark.parametrize(
    ("data", "shapes"),
    [
        ({"row_lengths": (16, 40, 64), "max_batch_size": 7}, [(7, 16), (6, 40), (4, 64)]),
        ({"packing": True}, [(1, 256)]),
    ],
)
def test_examples_of_a_plan_are_one_batch_of_each_of_its_shapes(
    train_config: Callable[..., TrainConfig],
    data: dict[str, object],
    shapes: list[tuple[int, int]],
):
    _, maker = laid_out(train_config(data=data))
    examples = maker.examples()
    assert [tuple(batch.input_ids.shape) for batch in examples] == shapes
    assert all(batch.num_anchors for batch in examples)


@pytest.mark.parametrize(
    ("width", "anchors"),
    # 16 tokens have 15 successors; 64 have 63, rounded up to 64; never more than max_anchors.
    [(1, 1), (2, 16), (16, 16), (17, 16), (18, 32), (64, 50), (4096, 50)],
)
def test_rows_have_no_more_anchors_than_places(width: int, anchors: int):
    assert anchors_of(width, DataConfig(path="x", max_anchors=50)) == anchors


@pytest.mark.parametrize(
    ("data", "most"),
    [
        # 7 rows of 16 anchors, 6 of 48 (40 tokens) or 4 of 50.
        ({"row_lengths": (16, 40, 64)}, 6 * 48),
        ({"row_lengths": (64,)}, 4 * 50),
        # Any multiple of 16: 5 rows of 48 tokens have 240 anchors, 7 of 32 have 224.
        ({}, 240),
        ({"packing": True}, 50),
    ],
)
def test_batch_with_most_anchors_is_found(data: dict[str, Any], most: int):
    config = replace(data_config(packing=False), max_anchors=50, **data)
    assert most_anchors(config) == most


def test_short_rows_draw_the_anchors_that_they_would_draw_beside_more_padding(
    train_config: Callable[..., TrainConfig],
):
    config = train_config(
        data={"row_lengths": (16, 40, 64), "max_batch_size": 7, "max_anchors": 50}
    )
    plan, maker = laid_out(config)
    found = set()
    for index in range(plan.num_batches(2)):
        batch = maker.make(index)
        found.add((batch.input_ids.shape[1], batch.anchor_positions.shape[1]))
        seeds = [anchor_seed(config.seed, batch.epoch, i) for i in batch.sample_ids]
        mask, owner = batch.loss_mask.numpy(), batch.document_ids.numpy()
        wide, keep = sample_anchors(mask, owner, 50, seeds)
        for row in range(len(wide)):
            drawn = batch.anchor_positions[row][batch.anchor_keep[row]]
            assert drawn.tolist() == wide[row][keep[row]].tolist()
    assert found == {(16, 16), (40, 48), (64, 50)}
