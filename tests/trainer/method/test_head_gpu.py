"""The head's Triton kernels and FP8 products on an NVIDIA GPU, against float64 and autograd."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.loss import dpace_weights
from trainer.model import row_scaled, scaled_head
from trainer.model.head import HeadPass, head_loss
from trainer.model.head_proof import compare, made_up_rows, scaled_head_of
from trainer.model.logits import padded, score
from trainer.model.scaled_head import BOTH, LOGITS, ScaledHead
from trainer.model.target import FrozenHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Below, at and above what a program takes at once (4,096 bf16 or 2,048 fp32), and odd.
SIZES = [(1, 1), (3, 7), (5, 4096), (4, 4097), (7, 11003), (133, 8192)]


def _logits(num_rows: int, num_columns: int, dtype: torch.dtype, *, aligned: bool) -> Tensor:
    torch.manual_seed(num_columns)
    stride = -(-num_columns // 16) * 16 if aligned else num_columns
    memory = torch.randn(num_rows, stride, device="cuda") * 5
    memory[:, num_columns:] = torch.inf  # what stands behind a row is never read
    return memory.to(dtype)[:, :num_columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_columns"), SIZES)
@pytest.mark.parametrize("aligned", [True, False])
def test_score_and_slope_are_those_of_float64(
    num_rows: int, num_columns: int, dtype: torch.dtype, aligned: bool
):
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    logits = _logits(num_rows, num_columns, dtype, aligned=aligned)
    labels = torch.randint(num_columns, (num_rows,), device="cuda")
    labels[-1] = logits[-1].argmax()
    weights = torch.rand(num_rows, device="cuda")
    weights[num_rows // 2] = 0
    wide = logits.double()
    entropy, total, best = head_kernels.score(logits, labels)
    torch.testing.assert_close(total.double(), wide.logsumexp(-1), rtol=1e-5, atol=1e-5)
    wanted = F.cross_entropy(wide, labels, reduction="none")
    torch.testing.assert_close(entropy.double(), wanted, rtol=1e-5, atol=2e-5)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(best, first)
    slope = (wide.softmax(-1) - F.one_hot(labels, num_columns)) * weights.double()[:, None]
    made = head_kernels.slope(logits, total, labels, weights)
    assert made.data_ptr() == logits.data_ptr()
    rtol = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(made.double(), slope, rtol=rtol, atol=1e-6)
    assert not made[num_rows // 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_of_equal_logits_is_the_best_row(dtype: torch.dtype):
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    logits = torch.randint(-3, 4, (64, 9001), device="cuda").to(dtype)
    logits[0] = -1.0e30
    logits[1] = 0.0
    logits[2, [8999, 9000]] = 9.0
    logits[3, [4095, 4096, 8192]] = 9.0
    best = head_kernels.score(logits, torch.zeros(64, dtype=torch.int64, device="cuda"))[2]
    assert best[:4].tolist() == [0, 0, 8999, 4095]
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(best, first)


def test_logit_that_is_not_finite_reaches_the_entropy():
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    logits = torch.randn(3, 5000, device="cuda")
    logits[0, 77], logits[1, 4999] = torch.nan, torch.inf
    entropy = head_kernels.score(logits, torch.zeros(3, dtype=torch.int64, device="cuda"))[0]
    assert entropy.isfinite().tolist() == [False, False, True]


def test_rows_that_pass_two_billion_elements_are_found():
    from trainer.model import head_kernels  # noqa: PLC0415 - needs Triton

    num_rows, num_columns = 2**31 // 248320 + 2, 248320  # 4.3 GB in bf16
    logits = torch.zeros(num_rows, num_columns, device="cuda", dtype=torch.bfloat16)
    logits[-1, -1] = 5.0
    labels = torch.full((num_rows,), num_columns - 1, device="cuda")
    entropy, total, best = head_kernels.score(logits, labels)
    sums = [math.log(num_columns), math.log(math.exp(5.0) + num_columns - 1)]
    assert total[-2:].tolist() == pytest.approx(sums, rel=1e-6)
    assert best[-2:].tolist() == [0, num_columns - 1]
    made = head_kernels.slope(logits, total, labels, torch.ones_like(entropy))
    wanted = [math.exp(-sums[1]), math.exp(5.0 - sums[1]) - 1.0]
    assert made[-1, [0, -1]].tolist() == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("num_columns", [999, 4096])
@pytest.mark.parametrize("chunk_rows", [4, 30, 100])
@pytest.mark.parametrize("dpace", [False, True])
def test_head_loss_and_its_gradients_are_those_of_autograd(
    num_columns: int, chunk_rows: int, dpace: bool
):
    torch.manual_seed(1)
    block_rows, top_k = 5, 4
    x = torch.randn(45, 32, device="cuda", requires_grad=True)
    head = torch.randn(num_columns, 32, device="cuda") * 0.3
    labels = torch.randint(num_columns, (45,), device="cuda")
    given = torch.rand(45, device="cuda") * (torch.rand(45, device="cuda") > 0.3)
    upstream = torch.randn(45, top_k, device="cuda")

    def weigh(entropy: Tensor, given: Tensor) -> Tensor:
        blocks = entropy.view(-1, block_rows)
        return dpace_weights(blocks, given.view(-1, block_rows) > 0, 0.5).flatten()

    how = HeadPass(chunk_rows, weigh if dpace else None, block_rows, top_k)
    found = head_loss(x, head, labels, given, how)
    (grad,) = torch.autograd.grad(found.loss * 0.5 + (found.top * upstream).sum(), x)
    logits = x @ head.T
    entropy = F.cross_entropy(logits, labels, reduction="none")
    weights = weigh(entropy.detach(), given) if dpace else given
    top = logits.topk(top_k, -1)
    wanted = (entropy * weights).sum() * 0.5 + (top.values * upstream).sum()
    (wanted_grad,) = torch.autograd.grad(wanted, x)
    torch.testing.assert_close(found.loss, (entropy * weights).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.weights, weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.top, top.values, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.top_rows, top.indices)
    assert torch.equal(found.hit, logits.argmax(-1) == labels)


def test_bf16_loss_is_that_of_float32_arithmetic_on_the_same_logits():
    torch.manual_seed(2)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(32001, 256, device="cuda", dtype=torch.bfloat16) * 0.1
    labels, given = torch.randint(32001, (300,), device="cuda"), torch.rand(300, device="cuda")
    found = head_loss(x, head, labels, given, HeadPass(128))
    (grad,) = torch.autograd.grad(found.loss, x)
    wide = x.detach().float().requires_grad_()
    logits = wide @ head.float().T
    wanted = (F.cross_entropy(logits, labels, reduction="none") * given).sum()
    (wanted_grad,) = torch.autograd.grad(wanted, wide)
    mean, wanted_mean = found.loss / given.sum(), wanted / given.sum()
    torch.testing.assert_close(mean, wanted_mean, rtol=0, atol=2e-3)
    error = (grad.float() - wanted_grad).norm() / wanted_grad.norm()
    assert float(error) < 1e-2


def test_other_rows_and_columns_compile_no_kernel_anew(monkeypatch: pytest.MonkeyPatch):
    import triton  # noqa: PLC0415

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"])
    )

    def run(num_rows: int, num_columns: int, chunk_rows: int) -> None:
        x = torch.randn(num_rows, 48, device="cuda").half()
        head = torch.randn(num_columns, 48, device="cuda").half()
        labels = torch.randint(num_columns, (num_rows,), device="cuda")
        head_loss(x, head, labels, torch.ones(num_rows, device="cuda"), HeadPass(chunk_rows))

    run(45, 5000, 15)
    first = len(compiled)
    for num_rows, num_columns, chunk_rows in ((44, 5001, 7), (1, 16, 1), (45, 4096, 45)):
        run(num_rows, num_columns, chunk_rows)
    assert first <= 2  # none where another test has compiled them
    assert len(compiled) == first


needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with FP8 products",
)


def _random_head(num_columns: int, width: int, size: float = 0.05) -> Tensor:
    draw = torch.Generator().manual_seed(num_columns)
    return (torch.randn(num_columns, width, generator=draw) * size).bfloat16().cuda()


@needs_fp8
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (7, 576), (133, 5120)])
def test_rows_are_scaled_and_rounded_as_by_plain_torch(num_rows: int, width: int):
    torch.manual_seed(width)
    x = torch.randn(num_rows, width, device="cuda").bfloat16()
    x[num_rows // 2] = 0
    values, scales = scaled_head.scale_rows(x)
    wanted, wanted_scales = row_scaled.scale_rows(x, fitted=True)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-3, atol=0)
    # A quotient on the edge between two e4m3 values may fall to either side.
    differ = values.float() != wanted.float()
    assert float(differ.float().mean()) < 1e-3
    torch.testing.assert_close(values.float(), wanted.float(), rtol=0.13, atol=2**-9)


@needs_fp8
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (5, 4096), (4, 4097), (133, 11003)])
def test_shares_are_the_softmax_without_the_label(num_rows: int, num_columns: int):
    width = padded(num_columns)
    logits = _logits(num_rows, num_columns, torch.bfloat16, aligned=True)
    labels = torch.randint(num_columns, (num_rows,), device="cuda")
    labels[-1] = logits[-1].argmax()
    weights = torch.rand(num_rows, device="cuda")
    weights[num_rows // 2] = 0
    out = torch.full((num_rows, width), 9.0, device="cuda").to(torch.float8_e4m3fn)
    found = score(logits, labels)
    scales = scaled_head.shares(logits, found, labels, weights, out)
    wide = logits.double().softmax(-1).scatter(1, labels[:, None], 0.0)
    made = out.double() * scales.double()
    least = 2.0**-10 * scales.double()  # half of the smallest step
    wanted = wide * weights[:, None]
    error = (made[:, :num_columns] - wanted).abs()
    worst = (error / (wanted / 15.9 + least + 1e-30)).max()
    assert float(worst) <= 1.01, f"worst error is {float(worst):.3f} of half a step"
    assert not made[:, num_columns:].any()
    assert not made[num_rows // 2].any()


@needs_fp8
@pytest.mark.parametrize("products", [LOGITS, BOTH])
@pytest.mark.parametrize("num_columns", [32000, 32001])
@pytest.mark.parametrize("chunk_rows", [333, 4096])
def test_loss_and_gradient_in_fp8_are_near_those_of_bfloat16(
    products: str, num_columns: int, chunk_rows: int
):
    # Logits of a spread of 0.57 are off by 0.021, and the mean of 2,001 labels' by 0.0005.
    head = _random_head(num_columns, 512, 0.025)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2001, 512, generator=draw).bfloat16().cuda()
    labels = torch.randint(num_columns, (2001,), generator=draw).cuda()
    weights = torch.rand(2001, generator=draw).cuda()
    weights[1000] = 0

    def run(how: HeadPass) -> tuple[Tensor, Tensor]:
        own = x.clone().requires_grad_()
        found = head_loss(own, head, labels, weights, how)
        (grad,) = torch.autograd.grad(found.loss, own)
        return found.loss.detach() / weights.sum(), grad.float()

    fp8 = ScaledHead.of(head, products)
    loss, grad = run(HeadPass(chunk_rows, fp8=fp8))
    wanted, wanted_grad = run(HeadPass(chunk_rows))
    cosine = F.cosine_similarity(grad.flatten(), wanted_grad.flatten(), 0)
    told = f"loss {float(loss):.5f} and {float(wanted):.5f}, cosine {float(cosine):.5f}"
    assert abs(float(loss - wanted)) < 2e-3, told
    assert float(cosine) > (0.995 if products == LOGITS else 0.99), told
    assert not grad[1000].any()
    again, same = run(HeadPass(chunk_rows, fp8=fp8))
    assert torch.equal(again, loss)
    assert torch.equal(same, grad)


@needs_fp8
@pytest.mark.parametrize("products", [LOGITS, BOTH])
def test_self_test_in_fp8_passes_with_rows_that_are_sure_right_and_wrong(products: str):
    table = _random_head(50021, 1024)
    head, finding = scaled_head_of(FrozenHead(table, table), products)
    x, labels = made_up_rows(table)
    shares = (x.float() @ table.float().t()).softmax(-1).gather(1, labels[:, None])
    assert shares.max() > 0.999
    assert 0.02 < finding.logits_error_frac < 0.06, str(finding)
    assert abs(finding.loss_difference) < 0.03, str(finding)
    assert finding.gradient_cosine > 0.998, str(finding)
    # each row that is nearly right, by itself: its gradient is small, and may not drown
    sure = (shares[:, 0] > 0.99) & (shares[:, 0] < 0.9999)
    ones = torch.ones(int(sure.sum()), device="cuda")
    grads = []
    for how in (HeadPass(50, fp8=head.fp8), HeadPass(50)):
        own = x[sure].requires_grad_()
        loss = head_loss(own, table, labels[sure], ones, how).loss
        grads.append(torch.autograd.grad(loss, own)[0].float())
    cosine = F.cosine_similarity(*grads, dim=1)
    assert len(cosine) > 5
    assert float(cosine.min()) > 0.97, cosine.tolist()
    assert compare(head, products) == finding  # the same bits


@needs_fp8
@pytest.mark.parametrize("products", [LOGITS, BOTH])
def test_no_rows_and_weights_of_blocks_work_in_fp8(products: str):
    head = _random_head(999, 64)
    fp8 = ScaledHead.of(head, products)
    x = torch.randn(45, 64, device="cuda").bfloat16()
    labels, given = torch.randint(999, (45,), device="cuda"), torch.rand(45, device="cuda")

    def weigh(entropy: Tensor, given: Tensor) -> Tensor:
        blocks = entropy.view(-1, 5)
        return dpace_weights(blocks, given.view(-1, 5) > 0, 0.5).flatten()

    found, plain = (
        head_loss(x, head, labels, given, HeadPass(20, weigh, 5, 4, form)) for form in (fp8, None)
    )
    torch.testing.assert_close(found.weights, plain.weights, rtol=0.05, atol=0)
    torch.testing.assert_close(found.top, plain.top, rtol=0.05, atol=0.05)
    none = head_loss(x[:0], head, labels[:0], given[:0], HeadPass(20, fp8=fp8))
    assert (float(none.loss), len(none.hit)) == (0.0, 0)


@needs_fp8
def test_other_rows_and_columns_compile_no_fp8_kernel_anew(monkeypatch: pytest.MonkeyPatch):
    import triton  # noqa: PLC0415

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"])
    )

    def run(num_rows: int, num_columns: int, chunk_rows: int) -> None:
        x = torch.randn(num_rows, 48, device="cuda").bfloat16()
        head = _random_head(num_columns, 48)
        labels = torch.randint(num_columns, (num_rows,), device="cuda")
        how = HeadPass(chunk_rows, fp8=ScaledHead.of(head, BOTH))
        head_loss(x, head, labels, torch.ones(num_rows, device="cuda"), how)

    run(45, 5000, 15)
    first = len(compiled)
    for num_rows, num_columns, chunk_rows in ((44, 5001, 7), (1, 16, 1), (45, 4096, 45)):
        run(num_rows, num_columns, chunk_rows)
    assert len(compiled) == first, compiled[first:]
