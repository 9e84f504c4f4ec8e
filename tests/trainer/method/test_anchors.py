"""Anchors: where they may stand, how they are shared, what they depend on."""

import numpy as np

from trainer.data.anchors import anchor_seed, quotas, sample_anchors, valid_anchors


def bits(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text])


def owners(text: str) -> np.ndarray:
    return np.array([-1 if c == "." else int(c) for c in text], np.int32)


def test_anchor_needs_itself_and_its_successor_trained_in_one_document():
    mask, owner = bits("0111011101"), owners("000001111.")
    # 3 and 7 end answers; 9 is padding
    assert np.flatnonzero(valid_anchors(mask, owner)).tolist() == [1, 2, 5, 6]


def test_last_trained_token_of_a_document_never_leads_into_the_next():
    found = valid_anchors(bits("1111"), owners("0011"))
    assert found.tolist() == [True, False, True, False]


def draw(mask: str, owner: str, num_anchors: int, epoch: int = 0):
    seeds = [anchor_seed(5, epoch, sample) for sample in (7, 8, 9)]
    return sample_anchors(bits(mask)[None], owners(owner)[None], num_anchors, seeds)


def test_drawn_positions_ascend_without_repetition_and_are_padded_at_0():
    positions, keep = draw("0" + "1" * 9, "0" * 10, 12)
    assert positions[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]
    assert keep[0].tolist() == [True] * 8 + [False] * 4


def test_row_without_trained_tokens_gets_padding_alone():
    positions, keep = draw("0" * 6, "0" * 6, 3)
    assert not keep.any()
    assert not positions.any()


def test_each_visit_draws_anew_and_a_repeated_visit_draws_the_same():
    first, same, next_epoch = (draw("1" * 60, "0" * 60, 8, epoch) for epoch in (0, 0, 1))
    assert first[0].tolist() == same[0].tolist()
    assert first[0].tolist() != next_epoch[0].tolist()


def test_draw_of_a_document_does_not_depend_on_its_row_mates():
    alone = draw("1" * 40, "0" * 40, 4)[0][0]
    seeds = [anchor_seed(5, 0, 3), anchor_seed(5, 0, 7)]
    mask = np.ones((1, 80), np.bool_)
    owner = np.array([[0] * 40 + [1] * 40], np.int32)
    beside = sample_anchors(mask, owner, 8, seeds)[0][0]
    assert (beside[beside >= 40] - 40).tolist() == alone.tolist()


def test_all_valid_positions_come_up_equally_often():
    counts = np.zeros(21)
    for epoch in range(2000):
        counts[draw("1" * 21, "0" * 21, 5, epoch)[0][0]] += 1
    # 2,000 x 5 / 20 = 500 each, standard deviation about 19
    assert counts[20] == 0
    assert (abs(counts[:20] - 500) < 100).all()


def test_shares_follow_the_valid_positions_by_largest_remainder():
    # 10 x (6, 3, 1, 10) / 20 = 3, 1.5, 0.5, 5: the one anchor left goes to the earlier half
    assert quotas(np.array([6, 3, 1, 10]), 10).tolist() == [3, 2, 0, 5]


def test_shares_are_everything_when_there_is_room():
    assert quotas(np.array([2, 3]), 9).tolist() == [2, 3]
