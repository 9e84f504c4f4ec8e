"""The fused AdamW's kernels, on an NVIDIA GPU or by Triton's interpreter: ``make kernels``."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.masters import Layout, SplitMasters, WholeMasters

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_INTERPRETER = pytest.mark.skipif(
    not INTERPRETED, reason="needs Triton's interpreter: make kernels"
)
NO_GPU = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize(
        "device",
        [
            pytest.param("cpu", marks=NO_INTERPRETER),
            pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU]),
        ],
    ),
]

# More than one block, whole ones and not; the counts of the last two are no multiples of 16.
SHAPES = ((48, 64), (16,), (3, 7), (2, 2049))
DECAYS = (0.1, 0.0, 0.0, 0.1)


def _draw(seed: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in SHAPES]


class Stepped:
    """Parameters, their masters, and all that the kernels work on."""

    def __init__(
        self, kind: type[SplitMasters | WholeMasters], dtype: torch.dtype, device: str
    ) -> None:
        from trainer.fused_adamw import ALIGNMENT, FusedAdamw, Held  # noqa: PLC0415 - needs Triton

        self.device = device
        self.params = [nn.Parameter(one) for one in _draw(0, dtype, device)]
        layout = Layout.of(self.params, ALIGNMENT)
        self.masters = kind(self.params, layout)
        self.adamw = FusedAdamw(self.params, layout.starts, DECAYS)
        average = torch.zeros(layout.total, device=device)
        for place, view in enumerate(layout.views(average)):
            view.copy_(self.masters[place])
        self.held = Held.begun(self.masters.flat, average)
        self.averages = layout.views(average)

    def step(
        self, grads: list[Tensor | None], sums: tuple[float, float], lr: float = 1e-2
    ) -> float:
        """Take a step; returns the scale of its gradients."""
        from trainer.fused_adamw import Rates  # noqa: PLC0415 - needs Triton

        told = torch.tensor(sums, dtype=torch.float64, device=self.device)
        scale = self.adamw.decide(told, self.adamw.norm(grads).double(), 0.5, self.held)
        self.adamw.step(grads, self.held, Rates(lr, (0.9, 0.95), 1e-8, 0.25), scale)
        return float(scale)

    def numbers(self) -> dict[str, Tensor]:
        """Return copies of all numbers but the weights."""
        moments = {"step": self.held.step, "1": self.held.exp_avg, "2": self.held.exp_avg_sq}
        masters = {f"master {place}": self.masters[place] for place in range(len(SHAPES))}
        held = {"average": self.held.average} | moments | masters
        return {name: value.clone() for name, value in held.items() if value is not None}


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_split_masters_are_whole_ones_to_the_bit(grad_dtype: torch.dtype, device: str):
    split = Stepped(SplitMasters, torch.bfloat16, device)
    held = Stepped(WholeMasters, torch.bfloat16, device)
    moved = 0
    for step in range(4):
        grads: list[Any] = _draw(1 + step, grad_dtype, device)
        grads[step] = None  # zeros
        assert split.step(grads, (1.0, 4.0)) == held.step(grads, (1.0, 4.0))
        ours, wanted = split.numbers(), held.numbers()
        assert ours.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(ours[name].view(torch.int32), value.view(torch.int32)), name
        for place, param in enumerate(split.params):  # the interpreter itself rounds to zero
            master = held.masters[place]
            tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(param.data[~tie], master.to(torch.bfloat16)[~tie])
            moved += int((param.data.float() != master).sum())
    assert moved > 10_000  # most masters are between two weights


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (SplitMasters, torch.bfloat16),
        (WholeMasters, torch.bfloat16),
        (WholeMasters, torch.float32),
    ],
)
def test_steps_are_those_of_torch_and_the_average_follows(
    kind: type[SplitMasters | WholeMasters], dtype: torch.dtype, device: str
):
    ours = Stepped(kind, dtype, device)
    masters = [nn.Parameter(one.float()) for one in _draw(0, dtype, device)]
    groups = [
        {"params": [master], "weight_decay": decay}
        for master, decay in zip(masters, DECAYS, strict=True)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    averages = [master.detach().clone() for master in masters]
    for step in range(4):
        grads = _draw(1 + step, dtype, device)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float() / 4.0
        norm = float(nn.utils.clip_grad_norm_(masters, 0.5))
        theirs.step()
        scale = ours.step(list(grads), (1.0, 4.0))
        assert scale == pytest.approx(0.5 / norm / 4.0, rel=1e-5)
        for average, master in zip(averages, masters, strict=True):
            average.lerp_(master.detach(), 0.25)
    for place, master in enumerate(masters):
        torch.testing.assert_close(ours.masters[place], master.data, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.averages[place], averages[place], rtol=1e-5, atol=1e-6)
    assert ours.held.step.item() == 4.0


@pytest.mark.parametrize("sums", [(math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_step_that_is_not_to_be_taken_changes_nothing(sums: tuple[float, float], device: str):
    ours = Stepped(SplitMasters, torch.bfloat16, device)
    ours.step(list(_draw(1, torch.bfloat16, device)), (1.0, 4.0))
    before, weights = ours.numbers(), [param.detach().clone() for param in ours.params]
    assert math.isnan(ours.step(list(_draw(2, torch.bfloat16, device)), sums))
    bad = _draw(2, torch.bfloat16, device)
    bad[3][1, 5] = math.inf
    assert math.isnan(ours.step(list(bad), (1.0, 4.0)))
    after = ours.numbers()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(p, one) for p, one in zip(ours.params, weights, strict=True))


def test_any_master_is_kept_by_a_step_of_rate_zero(device: str):
    ours = Stepped(SplitMasters, torch.bfloat16, device)
    numbers = []
    for place, shape in enumerate(SHAPES):
        draw = torch.Generator().manual_seed(place)
        bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=draw).to(torch.int32)
        bits.view(-1)[:4] = torch.tensor([0, 1, -(1 << 31), 0x7F7FFFFF])  # also -0 and the largest
        numbers.append(torch.where(bits.view(torch.float32).isnan(), 0, bits).to(device))
        ours.masters.set(place, numbers[place].view(torch.float32))
    ours.step([None] * len(SHAPES), (1.0, 4.0), lr=0.0)
    for place, wanted in enumerate(numbers):
        assert torch.equal(ours.masters[place].view(torch.int32), wanted)
    assert ours.held.step.item() == 1.0


def test_master_that_becomes_nan_has_a_weight_that_is(device: str):
    ours = Stepped(SplitMasters, torch.bfloat16, device)
    for place, param in enumerate(ours.params):
        # All bits: the NaN of a GPU, which rounded as a number would be a zero.
        all_bits = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        ours.held.exp_avg[ours.adamw.starts[place]] = all_bits
        assert param.isfinite().all()
    ours.step(list(_draw(1, torch.bfloat16, device)), (1.0, 4.0))
    for place, param in enumerate(ours.params):
        assert bool(param.flatten()[0].isnan())
        assert bool(ours.masters[place].flatten()[0].isnan())
        assert bool(param.flatten()[1:].isfinite().all())
    assert not ours.masters.are_finite()


def test_split_masters_of_other_weights_than_bf16_are_refused(device: str):
    ours = Stepped(WholeMasters, torch.float32, device)
    ours.held = type(ours.held).begun(torch.zeros_like(ours.held.exp_avg).short(), None)
    with pytest.raises(ValueError, match=r"torch\.float32 are not the upper halves"):
        ours.step(list(_draw(1, torch.float32, device)), (1.0, 4.0))
