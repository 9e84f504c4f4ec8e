"""The one-pass AdamW on an NVIDIA GPU against torch's own, weights, moments and state."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import checkpoint
from trainer.contract.config import OptimConfig
from trainer.errors import NonFiniteError
from trainer.learning_rate import Schedule
from trainer.optim import DraftOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # No size is a multiple of a kernel's block, so that its last one is masked; that of the last
    # is one of 16, so that its loads are wide, and of the others not.
    layers = (
        nn.Linear(37, 5003, bias=False),
        nn.LayerNorm(5003, bias=False),
        nn.Linear(5003, 48, bias=False),
    )
    return nn.Sequential(*layers).to("cuda", dtype)


def _all_numbers(model: nn.Module, optimizer: DraftOptimizer) -> dict[str, torch.Tensor]:
    """Weights, masters, moments, step counts and average, as copies."""
    kinds = {
        "weight": model.state_dict(),
        "master": optimizer.masters(),
        "state": optimizer.state(),
        "average": optimizer.average(),
    }
    return {f"{kind} {name}": t.clone() for kind, held in kinds.items() for name, t in held.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [False, True])
def test_steps_equal_those_of_torch(dtype: torch.dtype, direct: bool):
    config = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    schedule = Schedule(num_steps=30, num_warmup_steps=2, min_frac=0.1)
    model = _model(dtype)
    optimizer = DraftOptimizer(model, config, schedule)
    if direct:
        optimizer.take_gradients_directly()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    groups = [{"params": masters[::2], "weight_decay": 0.1}, {"params": masters[1:2]}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, weight_decay=0.0)
    for step in range(20):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for _ in range(1 if direct else 2):  # micro-batches
            for param, master in zip(model.parameters(), masters, strict=True):
                param.grad = torch.randn_like(param)
                assert master.grad is not None
                master.grad += param.grad.float() / 8
            optimizer.accumulate()
        norm = float(nn.utils.clip_grad_norm_(masters, 1.0))  # about 150: clipped
        for group in theirs.param_groups:
            group["lr"] = 1e-2 * schedule.factor(step)
        theirs.step()
        applied = optimizer.apply(step, 1.0, 8.0)
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4)
    for ours, master in zip(optimizer.masters().values(), masters, strict=True):
        torch.testing.assert_close(ours, master.data, rtol=1e-4, atol=1e-6)
    for param, master in zip(model.parameters(), optimizer.masters().values(), strict=True):
        tie = (master.view(torch.int32) & 0xFFFF) == 0x8000  # goes away from zero if it is split
        assert torch.equal(param.data[~tie], master.to(dtype)[~tie])
    assert {t.item() for key, t in optimizer.state().items() if key.endswith("/step")} == {20.0}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("loss_sum", [math.nan, math.inf, 1.0])
def test_step_that_is_not_finite_changes_nothing_on_the_device(direct: bool, loss_sum: float):
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(ema_decay=0.9), Schedule(10, 0, 1.0))
    if direct:
        optimizer.take_gradients_directly()

    def backward() -> nn.Parameter:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return next(model.parameters())

    backward()
    optimizer.accumulate()
    optimizer.apply(0, 1.0, 4.0)
    before = _all_numbers(model, optimizer)
    first = backward()
    if math.isfinite(loss_sum):  # then the gradient is not
        assert first.grad is not None
        first.grad[5, 5] = torch.inf
    optimizer.accumulate()
    sums = torch.tensor([loss_sum, 4.0], dtype=torch.float64, device="cuda")
    launched = optimizer.launch(1, sums, optimizer.grad_norm())
    after = _all_numbers(model, optimizer)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    with pytest.raises(NonFiniteError, match=r"step 2: .* the weights were not changed") as info:
        optimizer.settle(1, launched.wait())
    assert ("first 0.weight" in str(info.value)) is math.isfinite(loss_sum)


def test_step_without_weight_changes_nothing_but_goes_on():
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(ema_decay=0.9), Schedule(10, 0, 1.0))
    before = _all_numbers(model, optimizer)
    optimizer.accumulate()  # no gradient at all: zeros
    assert optimizer.apply(0, 0.0, 0.0).grad_norm == 0.0
    after = _all_numbers(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["state 0.weight/step"].item() == 0.0


def test_step_of_one_drafter_waits_for_nothing_before_it_is_read():
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(), Schedule(10, 0, 1.0))
    optimizer.take_gradients_directly()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.accumulate()
    optimizer.rehearse()  # compiles
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.accumulate()
    sums = torch.tensor([1.0, 4.0], dtype=torch.float64, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        launched = optimizer.launch(0, sums, optimizer.grad_norm())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.settle(0, launched.wait()).grad_norm > 0


def test_split_masters_take_two_bytes_a_weight_and_are_copied_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    model.to("cuda", torch.bfloat16)
    addresses = [param.data_ptr() for param in model.parameters()]
    count, before = 8 << 20, torch.cuda.memory_allocated()
    optimizer = DraftOptimizer(model, OptimConfig(), Schedule(10, 0, 1.0))
    optimizer.take_gradients_directly()
    assert torch.cuda.memory_allocated() - before == pytest.approx(2 * count, rel=0.05)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    for master in optimizer.masters().values():
        assert master.dtype == torch.float32
    assert optimizer.has_finite_weights()
    assert torch.cuda.max_memory_allocated() - held < 4 * count // 2
    assert [param.data_ptr() for param in model.parameters()] == addresses


def test_step_after_weights_were_written_past_the_masters_is_refused():
    model = _model(torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(lr=1e-3), Schedule(10, 0, 1.0))
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    with pytest.raises(RuntimeError, match=r"3 weights were written after .*, first 0\.weight: "):
        optimizer.apply(0, 1.0, 1.0)
    optimizer.load({name: value.float() for name, value in other.items()}, {})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.accumulate()
    optimizer.apply(0, 1.0, 1.0)
    for name, master in optimizer.masters().items():
        torch.testing.assert_close(master, other[name].float() - 1e-3, rtol=0, atol=1e-6)


def test_checkpoint_goes_from_whole_masters_to_split_ones_and_back(tmp_path: Path):
    config, schedule = OptimConfig(lr=1e-2, ema_decay=0.5), Schedule(10, 0, 1.0)
    last: DraftOptimizer | None = None
    for step, device in enumerate(("cpu", "cuda", "cpu")):  # on a CPU masters are whole
        model = _model(torch.bfloat16).to(device)
        optimizer = DraftOptimizer(model, config, schedule)
        if last is not None:
            saved = checkpoint.CheckpointState(
                step, step, {}, last.masters(), last.state(), average=last.average()
            )
            loaded = checkpoint.load(checkpoint.save(tmp_path, saved, keep=1))
            optimizer.load(loaded.masters, loaded.optimizer, loaded.average)
            for name, master in optimizer.masters().items():
                assert loaded.masters[name].dtype == torch.float32
                assert torch.equal(master.cpu(), last.masters()[name].cpu())
                assert torch.equal(optimizer.average()[name].cpu(), last.average()[name].cpu())
            assert all(
                torch.equal(t.cpu(), last.state()[n].cpu()) for n, t in optimizer.state().items()
            )
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.accumulate()
        optimizer.apply(step, 1.0, 1.0)
        last = optimizer
    assert last is not None
    assert last.state()["0.weight/step"].item() == 3.0


def test_state_of_another_optimizer_is_gone_on_with():
    config, schedule = OptimConfig(lr=1e-2, ema_decay=0.5), Schedule(10, 0, 1.0)
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
    other.load(masters, state, {key: value.cpu() for key, value in optimizer.average().items()})
    for number in range(3, 6):
        for one, owner in ((optimizer, model), (other, other_model)):
            step(one, owner, number)
    ours, theirs = _all_numbers(model, optimizer), _all_numbers(other_model, other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert not torch.equal(ours["average 0.weight"], ours["master 0.weight"])
