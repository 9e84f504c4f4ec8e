"""Labels, weights and the head loss, against numbers worked out by hand and against PyTorch."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch, Document
from trainer.loss import BlockTargets, LossSums, block_hidden, block_targets, draft_loss
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.head import HeadPass, head_loss, rows_at_once
from trainer.model.target import FrozenHead

MakeConfig = Callable[..., DraftConfig]
MakeTrainConfig = Callable[..., TrainConfig]


def batch_of(mask: str, lengths: list[int], anchors: list[int], num_padded: int = 0) -> Batch:
    """One row; token t has id 100 + t; padding after the documents."""
    size = len(mask)
    owner = [d for d, length in enumerate(lengths) for _ in range(length)]
    position = [p for length in lengths for p in range(length)]
    starts = [sum(lengths[:d]) for d in range(len(lengths))]
    return Batch(
        index=0,
        epoch=0,
        input_ids=torch.arange(100, 100 + size)[None],
        loss_mask=torch.tensor([[c == "1" for c in mask]]),
        document_ids=torch.tensor([owner + [-1] * (size - len(owner))], dtype=torch.int32),
        position_ids=torch.tensor([position + [0] * (size - len(position))]),
        anchor_positions=torch.tensor([anchors + [0] * num_padded]),
        anchor_keep=torch.tensor([[True] * len(anchors) + [False] * num_padded]),
        documents=tuple(
            Document(d, 0, s, n) for d, (s, n) in enumerate(zip(starts, lengths, strict=True))
        ),
        num_tokens=len(owner),
        num_anchors=len(anchors),
    )


def test_weights_of_a_block_of_16_are_the_hand_computed_ones():
    # one document of 20; the anchor at 3 covers 3..18; tokens 10 and 11 are another speaker's
    mask = "0" * 3 + "1" * 7 + "00" + "1" * 8
    found = block_targets(batch_of(mask, [20], [3]), 16, 999, position_decay=7.0)
    # exp(-(k - 1) / 7): 1, e^-1/7 = .866878, e^-2/7 = .751477, .651439, .564718, .489542 (k = 6),
    # k = 7 and 8 are not trained, k = 9: e^-8/7 = .318907, .276453, .239651, .207748, .180092,
    # .156118, k = 15: e^-2 = .135335
    wanted = [0, 1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542, 0, 0]
    wanted += [0.318907, 0.276453, 0.239651, 0.207748, 0.180092, 0.156118, 0.135335]
    torch.testing.assert_close(found.weights[0, 0], torch.tensor(wanted), atol=1e-6, rtol=0)


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k_and_stands_there():
    found = block_targets(batch_of("1" * 8, [3, 5], [4]), 4, 999, position_decay=3.0)
    assert found.labels[0, 0].tolist() == [104, 105, 106, 107]
    assert found.block_ids[0, 0].tolist() == [104, 999, 999, 999]
    assert found.position_ids[0, 0].tolist() == [1, 2, 3, 4]  # the second document starts at 3


def weights(batch: Batch) -> list[list[bool]]:
    return (block_targets(batch, 4, 999, 3.0).weights[0] > 0).tolist()


def test_slots_beyond_the_document_or_the_row_weigh_nothing():
    assert weights(batch_of("1" * 8, [5, 3], [3, 6])) == [
        [False, True, False, False],  # 4 is the document's last, 5 and 6 the next one's
        [False, True, False, False],  # 7 is the row's last
    ]


def test_padded_anchors_weigh_nothing():
    assert weights(batch_of("1" * 8, [8], [], num_padded=1)) == [[False] * 4]


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_head_loss_and_its_gradient_are_those_of_cross_entropy(chunk_rows: int):
    torch.manual_seed(0)
    x = torch.randn(7, 8, requires_grad=True)
    head, labels, weight = torch.randn(11, 8), torch.randint(11, (7,)), torch.rand(7)
    weight[2] = 0
    found = head_loss(x, head, labels, weight, HeadPass(chunk_rows))
    (grad,) = torch.autograd.grad(found.loss * 0.5, x)
    wanted = (F.cross_entropy(x @ head.T, labels, reduction="none") * weight).sum()
    (wanted_grad,) = torch.autograd.grad(wanted * 0.5, x)
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    assert found.hit.tolist() == ((x @ head.T).argmax(-1) == labels).tolist()


def test_chunks_are_equal_but_for_the_last_and_part_no_block():
    def lengths(how: HeadPass, num_rows: int) -> list[int]:
        return [len(range(num_rows)[part]) for part in how.chunks(num_rows)]

    assert lengths(HeadPass(2048), 7680) == [1920] * 4
    assert lengths(HeadPass(4), 9) == [3, 3, 3]
    assert lengths(HeadPass(4), 3) == [3]
    assert lengths(HeadPass(8, lambda entropy, _given: entropy, 3), 15) == [6, 6, 3]
    assert lengths(HeadPass(2, lambda entropy, _given: entropy, 3), 6) == [3, 3]
    assert lengths(HeadPass(4), 0) == []


def test_default_chunk_holds_two_gigabytes_of_logits_their_copy_and_gradient():
    head = torch.empty(1000, 8, dtype=torch.bfloat16, device="meta")
    assert rows_at_once(head) == 250_000  # 2 + 4 + 2 bytes x 1,000
    assert rows_at_once(torch.empty(10**9, 8, device="meta")) == 1


def toy(draft_config: MakeConfig) -> tuple[DraftModel, FrozenHead, Batch, Tensor]:
    torch.manual_seed(0)
    draft = DraftModel(draft_config(vocab_size=140, mask_token_id=139), seed=1)
    head = FrozenHead(torch.randn(140, 32), torch.randn(140, 32))
    batch = batch_of("0" + "1" * 15 + "00", [9, 7], [1, 5, 10], num_padded=1)
    return draft, head, batch, torch.randn(1, 18, 64)


def run(
    made: tuple[DraftModel, FrozenHead, Batch, Tensor], config: TrainConfig, index: int = 0
) -> tuple[LossSums, list[Tensor]]:
    draft, head, batch, taps = made
    sums = draft_loss(draft, head, replace(batch, index=index), taps, config)
    return sums, list(torch.autograd.grad(sums.loss_sum, list(draft.parameters())))


def test_draft_loss_is_the_weighted_cross_entropy_of_slots_1_on(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    made = toy(draft_config)
    draft, head, batch, taps = made
    sums, _ = run(made, train_config())
    targets: BlockTargets = block_targets(batch, 4, 139, 3.0)
    with torch.no_grad():
        hidden = block_hidden(draft, head.embedding, batch, targets, taps)
    logits = (hidden @ head.lm_head.T).flatten(0, 2)
    entropy = F.cross_entropy(logits, targets.labels.flatten(), reduction="none")
    wanted = (entropy * targets.weights.flatten()).sum()
    torch.testing.assert_close(sums.loss_sum, wanted)
    # anchors 1 and 10 have three slots, 5 has three, all in their documents: 3 x (1+e^-1/3+e^-2/3)
    assert float(sums.weight_sum) == pytest.approx(3 * (1 + math.exp(-1 / 3) + math.exp(-2 / 3)))
    assert int(sums.num_anchors) == 3
    assert sums.counts.tolist() == [3, 3, 3]


def test_row_without_documents_changes_neither_loss_nor_gradients(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    draft, head, batch, taps = toy(draft_config)
    alone, gradients = run((draft, head, batch, taps), train_config())
    empty = {
        name: torch.cat((value, torch.zeros_like(value)))
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    empty["document_ids"][1] = -1
    taller = replace(batch, **empty)  # type: ignore[arg-type]
    beside, same = run(
        (draft, head, taller, torch.cat((taps, torch.zeros_like(taps)))), train_config()
    )
    torch.testing.assert_close(beside.loss_sum, alone.loss_sum)
    assert float(beside.weight_sum) == pytest.approx(float(alone.weight_sum))
    assert beside.counts.tolist() == alone.counts.tolist()
    torch.testing.assert_close(same, gradients)


def test_accuracy_and_expected_accepted_follow_from_the_hits():
    hits = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    accepted = hits.cumprod(-1).sum()  # 2 + 0 + 3
    sums = LossSums(
        torch.tensor(6.0),
        torch.tensor(4.0),
        torch.tensor(3),
        hits.sum(0),
        torch.tensor([3, 3, 2]),
        accepted,
    )
    assert sums.loss == 1.5
    assert sums.slot_accuracy == pytest.approx([2 / 3, 1, 1])
    assert sums.expected_accepted == pytest.approx(5 / 3)
    assert LossSums.total([sums, sums, sums]).loss_sum.item() == 18.0


def test_right_guesses_are_counted_by_slot_and_as_accepted(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    draft, head, batch, taps = toy(draft_config)
    flat = FrozenHead(head.embedding, torch.zeros(140, 32))  # all logits equal: row 0 is guessed
    zeros = replace(batch, input_ids=torch.zeros_like(batch.input_ids))
    sums = draft_loss(draft, flat, zeros, taps, train_config())
    assert sums.slot_accuracy == [1.0, 1.0, 1.0]
    assert sums.expected_accepted == 3.0
    sums = draft_loss(draft, flat, batch, taps, train_config())
    assert sums.slot_accuracy == [0.0, 0.0, 0.0]
    assert sums.expected_accepted == 0.0


def test_chunks_change_neither_loss_nor_gradients(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    made = toy(draft_config)
    whole, grads = run(made, train_config())
    parts, grads_of_parts = run(made, train_config(loss={"chunk_rows": 2}))
    torch.testing.assert_close(whole.loss_sum, parts.loss_sum)
    for a, b in zip(grads, grads_of_parts, strict=True):
        torch.testing.assert_close(a, b)


def test_batch_without_trained_slots_has_no_loss_and_no_gradient(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    draft, head, batch, taps = toy(draft_config)
    empty = replace(batch, anchor_keep=torch.zeros_like(batch.anchor_keep))
    for sample in (0, 5):
        config = train_config(loss={"head_sample": sample})
        sums, grads = run((draft, head, empty, taps), config)
        assert (sums.loss, float(sums.weight_sum), sums.expected_accepted) == (0.0, 0.0, 0.0)
        assert all(not grad.any() for grad in grads)


def test_sampling_all_rows_gives_the_loss_of_the_whole_head(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    made = toy(draft_config)
    whole, grads = run(made, train_config())
    # 5,000 draws of 140 rows leave none out (chance below 140 x e^-35)
    sampled, sampled_grads = run(made, train_config(loss={"head_sample": 5000}))
    torch.testing.assert_close(whole.loss_sum, sampled.loss_sum)
    assert whole.hits.tolist() == sampled.hits.tolist()
    for a, b in zip(grads, sampled_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_sampled_rows_depend_on_seed_and_batch_index_alone(
    draft_config: MakeConfig, train_config: MakeTrainConfig
):
    made, config = toy(draft_config), train_config(loss={"head_sample": 20})
    first, same, other = (run(made, config, index)[0].loss for index in (0, 0, 1))
    assert first == same
    assert first != other
    assert first < run(made, train_config())[0].loss  # fewer rivals
