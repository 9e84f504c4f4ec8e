"""Domino: GRU, correction and schedule by hand, its loss against plain autograd."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import LossConfig, TrainConfig
from trainer.data.packing import Batch
from trainer.errors import TargetError
from trainer.loss import block_hidden, block_targets, dpace_weights, draft_loss
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.head import HeadPass
from trainer.model.target import FrozenHead
from trainer.model.variants.domino import PrefixGru, base_share
from trainer.model.variants.variant import BlockRows, HeadRows

MakeConfig = Callable[..., DraftConfig]
MakeTrainConfig = Callable[..., TrainConfig]
DOMINO = {"variant": "domino", "gru_hidden_dim": 10, "emb_dim": 6}


def test_gru_is_that_of_torch(draft_config: MakeConfig):
    torch.manual_seed(0)
    gru = PrefixGru(draft_config(**DOMINO))
    theirs = torch.nn.GRU(32, 10, bias=False, batch_first=True)
    gru.load_state_dict(theirs.state_dict())
    embeddings = torch.randn(3, 7, 32)
    torch.testing.assert_close(gru.states(embeddings), theirs(embeddings)[0])


def test_fresh_gru_is_drawn_from_the_seed_within_one_by_the_root_of_its_width(
    draft_config: MakeConfig,
):
    first, same, other = (DraftModel(draft_config(**DOMINO), seed=s) for s in (4, 4, 5))
    weights = [d.get_parameter("prefix_gru.weight_hh_l0") for d in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert 0.2 < weights[0].abs().max() <= 10**-0.5


def test_share_of_the_base_falls_from_one_to_zero_over_the_part_of_the_steps():
    assert [base_share(done, 0.5) for done in (0, 0.125, 0.25, 0.5, 0.9)] == [1, 0.75, 0.5, 0, 0]


def hand_made(draft_config: MakeConfig) -> DraftModel:
    """A correction of silu(hidden[0]) x ln 2 / silu(1) on token 1; the GRU stays at zero."""
    sizes = {"hidden_size": 2, "vocab_size": 4, "block_size": 3, "mask_token_id": 3}
    draft = DraftModel(draft_config(**sizes, variant="domino", gru_hidden_dim=1, emb_dim=1))
    silu = 1 / (1 + math.exp(-1))
    with torch.no_grad():
        draft.get_parameter("prefix_gru.weight_ih_l0").zero_()
        draft.get_parameter("prefix_gru.weight_hh_l0").zero_()
        draft.get_parameter("embed_proj.0.weight").copy_(torch.tensor([[1.0, 0, 0]]))
        draft.get_parameter("embed_proj.2.weight").copy_(
            torch.tensor([[0.0], [math.log(2) / silu], [0], [0]])
        )
    return draft


# logits ln 4, ln 3, ln 2, ln 1 for a hidden state of ones
TABLE = torch.tensor([[0, math.log(4)], [0, math.log(3)], [0, math.log(2)], [0, 0]])


def test_correction_begins_at_the_second_drafted_slot(draft_config: MakeConfig):
    draft, head = hand_made(draft_config), FrozenHead(torch.zeros(4, 2), TABLE)
    # slot 1: the largest of ln 4, ln 3 is 0; slot 2: of ln 4, ln 3 + ln 2 it is 1
    assert draft.choose(head, torch.ones(1, 3, 2), torch.tensor([2])).tolist() == [[0, 1]]


def test_loss_of_two_hand_made_slots(draft_config: MakeConfig):
    draft = hand_made(draft_config)
    rows = BlockRows(
        hidden=torch.ones(2, 2),
        labels=torch.tensor([1, 1]),
        weights=torch.tensor([1.0, 0.5]),
        tokens=torch.tensor([[0, 1, 1]]),
        cells=None,
    )
    head, config = HeadRows(TABLE, torch.zeros(4, 2)), LossConfig(base_decay_frac=0.5)
    found = draft.variant.loss(draft, rows, head, HeadPass(1), config, 0.125)  # share .75
    # slot 1: 3 of 4 + 3 + 2 + 1; slot 2 corrected: 6 of 4 + 6 + 2 + 1
    base, corrected = -math.log(0.3), -math.log(6 / 13)
    assert found.total.item() == pytest.approx(base + 0.5 * (0.25 * corrected + 0.75 * base))
    assert found.weight_sum.item() == 1.5
    assert found.hit.tolist() == [False, True]
    assert found.figures["lambda_base"].tolist() == [0.75, 1]
    assert found.figures["base_loss"].tolist() == pytest.approx([1.5 * base, 1.5])


CASES = [
    ({}, 0.0),
    ({"chunk_rows": 3}, 0.2),
    ({}, 0.8),
    ({"name": "dpace", "chunk_rows": 6}, 0.2),
    ({"head_sample": 2000}, 0.2),  # leaves none of 40 rows out
]


def plain_loss(
    draft: DraftModel, head: FrozenHead, batch: Batch, taps: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sums of the corrected and the base logits, and the weight sum, with torch's GRU."""
    targets = block_targets(batch, 5, 39, config.position_decay)
    hidden = block_hidden(draft, head.embedding, batch, targets, taps)[0]
    tensors, truth = dict(draft.named_parameters()), targets.labels[0]
    own = {n.removeprefix("prefix_gru."): t for n, t in tensors.items() if n.startswith("prefix_")}
    gru = torch.nn.GRU(32, 10, bias=False, batch_first=True)
    states = torch.func.functional_call(gru, own, (head.embedding[truth],))[0]
    base = hidden @ head.lm_head.T
    features = torch.cat((hidden[:, 2:], states[:, 1:-1]), -1)  # the state before the slot's token
    code = F.silu(features @ tensors["embed_proj.0.weight"].T)
    final = base.clone()
    final[:, 2:] += code @ tensors["embed_proj.2.weight"].T
    corrected, uncorrected = (
        F.cross_entropy(logits.flatten(0, 1), truth.flatten(), reduction="none").view(4, 5)
        for logits in (final, base)
    )
    weights = targets.weights[0]
    if config.loss.name == "dpace":
        weights = torch.zeros(4, 5)
        trained = targets.weights[0, :, 1:] > 0
        weights[:, 1:] = dpace_weights(corrected[:, 1:].detach(), trained, 0.5)
    return (corrected * weights).sum(), (uncorrected * weights).sum(), weights.sum()


@pytest.mark.parametrize(("loss", "progress"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_plain_autograd(
    draft_config: MakeConfig,
    train_config: MakeTrainConfig,
    two_documents: Batch,
    loss: dict[str, object],
    progress: float,
):
    torch.manual_seed(0)
    draft = DraftModel(draft_config(**DOMINO, block_size=5), seed=1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    head = FrozenHead(torch.randn(40, 32), torch.randn(40, 32) * 0.3)
    taps, parameters = torch.randn(1, 18, 64), list(draft.parameters())
    config = train_config(loss=loss)
    sums = draft_loss(draft, head, two_documents, taps, config, progress)
    corrected, base, weight_sum = plain_loss(draft, head, two_documents, taps, config)
    share = max(0.0, 1 - progress / 0.5)
    wanted = (1 - share) * corrected + share * base
    torch.testing.assert_close(sums.loss_sum, wanted)
    torch.testing.assert_close(sums.weight_sum, weight_sum)
    found = torch.autograd.grad(sums.loss_sum, parameters)
    for one, other in zip(found, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_block_without_a_corrected_slot_is_refused(draft_config: MakeConfig):
    with pytest.raises(TargetError, match=r"draft\.block_size 2: domino corrects none below 3"):
        DraftModel(draft_config(**DOMINO, block_size=2))
