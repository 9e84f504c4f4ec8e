"""The optimiser: first steps worked out by hand, masters, guard, state."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import checkpoint
from trainer.contract.config import OptimConfig
from trainer.errors import CheckpointError, NonFiniteError
from trainer.learning_rate import Schedule
from trainer.masters import WeightAverage
from trainer.optim import DraftOptimizer

FLAT = Schedule(num_steps=100, num_warmup_steps=0, min_frac=1.0)


class Tiny(nn.Module):
    """Names as in the draft: a matrix of a layer, a matrix outside, a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False, dtype=dtype)])
        self.fc = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(4, bias=False, dtype=dtype)


def _one_weight(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def test_schedule_warms_up_linearly_and_falls_as_a_cosine() -> None:
    schedule = Schedule(num_steps=10, num_warmup_steps=2, min_frac=0.1)
    assert [schedule.factor(s) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert schedule.factor(6) == pytest.approx(0.55)  # half way: 0.1 + 0.9 * 0.5
    assert schedule.factor(10) == pytest.approx(0.1)
    assert schedule.factor(99) == pytest.approx(0.1)


def test_schedule_of_a_config_takes_the_fraction_of_the_steps() -> None:
    schedule = Schedule.from_config(OptimConfig(warmup_frac=0.04, min_lr_frac=0.2), 500)
    assert schedule == Schedule(500, 20, 0.2)


def test_schedule_says_where_it_stands() -> None:
    schedule = Schedule(num_steps=10, num_warmup_steps=2, min_frac=0.1)
    assert schedule.describe(6) == (
        "schedule: 2 steps of warm-up, cosine to 0.1; step 6 of 10 takes 0.5500"
    )


def test_average_follows_the_weights_with_a_decay_that_rises() -> None:
    average = WeightAverage(torch.tensor([10.0]), 0.2)
    weights = torch.tensor([0.0])
    average.follow(weights, 0)  # decay 1/10
    assert average.flat.item() == pytest.approx(1.0)
    average.follow(weights, 1)  # 2/11
    assert average.flat.item() == pytest.approx(2 / 11)
    average.follow(weights, 50)  # 0.2, not 51/60
    assert average.flat.item() == pytest.approx(0.4 / 11)


def test_average_is_that_of_the_masters_in_fp32() -> None:
    model = _one_weight(1.0, torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(lr=0.001, ema_decay=0.5), FLAT)
    model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    optimizer.accumulate()
    optimizer.apply(0, 1.0, 1.0)
    # The master went to 0.999, which bf16 does not have; the first decay is 1/10.
    assert optimizer.average()["weight"].item() == pytest.approx(0.1 + 0.9 * 0.999, abs=1e-6)
    none = DraftOptimizer(model, OptimConfig(ema_decay=0.5), FLAT, keep_average=False)
    assert (none.average(), DraftOptimizer(model, OptimConfig(), FLAT).average()) == ({}, {})


def test_average_that_a_checkpoint_lacks_begins_at_its_weights() -> None:
    optimizer = DraftOptimizer(_one_weight(1.0), OptimConfig(ema_decay=0.9), FLAT)
    optimizer.load({"weight": torch.tensor([[3.0]])}, {})
    assert optimizer.average()["weight"].item() == 3.0
    optimizer.load({"weight": torch.tensor([[3.0]])}, {}, {"weight": torch.tensor([[2.0]])})
    assert optimizer.average()["weight"].item() == 2.0
    with pytest.raises(CheckpointError, match="average: missing"):
        optimizer.load({"weight": torch.tensor([[3.0]])}, {}, {"w": torch.tensor([[2.0]])})


def test_gradient_sum_that_is_not_finite_is_seen() -> None:
    optimizer = DraftOptimizer(_one_weight(1.0), OptimConfig(), FLAT)
    for value, finite in ((1e19, True), (math.nan, False), (-math.inf, False)):
        optimizer.flat_grad.fill_(value)
        assert bool(optimizer.grad_norm(again=True).isfinite()) is finite


def test_first_adamw_step_is_the_learning_rate_after_normalising_and_clipping() -> None:
    model = _one_weight(1.0)
    optimizer = DraftOptimizer(model, OptimConfig(lr=0.01, clip_norm=1.0), FLAT)
    model.weight.grad = torch.tensor([[4.0]])
    optimizer.accumulate()
    applied = optimizer.apply(0, loss_sum=3.0, weight_sum=2.0)
    assert applied.grad_norm == 2.0  # 4 / 2, before clipping
    assert applied.lr == 0.01
    # Adam's first step is lr * g / |g|, whatever the size of g.
    assert model.weight.item() == pytest.approx(0.99, abs=1e-6)
    assert optimizer.flat_grad.tolist() == [0.0]


def test_micro_batches_add_up_in_fp32() -> None:
    model = _one_weight(1.0, torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(), FLAT)
    for value in (256.0, 1.0):  # 257 does not exist in bf16
        model.weight.grad = torch.tensor([[value]], dtype=torch.bfloat16)
        optimizer.accumulate()
        assert model.weight.grad is None
    assert optimizer.flat_grad.tolist() == [257.0]


def test_bf16_model_keeps_small_steps_in_its_fp32_master() -> None:
    model = _one_weight(1.0, torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(lr=0.001), FLAT)
    for step in range(4):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.accumulate()
        optimizer.apply(step, 1.0, 1.0)
        if step == 0:  # bf16 has no number between 0.99609375 and 1
            assert model.weight.item() == 1.0
    assert optimizer.masters()["weight"].item() == pytest.approx(0.996, abs=1e-6)
    assert model.weight.item() == 0.99609375


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_stops_before_a_weight_changes(bad: float) -> None:
    model = Tiny()
    optimizer = DraftOptimizer(model, OptimConfig(), FLAT)
    before = {n: p.clone() for n, p in model.named_parameters()}
    model.fc.weight.grad = torch.full((4, 4), bad)
    optimizer.accumulate()
    with pytest.raises(NonFiniteError, match=r"1 of 3 tensors, first fc\.weight"):
        optimizer.apply(7, 1.0, 1.0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_loss_that_is_not_finite_stops_before_a_weight_changes() -> None:
    model = _one_weight(1.0)
    optimizer = DraftOptimizer(model, OptimConfig(), FLAT)
    model.weight.grad = torch.ones(1, 1)
    optimizer.accumulate()
    with pytest.raises(NonFiniteError, match="loss sum nan"):
        optimizer.apply(0, math.nan, 1.0)
    assert model.weight.item() == 1.0


def test_rehearsed_step_changes_nothing_and_forgets_the_gradient() -> None:
    model = Tiny()
    optimizer = DraftOptimizer(model, OptimConfig(lr=0.01, ema_decay=0.9), FLAT)
    before = {n: p.clone() for n, p in model.named_parameters()}
    model.fc.weight.grad = torch.ones(4, 4)
    optimizer.accumulate()
    optimizer.rehearse()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(torch.equal(tensor, before[n]) for n, tensor in optimizer.average().items())
    assert optimizer.state() == {}
    assert not optimizer.flat_grad.any()


def test_step_without_weight_changes_nothing() -> None:
    model = _one_weight(1.0)
    optimizer = DraftOptimizer(model, OptimConfig(ema_decay=0.9), FLAT)
    optimizer.load({"weight": torch.tensor([[1.0]])}, {}, {"weight": torch.tensor([[2.0]])})
    assert optimizer.apply(0, 0.0, 0.0).grad_norm == 0.0
    assert model.weight.item() == 1.0
    assert optimizer.average()["weight"].item() == 2.0


def test_step_after_weights_were_written_past_the_masters_is_refused() -> None:
    model = _one_weight(1.0, torch.bfloat16)
    optimizer = DraftOptimizer(model, OptimConfig(), FLAT)
    model.load_state_dict({"weight": torch.tensor([[3.0]])})
    with pytest.raises(RuntimeError, match=r"1 weights were written after .*, first weight: "):
        optimizer.apply(0, 1.0, 1.0)
    optimizer.load({"weight": torch.tensor([[3.0]])}, {})
    model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    optimizer.accumulate()
    optimizer.apply(0, 1.0, 1.0)
    assert optimizer.masters()["weight"].item() == pytest.approx(3.0 - 6e-4, abs=1e-6)


def test_muon_takes_the_layers_matrices_and_adamw_the_rest_at_its_own_rate() -> None:
    optimizer = DraftOptimizer(Tiny(), OptimConfig(name="muon", lr=0.01, adamw_lr=0.002), FLAT)
    assert optimizer.describe() == [
        "Muon: 1 tensors, 16 numbers, lr 0.01, weight decay 0",
        "AdamW: 1 tensors, 16 numbers, lr 0.002, weight decay 0",
        "AdamW: 1 tensors, 4 numbers, lr 0.002, weight decay 0",
    ]


def test_weight_decay_leaves_norms_alone() -> None:
    optimizer = DraftOptimizer(Tiny(), OptimConfig(lr=0.01, weight_decay=0.1), FLAT)
    assert optimizer.describe() == [
        "AdamW: 2 tensors, 32 numbers, lr 0.01, weight decay 0.1",
        "AdamW: 1 tensors, 4 numbers, lr 0.01, weight decay 0",
    ]


def test_muon_update_of_a_matrix_has_the_size_of_an_adamw_update() -> None:
    model = Tiny()
    optimizer = DraftOptimizer(model, OptimConfig(name="muon", lr=0.01), FLAT)
    before = model.layers[0].weight.clone()
    model.layers[0].weight.grad = torch.eye(4)
    optimizer.accumulate()
    optimizer.apply(0, 1.0, 1.0)
    change = (before - model.layers[0].weight).detach()
    # lr * 0.2 * sqrt(4) times an orthogonal matrix, which Newton-Schulz reaches within 30 %.
    assert change.diagonal().mean().item() == pytest.approx(0.004, rel=0.3)
    assert (change - torch.diag(change.diagonal())).abs().max().item() < 1e-4


def _train(model: nn.Module, optimizer: DraftOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.accumulate()
        optimizer.apply(step, 1.0, 1.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_optimiser_goes_on_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = OptimConfig(name=name, lr=0.01, weight_decay=0.1, ema_decay=0.9)
    torch.manual_seed(0)
    straight = Tiny(dtype)
    optimizer = DraftOptimizer(straight, config, FLAT)
    _train(straight, optimizer, range(3))
    state = checkpoint.CheckpointState(
        3, 3, {}, optimizer.masters(), optimizer.state(), average=optimizer.average()
    )
    path = checkpoint.save(tmp_path, state, keep=1)
    _train(straight, optimizer, range(3, 6))

    resumed = Tiny(dtype)
    other = DraftOptimizer(resumed, config, FLAT)
    _train(resumed, other, range(1))  # its own moments must be forgotten
    loaded = checkpoint.load(path)
    other.load(loaded.masters, loaded.optimizer, loaded.average)
    _train(resumed, other, range(3, 6))
    for key, tensor in optimizer.masters().items():
        assert torch.equal(tensor, other.masters()[key])
        assert torch.equal(optimizer.average()[key], other.average()[key])
    for key, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key])


def test_checkpoint_of_another_model_is_refused_by_name_and_shape() -> None:
    optimizer = DraftOptimizer(_one_weight(1.0), OptimConfig(), FLAT)
    with pytest.raises(
        CheckpointError, match="missing \\['weight'\\], not of this model \\['w'\\]"
    ):
        optimizer.load({"w": torch.ones(1, 1)}, {})
    with pytest.raises(CheckpointError, match=r"shape \(2, 1\), this model's has \(1, 1\)"):
        optimizer.load({"weight": torch.ones(2, 1)}, {})
    with pytest.raises(CheckpointError, match="unknown parameter: weight/velocity"):
        optimizer.load({"weight": torch.ones(1, 1)}, {"weight/velocity": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"weight/exp_avg has shape \(1,\), this model's has"):
        optimizer.load({"weight": torch.ones(1, 1)}, {"weight/exp_avg": torch.ones(1)})
