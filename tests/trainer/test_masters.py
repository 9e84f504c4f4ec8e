"""Split masters: what is taken apart comes together again, to the bit."""

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.masters import Layout, NamedMasters, SplitMasters, WholeMasters, halves, whole

LARGEST_BF16 = 0x7F7F0000


def _floats(*bits: int) -> Tensor:
    """Return the fp32 numbers of these bits, and the negative ones."""
    patterns = torch.tensor([*bits, *(one | 1 << 31 for one in bits)], dtype=torch.int64)
    return patterns.to(torch.int32).view(torch.float32)  # modulo 2**32


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32)


EDGES = _floats(
    *(upper << 16 | lower for upper in (0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F)
      for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)),
    0x7F800000,
)  # fmt: skip


def _random() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=draw)
    numbers = bits.to(torch.int32).view(torch.float32)
    return torch.where(numbers.isnan(), 1.0, numbers)


@pytest.mark.parametrize("numbers", [EDGES, _random()], ids=["edges", "random"])
def test_halves_make_the_master_again_and_the_weight_is_the_master_rounded(numbers: Tensor) -> None:
    weight, rest = halves(numbers)
    assert (weight.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(_bits(whole(weight, rest)), _bits(numbers))
    tie = (_bits(numbers) & 0xFFFF) == 0x8000
    theirs = numbers.to(torch.bfloat16)
    differs = weight.view(torch.int16) != theirs.view(torch.int16)
    assert not differs[~tie].any()
    # A tie goes away from zero: one step further where the even one was nearer to zero.
    upper = _bits(numbers) >> 16
    assert torch.equal(weight.view(torch.int16)[tie].int(), (upper + 1)[tie])
    assert torch.equal(differs, tie & (upper % 2 == 0))
    assert 0 < int(tie.sum()) < len(numbers) // 4


def test_rounding_of_single_numbers() -> None:
    cases = {
        0x00000000: (0x0000, 0),
        0x80000000: (0x8000, 0),  # -0.0
        0x00000001: (0x0000, 1),  # the smallest number
        0x80000001: (0x8000, 1),
        0x3F808000: (0x3F81, -0x8000),  # a tie
        0xBF808000: (0xBF81, -0x8000),
        0x3F80FFFF: (0x3F81, -1),
        LARGEST_BF16 + 0x7FFF: (0x7F7F, 0x7FFF),
        LARGEST_BF16 + 0x8000: (0x7F80, -0x8000),  # an infinite weight, a finite master
        0xFF7FFFFF: (0xFF80, -1),
        0xFF800000: (0xFF80, 0),
    }
    numbers = torch.tensor(list(cases), dtype=torch.int64).to(torch.int32).view(torch.float32)
    weight, rest = halves(numbers)
    found = zip((weight.view(torch.int16).int() & 0xFFFF).tolist(), rest.tolist(), strict=True)
    assert list(found) == list(cases.values())


def test_nan_stays_nan_in_weight_and_master() -> None:
    weight, rest = halves(_floats(0x7F800001, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF))
    assert bool(weight.isnan().all())
    assert bool(whole(weight, rest).isnan().all())


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 5), (7,), (2, 2, 2))]


def _split(params: list[nn.Parameter]) -> SplitMasters:
    return SplitMasters(params, Layout.of(params, 64))


def test_split_masters_begin_at_their_weights_and_hold_what_they_are_given() -> None:
    params = _params(torch.bfloat16)
    before = [param.detach().clone() for param in params]
    addresses = [param.data_ptr() for param in params]
    masters = _split(params)
    assert masters.flat.shape == (3 * 64,)  # a place of 64 for each
    for place, value in enumerate(before):
        assert torch.equal(masters[place], value.float())
    given = torch.randn(7)
    masters.set(1, given)
    assert torch.equal(masters[1], given)
    assert torch.equal(params[1].data, given.to(torch.bfloat16))
    assert torch.equal(masters[0], before[0].float())
    assert torch.equal(masters[2], before[2].float())
    assert [param.data_ptr() for param in params] == addresses


def test_split_masters_are_copies_and_whole_ones_are_not() -> None:
    params, others = _params(torch.bfloat16), _params(torch.bfloat16)
    split = NamedMasters("abc", _split(params))
    held = NamedMasters("abc", WholeMasters(others, Layout.of(others, 1)))
    assert list(split) == list(held) == ["a", "b", "c"]
    for one in (split, held):
        one["b"].zero_()
    assert split["b"].any()
    assert not held["b"].any()


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3.4e38])
def test_masters_whose_weights_are_not_finite_are_seen(bad: float) -> None:
    masters = _split(_params(torch.bfloat16))
    assert masters.are_finite()
    masters.set(2, torch.tensor(bad).expand(2, 2, 2))  # 3.4e38 is none in bf16
    assert not masters.are_finite()


@pytest.mark.parametrize("kind", [WholeMasters, SplitMasters])
def test_weights_written_past_their_masters_are_named(kind: type) -> None:
    params = _params(torch.bfloat16)
    masters = kind(params, Layout.of(params, 64))
    model = nn.Module()
    for name, param in zip("abc", params, strict=True):
        model.register_parameter(name, param)
    assert masters.rewritten() == []
    masters.set(0, torch.ones(3, 5))
    assert masters.rewritten() == []
    model.load_state_dict({"b": torch.ones(7)}, strict=False)
    params[2].data = torch.ones(2, 2, 2, dtype=torch.bfloat16)
    assert masters.rewritten() == [1, 2]
    masters.set(1, torch.ones(7))
    assert masters.rewritten() == [2]


def test_fp32_weights_are_masters_and_may_be_written() -> None:
    params = _params(torch.float32)
    masters = WholeMasters(params, Layout.of(params, 64))
    with torch.no_grad():
        params[1].fill_(3.0)
    assert masters.rewritten() == []
    assert masters[1].tolist() == [3.0] * 7
