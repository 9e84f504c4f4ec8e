"""The one-pass AdamW on an NVIDIA GPU against torch's own, weights, moments and state."""

import copy

import pytest
import torch
from torch import nn

from trainer.contract.config import OptimConfig
from trainer.optim import DraftOptimizer, Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # 5,003 rows: no multiple of a kernel's block, so that its last one is masked
    layers = nn.Sequential(nn.Linear(37, 5003, bias=False), nn.LayerNorm(5003, bias=False))
    return layers.to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [False, True])
def test_steps_equal_those_of_torch(dtype: torch.dtype, direct: bool):
    config = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    schedule = Schedule(num_steps=10, num_warmup_steps=2, min_frac=0.1)
    model = _model(dtype)
    optimizer = DraftOptimizer(model, config, schedule)
    if direct:
        optimizer.take_gradients_directly()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    groups = [{"params": masters[:1], "weight_decay": 0.1}, {"params": masters[1:]}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, weight_decay=0.0)
    for step in range(5):
        grads = [torch.randn_like(p) for p in model.parameters()]
        for param, master, grad in zip(model.parameters(), masters, grads, strict=True):
            param.grad, master.grad = grad.clone(), grad.float() / 8
        norm = float(nn.utils.clip_grad_norm_(masters, 1.0))
        for group in theirs.param_groups:
            group["lr"] = 1e-2 * schedule.factor(step)
        theirs.step()
        optimizer.accumulate()
        applied = optimizer.apply(step, 1.0, 8.0)
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4)
    for ours, master in zip(optimizer.masters().values(), masters, strict=True):
        torch.testing.assert_close(ours, master.data, rtol=1e-5, atol=1e-6)
    for param, master in zip(model.parameters(), optimizer.masters().values(), strict=True):
        assert torch.equal(param.data, master.to(dtype))


def test_state_of_another_optimizer_is_gone_on_with():
    config, schedule = OptimConfig(lr=1e-2), Schedule(10, 0, 1.0)
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, config, schedule)

    def step(one: DraftOptimizer, owner: nn.Module, number: int) -> None:
        torch.manual_seed(number)
        for param in owner.parameters():
            param.grad = torch.randn_like(param)
        one.accumulate()
        one.apply(number, 1.0, 1.0)

    for number in range(3):
        step(optimizer, model, number)
    state = {key: value.cpu().clone() for key, value in optimizer.state().items()}
    masters = {key: value.cpu().clone() for key, value in optimizer.masters().items()}
    other_model = copy.deepcopy(_model(torch.bfloat16))
    other = DraftOptimizer(other_model, config, schedule)
    other.load(masters, state)
    for one, owner in ((optimizer, model), (other, other_model)):
        step(one, owner, 3)
    for ours, theirs in zip(optimizer.masters().values(), other.masters().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradient_that_is_not_finite_is_seen_without_a_sum():
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(), Schedule(10, 0, 1.0))
    optimizer.take_gradients_directly()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert optimizer.is_finite()
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[5, 5] = torch.inf
    assert not optimizer.is_finite()
    assert "0.weight" in optimizer.blame()
