"""The head's FP8 products, on the CPU in plain PyTorch: the kernels' own tests need a GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.doctor.room import Card, drafter_facts
from trainer.errors import TargetError
from trainer.loss import dpace_weights, draft_loss
from trainer.model import row_scaled, scaled_head
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.head import HeadPass, Products, head_loss
from trainer.model.head_proof import compare, made_up_rows, scaled_head_of
from trainer.model.logits import score
from trainer.model.scaled_head import BOTH, LOGITS, ScaledHead
from trainer.model.target import FrozenHead

needs_products = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="this torch has one scale a tensor on a CPU"
)


def _head(num_rows: int, width: int, size: float = 0.05) -> Tensor:
    draw = torch.Generator().manual_seed(num_rows)
    return (torch.randn(num_rows, width, generator=draw) * size).bfloat16()


def _gradient(
    x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, how: HeadPass
) -> tuple[float, Tensor]:
    own = x.clone().requires_grad_()
    found = head_loss(own, head, labels, weights, how)
    (grad,) = torch.autograd.grad(found.loss, own)
    return found.loss.item(), grad.float()


def test_weight_that_e4m3_holds_is_quantised_exactly_and_padded_with_zeros():
    weight = torch.tensor([[448.0, -1.0, 0.0], [0.5, 0.25, 7.0]])
    made = row_scaled.quantise(weight, (4, 5))
    assert made.scales.tolist() == [[1.0, 7 / 448, 1.0, 1.0]]
    assert made.values[0].tolist() == [448.0, -1.0, 0.0, 0.0, 0.0]
    assert made.values[1].tolist() == [32.0, 16.0, 448.0, 0.0, 0.0]
    assert not made.values[2:].float().any()


def test_large_logits_are_not_made_small():
    # Of rows that lie along their row of the head, as those of a trained draft do.
    head = _head(400, 256)
    noise = torch.randn(400, 256, generator=torch.Generator().manual_seed(0))
    x = (head.float() * 20 + noise).bfloat16()
    exact = (x.float() * head.float()).sum(1)
    means = []
    for fitted in (True, False):
        ours, own = (row_scaled.scale_rows(one, fitted=fitted) for one in (x, head))
        found = (ours[0].float() * own[0].float()).sum(1) * (ours[1] * own[1])[:, 0]
        means.append(float((found / exact).mean()))
    assert means[0] == pytest.approx(1.0, abs=4e-4)
    assert means[1] == pytest.approx(0.9983, abs=6e-4)


@needs_products
def test_logits_that_fp8_holds_are_those_of_bfloat16_and_no_padding_is_among_them():
    # rows of +-1 times 2^k: each e4m3 value and scale is exact
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (37, 16), generator=draw) * 2.0 - 1
    head = (signs * 2.0 ** torch.arange(-18, 19)[:, None]).bfloat16()
    x = (torch.randint(2, (5, 16), generator=draw) * 2.0 - 1).bfloat16()
    parts = [slice(0, 3), slice(3, 5)]
    fp8 = ScaledHead.of(head, LOGITS)
    found = Products(x, head, parts, fp8)
    assert fp8.rows.values.shape == (48, 16)
    for part in parts:
        assert torch.equal(found.logits(part), x[part] @ head.t())


def test_shares_leave_the_label_out_and_are_exact_at_the_largest_of_the_others():
    # softmax of logs: 5/8 is the label's in the first row, 1/4 the next; 1/8 the label's below
    logits = torch.tensor([[5.0, 2, 1], [5, 1, 2]]).div(8).log().bfloat16()
    labels, weights = torch.tensor([0, 1]), torch.tensor([2.0, 0.5])
    found = score(logits, labels)
    out = torch.full((2, 16), 9.0).to(torch.float8_e4m3fn)
    scales = scaled_head.shares(logits, found, labels, weights, out)
    # beside a label that is best there is 3/8 at most; else the best share is the largest
    torch.testing.assert_close(scales[:, 0] * 448, torch.tensor([0.75, 0.3125]), rtol=5e-3, atol=0)
    assert out[:, [0, 1]].float()[[0, 1], [0, 1]].tolist() == [0.0, 0.0]
    assert out[1, 0].float() == 448.0
    shares = out.float() * scales / weights[:, None]
    wanted = torch.tensor([[0, 0.25, 0.125], [0.625, 0, 0.25]])
    torch.testing.assert_close(shares[:, :3], wanted, rtol=0.0625, atol=0)
    assert not out[:, 3:].float().any()


@needs_products
@pytest.mark.parametrize("products", [LOGITS, BOTH])
@pytest.mark.parametrize("chunk_rows", [7, 64])
def test_loss_and_gradient_are_near_those_of_float32(products: str, chunk_rows: int):
    # Rounding to e4m3 is 3.7 % of a logit's spread (here 0.8): the loss moves by thousandths.
    torch.manual_seed(1)
    head = _head(2003, 256)
    x, labels = made_up_rows(head)
    weights = torch.rand(len(x))
    weights[5] = 0
    how = HeadPass(chunk_rows, fp8=ScaledHead.of(head, products))
    loss, grad = _gradient(x, head, labels, weights, how)
    wanted, wanted_grad = _gradient(x.float(), head.float(), labels, weights, HeadPass(64))
    assert abs(loss - wanted) / float(weights.sum()) < 8e-3
    assert F.cosine_similarity(grad.flatten(), wanted_grad.flatten(), 0) > 0.998
    assert not grad[5].any()


@needs_products
@pytest.mark.parametrize("products", [LOGITS, BOTH])
def test_gradient_of_a_row_that_is_nearly_right_does_not_drown_in_rounding(products: str):
    # The label's logit is exact and far above all others: 1 - share is about 2e-4, which e4m3
    # could not tell from nothing beside a share of 1.
    head = torch.zeros(64, 16)
    head[0, 0] = 14.0
    head[1:, 1:] = torch.eye(15).repeat(5, 1)[:63]
    x = torch.zeros(1, 16)
    x[0, 0] = 1.0
    head, x = head.bfloat16(), x.bfloat16()
    how = HeadPass(4, fp8=ScaledHead.of(head, products))
    loss, grad = _gradient(x, head, torch.tensor([0]), torch.ones(1), how)
    # all others have a logit of 0: 63 e^-14 = 5.24e-5 is what the label lacks
    assert loss == pytest.approx(5.24e-5, rel=0.05)
    assert float(grad[0, 0]) == pytest.approx(-14 * 5.24e-5, rel=0.05)
    each = torch.tensor([5.0] * 3 + [4.0] * 12) * 8.32e-7  # e^-14 a row of the head
    torch.testing.assert_close(grad[0, 1:], each, rtol=0.1, atol=1e-7)


@needs_products
@pytest.mark.parametrize("products", [LOGITS, BOTH])
def test_weights_of_blocks_best_logits_and_no_rows_at_all_work_as_in_bfloat16(products: str):
    torch.manual_seed(2)
    head, block_rows, top_k = _head(505, 64), 5, 4
    x = torch.randn(45, 64).bfloat16()
    labels, given = torch.randint(505, (45,)), (torch.rand(45) > 0.3).float()

    def weigh(entropy: Tensor, given: Tensor) -> Tensor:
        blocks = entropy.view(-1, block_rows)
        return dpace_weights(blocks, given.view(-1, block_rows) > 0, 0.5).flatten()

    fp8 = ScaledHead.of(head, products)
    found, plain = (
        head_loss(x, head, labels, given, HeadPass(20, weigh, block_rows, top_k, form))
        for form in (fp8, None)
    )
    torch.testing.assert_close(found.weights, plain.weights, rtol=0.05, atol=0)
    torch.testing.assert_close(found.top, plain.top, rtol=0.05, atol=0.05)
    assert found.top_rows.max() < 505
    none = head_loss(x[:0], head, labels[:0], given[:0], HeadPass(20, fp8=fp8))
    assert (float(none.loss), len(none.hit)) == (0.0, 0)


@needs_products
@pytest.mark.parametrize(
    ("variant", "products"),
    [("dflash", BOTH), ("dflash2", BOTH), ("dflash2", LOGITS), ("domino", LOGITS)],
)
@pytest.mark.parametrize("name", ["decay", "dpace"])
def test_every_variant_trains_on_a_head_in_fp8_as_on_its_own(
    draft_config: Callable[..., DraftConfig],
    train_config: Callable[..., TrainConfig],
    two_documents: Batch,
    variant: str,
    products: str,
    name: str,
):
    torch.manual_seed(0)
    sizes = {"selector_rank": 8, "selector_top_k": 4, "gru_hidden_dim": 16, "emb_dim": 16}
    shape = draft_config(
        variant=variant, block_size=5, dtype="bfloat16", conv_group_size=8, **sizes
    )
    draft, table = DraftModel(shape, seed=1), (torch.randn(40, 32) * 0.1).bfloat16()
    head, taps = FrozenHead(table, table), torch.randn(1, 18, 64).bfloat16()
    config = train_config(loss={"name": name, "chunk_rows": 8})
    found = []
    for one in (head, replace(head, fp8=ScaledHead.of(table, products))):
        sums = draft_loss(draft, one, two_documents, taps, config, 0.2)
        made = torch.autograd.grad(sums.loss_sum, list(draft.parameters()), allow_unused=True)
        grads = torch.cat([part.float().flatten() for part in made if part is not None])
        found.append((sums.loss, grads))
    (loss, grad), (loss8, grad8) = found
    assert loss8 == pytest.approx(loss, abs=0.03)  # twelve slots: their errors hardly cancel
    assert loss8 != loss
    assert F.cosine_similarity(grad8, grad, 0) > 0.99


@needs_products
def test_same_rows_give_the_same_bits_twice():
    head = _head(301, 32)
    x, labels = made_up_rows(head)
    how = HeadPass(50, fp8=ScaledHead.of(head, BOTH))
    first, second = (_gradient(x, head, labels, torch.ones(len(x)), how) for _ in range(2))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


@needs_products
def test_self_test_passes_a_sound_head_and_no_other():
    table = _head(1003, 128)
    head = FrozenHead(table, table, ScaledHead.of(table, BOTH))
    finding = compare(head, BOTH)
    assert finding.passed
    assert 0.02 < finding.logits_error_frac < 0.06
    assert head.fp8 is not None
    assert head.fp8.columns is not None
    rows, columns = head.fp8.rows, head.fp8.columns
    bad = [
        ScaledHead(1003, rows._replace(scales=rows.scales.roll(1)), columns),
        ScaledHead(1003, rows._replace(values=rows.values.roll(1, 0)), columns),
        ScaledHead(1003, rows, columns._replace(scales=columns.scales * 2)),
        ScaledHead(1003, rows, columns._replace(values=columns.values.roll(1, 0))),
        ScaledHead(1003, rows._replace(scales=rows.scales * torch.nan), columns),
    ]
    assert [compare(FrozenHead(table, table, one), BOTH).passed for one in bad] == [False] * 5
    assert "logits and gradient in FP8" in str(finding)


def test_doctor_counts_the_heads_in_fp8_and_the_shares(
    draft_config: Callable[..., DraftConfig], train_config: Callable[..., TrainConfig]
):
    shape, card = draft_config(dtype="bfloat16", vocab_size=1000), Card("cuda:0", "a GPU", 1)
    given = {"draft": {"dtype": "bfloat16"}, "run": {"device": "cuda"}}
    plain, logits, both = (
        drafter_facts(shape, train_config(loss={"head_fp8": name}, **given), card).parts
        for name in ("off", LOGITS, BOTH)
    )
    assert "head in FP8" not in plain
    assert logits.items() - plain.items() == {("head in FP8", 1000 * 32)}
    rows = 4 * 16 * 4  # 4 rows of 16 anchors and blocks of 4
    wanted = {("head in FP8", 2 * 1000 * 32), ("logits of a chunk", rows * 1000 * 3)}
    assert both.items() - plain.items() == wanted


def test_head_in_fp8_is_refused_on_the_cpu_by_name():
    table = _head(32, 16)
    with pytest.raises(TargetError, match=r"loss\.head_fp8: both cannot be had: .*NVIDIA GPU"):
        scaled_head_of(FrozenHead(table, table), BOTH)
