"""The head's two Triton kernels on an NVIDIA GPU, against float64 and against autograd."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.loss import dpace_weights
from trainer.model.head import HeadPass, head_loss

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
