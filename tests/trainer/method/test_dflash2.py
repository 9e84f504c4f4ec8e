"""DFlash 2: convolutions and selector by hand, its loss against plain autograd."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.trainer.method.conftest import stirred
from trainer.contract.config import LossConfig, TrainConfig
from trainer.data.packing import Batch
from trainer.errors import TargetError
from trainer.loss import block_hidden, block_targets, dpace_weights, draft_loss
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.head import HeadPass
from trainer.model.target import FrozenHead
from trainer.model.variants.dflash2 import BlockConv, CandidateSelector
from trainer.model.variants.variant import BlockRows, HeadRows

MakeConfig = Callable[..., DraftConfig]
MakeTrainConfig = Callable[..., TrainConfig]
DFLASH2 = {"variant": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


@pytest.fixture
def head() -> FrozenHead:
    generator = torch.Generator().manual_seed(5)
    embedding, lm_head = (torch.randn(40, 32, generator=generator) for _ in range(2))
    return FrozenHead(embedding, lm_head * 0.3)


def test_fresh_draft_is_dflash_to_the_bit(draft_config: MakeConfig, head: FrozenHead):
    torch.manual_seed(0)
    plain = DraftModel(draft_config(), seed=7)
    fresh = DraftModel(draft_config(**DFLASH2), seed=7)
    taps, block = torch.randn(1, 9, 64), torch.randn(1, 4, 32)
    hidden = []
    for draft in (plain, fresh):
        cache = draft.new_cache()
        draft.append(cache, taps)
        hidden.append(draft.draft_block(cache, block, 9))
    assert torch.equal(*hidden)
    first = torch.tensor([3])
    assert torch.equal(*(d.choose(head, hidden[0], first) for d in (plain, fresh)))


def test_convolution_of_a_hand_made_block(draft_config: MakeConfig):
    conv = BlockConv(draft_config(hidden_size=2, conv_group_size=1, block_size=3))
    with torch.no_grad():
        conv.base_kernel.copy_(torch.tensor([[[1.0, 2], [10, 20]], [[1, 1], [0, 0]]]))
        conv.kernel_projection.weight.zero_()
        conv.kernel_projection.weight[2, 0] = 1  # before, previous slot, channel 0: x_t[0]
        conv.kernel_projection.weight[5, 1] = 1  # after, own slot, channel 1: x_t[1]
    x = torch.tensor([[[1.0, 1], [2, 3], [4, 5], [1, 1], [0, 0], [7, 7]]])  # two blocks of three
    read, kept = conv.before(x)
    # channel 0: 1 x_t + (10 + x_t) x_(t-1); channel 1: 2 x_t + 20 x_(t-1); a block starts alone
    assert read.tolist() == [[[1, 2], [14, 26], [32, 70], [1, 2], [10, 20], [7, 14]]]
    # channel 0: 1 y_t; channel 1: (1 + x_t[1]) y_t, with x what ``before`` was given
    ones = torch.ones_like(x)
    assert conv.after(ones, kept).tolist() == [[[1, 2], [1, 4], [1, 6], [1, 2], [1, 1], [1, 8]]]


def test_gradients_of_the_convolution_are_its_differences(draft_config: MakeConfig):
    torch.manual_seed(0)
    conv = BlockConv(draft_config(hidden_size=4, conv_group_size=2, block_size=3)).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_()

    def around(x: Tensor, *_: Tensor) -> Tensor:  # gradcheck moves the parameters in place
        read, kept = conv.before(x)
        return conv.after(read.sin(), kept)

    x = torch.randn(1, 6, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(around, (x, *conv.parameters()))


def hand_made(draft_config: MakeConfig, successors: list[float]) -> DraftModel:
    """Hidden states of 2, 4 tokens, codes of 1 number; P reads the first of the two."""
    config = draft_config(
        hidden_size=2,
        vocab_size=4,
        block_size=3,
        mask_token_id=3,
        variant="dflash2",
        conv_group_size=2,
        selector_rank=1,
        selector_top_k=2,
    )
    draft = DraftModel(config)
    selector = draft.get_submodule("candidate_selector")
    assert isinstance(selector, CandidateSelector)
    with torch.no_grad():
        selector.hidden_projection.weight.copy_(torch.tensor([[1.0, 0]]))
        selector.predecessor_codebook.copy_(torch.tensor([[1.0], [2], [0], [0]]))
        selector.successor_codebook.copy_(torch.tensor(successors)[:, None])
    return draft


def test_selector_picks_with_the_token_picked_before_in_mind(draft_config: MakeConfig):
    draft = hand_made(draft_config, [0.0, 3, 0, 9])
    head = FrozenHead(torch.zeros(4, 2), torch.tensor([[0.0, 4], [0, 3], [0, 2], [0, 1]]))
    hidden = torch.tensor([[[0.0, 0], [1, 1], [-1, 1]], [[0, 0], [1, 1], [-1, 1]]])
    # The candidates are 0 (logit 4) and 1 (logit 3), never 3 though its code is the largest.
    # Anchor 0: slot 1 scores 4 and 3 + 1 x 1 x 3, token 1; slot 2 scores 4 and 3 + 2 x -1 x 3: 0.
    # Anchor 2, whose code is zero: 4 and 3, token 0; then 4 and 3 + 1 x -1 x 3: 0.
    assert draft.choose(head, hidden, torch.tensor([0, 2])).tolist() == [[1, 0], [0, 0]]


def test_loss_of_two_hand_made_slots(draft_config: MakeConfig):
    draft = hand_made(draft_config, [0.0, math.log(2), 0, 0])
    # logits ln 4, ln 3, ln 2, ln 1: shares .4, .3, .2, .1. The anchor 0 and the hidden state give
    # the candidates 0 and 1 the scores ln 4 and ln 3 + ln 2: shares .4 and .6 among the two.
    table = torch.tensor([[0, math.log(4)], [0, math.log(3)], [0, math.log(2)], [0, 0]])
    rows = BlockRows(
        hidden=torch.ones(2, 2),
        labels=torch.tensor([1, 2]),  # the second is no candidate
        weights=torch.tensor([1.0, 0.5]),
        tokens=torch.tensor([[0, 1, 2]]),
        cells=None,
    )
    config = LossConfig(selector_weight=0.25)
    head = HeadRows(table, torch.zeros(4, 2))
    found = draft.variant.loss(draft, rows, head, HeadPass(8), config, 0.0)
    base, among = -math.log(0.3) - 0.5 * math.log(0.2), -math.log(0.6)
    assert found.total.item() == pytest.approx(base + 0.25 * among)
    assert float(found.weight_sum) == 1.5
    assert found.hit.tolist() == [True, False]  # 1 has the higher score, not the higher logit
    assert found.figures["candidate_recall_frac"].tolist() == [1, 2]
    assert found.figures["selector_loss"].tolist() == pytest.approx([among, 1])


CASES = [
    {},
    {"chunk_rows": 3},
    {"name": "dpace", "chunk_rows": 6},
    {"head_sample": 2000},  # leaves none of 40 rows out
    {"selector_weight": 0.0},
]


def plain_loss(
    draft: DraftModel, head: FrozenHead, batch: Batch, taps: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor, int]:
    """Loss sum, weight sum and number of recalled tokens, slot by slot in autograd."""
    targets = block_targets(batch, 5, 39, config.position_decay)
    hidden = block_hidden(draft, head.embedding, batch, targets, taps)[0]
    logits, truth, weights = hidden @ head.lm_head.T, targets.labels[0], targets.weights[0]
    trained = weights > 0
    entropy = F.cross_entropy(logits.flatten(0, 1), truth.flatten(), reduction="none").view(4, 5)
    if config.loss.name == "dpace":
        weights = torch.zeros(4, 5)
        weights[:, 1:] = dpace_weights(entropy[:, 1:].detach(), trained[:, 1:], 0.5)
    loss, num_recalled = (entropy * weights).sum(), 0
    a, b, p = (
        draft.get_parameter(f"candidate_selector.{name}")
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    for block, slot in trained.nonzero().tolist():
        candidates = logits[block, slot].topk(4).indices.tolist()
        label = int(truth[block, slot])
        if label in candidates:
            gate = a[truth[block, slot - 1]] * (p @ hidden[block, slot])
            scores = torch.stack([logits[block, slot, c] + gate @ b[c] for c in candidates])
            chosen = -scores.log_softmax(0)[candidates.index(label)]
            loss = loss + config.loss.selector_weight * weights[block, slot] * chosen
            num_recalled += 1
    return loss, weights.sum(), num_recalled


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_loss_and_gradients_are_those_of_plain_autograd(
    draft_config: MakeConfig,
    train_config: MakeTrainConfig,
    head: FrozenHead,
    two_documents: Batch,
    loss: dict[str, object],
):
    torch.manual_seed(0)
    draft, config = stirred(draft_config(**DFLASH2, block_size=5)), train_config(loss=loss)
    taps, parameters = torch.randn(1, 18, 64), list(draft.parameters())
    sums = draft_loss(draft, head, two_documents, taps, config)
    wanted, weight_sum, num_recalled = plain_loss(draft, head, two_documents, taps, config)
    torch.testing.assert_close(sums.loss_sum, wanted)
    torch.testing.assert_close(sums.weight_sum, weight_sum)
    assert 0 < num_recalled < 10  # else the case shows nothing
    assert sums.figures["candidate_recall_frac"].tolist() == [num_recalled, 10]
    found = torch.autograd.grad(sums.loss_sum, parameters)
    for one, other in zip(found, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_sizes_that_do_not_fit_are_named(draft_config: MakeConfig):
    with pytest.raises(
        TargetError, match=r"draft\.conv_group_size 5: does not divide hidden_size 32"
    ):
        DraftModel(draft_config(variant="dflash2", conv_group_size=5))
    with pytest.raises(
        TargetError, match=r"draft\.selector_top_k 41: the vocabulary has 40 tokens"
    ):
        DraftModel(draft_config(variant="dflash2", selector_top_k=41))
