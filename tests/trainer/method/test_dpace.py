"""D-PACE: weights by hand, the fused loss against plain autograd."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.loss import block_hidden, block_targets, dpace_weights, draft_loss
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.target import FrozenHead

MakeConfig = Callable[..., DraftConfig]
MakeTrainConfig = Callable[..., TrainConfig]
Made = tuple[DraftModel, FrozenHead, Batch, Tensor]


def test_weights_of_a_block_are_the_hand_computed_ones():
    entropy = -torch.tensor([[0.5, 0.25, 1.0]]).log()
    # smoothed by 0.5: .75, .625, 1; their products: .75, .46875, .46875; sums from the right
    found = dpace_weights(entropy, torch.ones(1, 3, dtype=torch.bool), 0.5)
    torch.testing.assert_close(found, torch.tensor([[1.6875, 0.9375, 0.46875]]))


def test_slots_that_are_not_trained_neither_count_nor_lessen_a_product():
    entropy = -torch.tensor([[0.5, 0.01, 1.0, 0.01], [0.5, 0.25, 0.3, 0.3]]).log()
    trained = torch.tensor([[True, False, True, False], [False, False, False, False]])
    # products of the trained: .75, .75; sums from the right: 1.5, .75
    found = dpace_weights(entropy, trained, 0.5)
    torch.testing.assert_close(found, torch.tensor([[1.5, 0, 0.75, 0], [0, 0, 0, 0]]))


def test_alpha_of_one_weighs_a_slot_by_the_number_of_slots_from_it_on():
    found = dpace_weights(torch.rand(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0)
    assert found.tolist() == [[4.0, 3.0, 2.0, 1.0]]


@pytest.fixture
def made(draft_config: MakeConfig, two_documents: Batch) -> Made:
    torch.manual_seed(0)
    draft = DraftModel(draft_config(vocab_size=50, block_size=5), seed=1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    head = FrozenHead(torch.randn(50, 32), torch.randn(50, 32) * 0.3)
    return draft, head, two_documents, torch.randn(1, 18, 64)


@pytest.mark.parametrize("chunk_rows", [1, 5, 2048])
def test_loss_and_gradients_are_those_of_plain_autograd(
    made: Made,
    train_config: MakeTrainConfig,
    chunk_rows: int,
):
    draft, head, batch, taps = made
    config = train_config(loss={"name": "dpace", "chunk_rows": chunk_rows, "dpace_alpha": 0.3})
    sums = draft_loss(draft, head, batch, taps, config)
    found = torch.autograd.grad(sums.loss_sum, list(draft.parameters()))

    targets = block_targets(batch, 5, draft.config.mask_token_id, config.position_decay)
    logits = block_hidden(draft, head.embedding, batch, targets, taps) @ head.lm_head.T
    loss, weight_sum = torch.zeros(()), 0.0
    for block in range(3):
        trained = [k for k in range(1, 5) if targets.weights[0, block, k] > 0]
        entropies = {
            k: F.cross_entropy(logits[0, block, k], targets.labels[0, block, k]) for k in trained
        }
        for k in trained:
            weight = 0.0
            for last in (m for m in trained if m >= k):
                product = 1.0
                for i in (i for i in trained if i <= last):
                    product *= 0.7 * float(torch.exp(-entropies[i].detach())) + 0.3
                weight += product
            loss, weight_sum = loss + weight * entropies[k], weight_sum + weight
    wanted = torch.autograd.grad(loss, list(draft.parameters()))

    torch.testing.assert_close(sums.loss_sum, loss)
    assert float(sums.weight_sum) == pytest.approx(weight_sum)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    # 1 . 1 1 behind anchor 1, 1 1 1 1 behind 4, 1 1 1 . behind 12
    assert sums.counts.tolist() == [3, 2, 3, 2]


def test_without_trained_slots_there_is_no_loss_and_no_gradient(
    made: Made, train_config: MakeTrainConfig
):
    draft, head, batch, taps = made
    empty = replace(batch, anchor_keep=torch.zeros_like(batch.anchor_keep))
    sums = draft_loss(draft, head, empty, taps, train_config(loss={"name": "dpace"}))
    assert (sums.loss, float(sums.weight_sum)) == (0.0, 0.0)
    grads = torch.autograd.grad(sums.loss_sum, list(draft.parameters()))
    assert all(not grad.any() for grad in grads)
