"""The draft network: names, leaks, decoding form, precision, tap scales."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.trainer.method.conftest import stirred
from trainer.contract.config import VARIANTS, DraftModelConfig
from trainer.errors import TargetError
from trainer.model.draft import DraftConfig, DraftModel, measured_tap_scale
from trainer.model.layers import Rotary
from trainer.model.masks import BlockLayout

MakeConfig = Callable[..., DraftConfig]
SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6}


def run(
    draft: DraftModel, blocks: Tensor, taps: Tensor, anchors: list[int], *, drafted: bool = False
) -> Tensor:
    """Training forward of one document. Shapes: blocks [N, B, D], taps [S, n * D] -> [N, B, D]."""
    at, positions = torch.tensor([anchors]), torch.arange(len(taps))[None]
    layout = BlockLayout.of(
        at, torch.ones_like(at, dtype=torch.bool), torch.zeros_like(positions).int()
    )
    places = (at[..., None] + torch.arange(blocks.shape[1])).flatten(1)
    masks = draft.attention.masks(layout, draft.config.rules)
    where = positions, places, masks
    out: Tensor = draft(blocks.flatten(0, 1)[None], taps[None], *where, drafted=drafted)
    return out.view(len(blocks), -1, blocks.shape[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafted_slots_and_all_gradients_are_those_of_the_whole_forward(
    draft_config: MakeConfig, variant: str
):
    draft = stirred(draft_config(variant=variant, **SLIDING))
    size, anchors = draft.config.block_size, [2, 3, 9]
    taps = torch.randn(14, draft.fc.in_features)
    blocks = torch.randn(3, 1, 32).repeat(1, size, 1)
    blocks[:, 1:] = torch.randn(32)  # masks are all alike
    upstream = torch.randn(3, size - 1, 32)
    results = []
    for drafted in (False, True):
        draft.zero_grad()
        out = run(draft, blocks, taps, anchors, drafted=drafted)
        kept = out if drafted else out[:, 1:]
        (kept * upstream).sum().backward()
        found = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
        results.append((kept.detach(), found))
    (whole, wanted), (kept, gradients) = results
    torch.testing.assert_close(kept, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients, wanted, atol=1e-4, rtol=1e-3)


def test_tensors_are_the_published_3_plus_11_a_layer(draft_config: MakeConfig):
    names = [name for name, _ in DraftModel(draft_config(num_draft_layers=5)).named_parameters()]
    assert len(names) == 3 + 11 * 5
    assert {n for n in names if not n.startswith("layers.")} == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert {n.removeprefix("layers.4.") for n in names if n.startswith("layers.4.")} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }


def test_block_output_does_not_depend_on_taps_at_or_after_its_anchor(draft_config: MakeConfig):
    draft = stirred(draft_config())
    taps = torch.randn(12, 64, requires_grad=True)
    out = run(draft, torch.randn(1, 4, 32), taps, [5])
    (grad,) = torch.autograd.grad(out.sum(), taps)
    assert grad[5:].abs().max() == 0
    assert (grad[:5].abs().sum(-1) > 0).all()


def test_close_blocks_do_not_leak_into_each_other(draft_config: MakeConfig):
    draft = stirred(draft_config())
    taps, blocks = torch.randn(12, 64), torch.randn(2, 4, 32)
    together = run(draft, blocks, taps, [5, 6])
    alone = torch.cat([run(draft, blocks[i : i + 1], taps, [5 + i]) for i in range(2)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"causal": True}, SLIDING], ids=["full", "causal", "swa"])
def test_cached_decoding_equals_the_training_forward(
    draft_config: MakeConfig, changes: dict[str, object]
):
    draft = stirred(draft_config(**changes))
    taps, blocks, anchors = torch.randn(20, 64), torch.randn(3, 4, 32), [3, 4, 11]
    with torch.no_grad():
        wanted = run(draft, blocks, taps, anchors)
    cache, held = draft.new_cache(), 0
    for block, anchor, expected in zip(blocks, anchors, wanted, strict=True):
        draft.append(cache, taps[None, held:anchor])
        held = anchor
        found = draft.draft_block(cache, block[None], anchor)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_drafting_at_another_place_than_the_cache_ends_is_refused(draft_config: MakeConfig):
    draft = DraftModel(draft_config())
    cache = draft.new_cache()
    draft.append(cache, torch.randn(1, 5, 64))
    with pytest.raises(ValueError, match="block at 7, but the cache holds 5 tokens"):
        draft.draft_block(cache, torch.randn(1, 4, 32), 7)


def test_rotary_angles_stay_fp32_in_a_bf16_model(draft_config: MakeConfig):
    config = draft_config(head_dim=64, rope_theta=1e7)
    position = torch.tensor([[3071]])
    found = Rotary.at(position, config, torch.bfloat16).cos[0, 0, 0, :32].float()
    exact = (3071 * 1e7 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)).cos()
    # bf16 of the cosine is off by at most 2 ** -9; bf16 frequencies would be off by radians
    assert (found.double() - exact).abs().max() < 0.003


def test_casting_the_draft_leaves_no_buffer_of_frequencies_to_round(draft_config: MakeConfig):
    assert [n for n, _ in DraftModel(draft_config()).named_buffers()] == ["tap_scale"]


def test_tap_scale_divides_each_tap_by_its_own_rms(draft_config: MakeConfig):
    features = [torch.cat((torch.full((3, 32), 4.0), torch.full((3, 32), 0.5)), 1)]
    scale = measured_tap_scale(features, num_taps=2)
    assert scale.tolist() == [0.25, 2.0]
    scaled, plain = stirred(draft_config(normalise_taps=True)), stirred(draft_config())
    scaled.tap_scale.copy_(scale)
    taps = torch.randn(2, 5, 64)
    columns = torch.tensor([0.25] * 32 + [2.0] * 32)
    torch.testing.assert_close(scaled.fuse(taps), plain.fuse(taps * columns))


def test_replicas_of_one_seed_are_equal_and_of_two_are_not(draft_config: MakeConfig):
    first, same, other = (DraftModel(draft_config(), seed=s) for s in (7, 7, 8))
    assert torch.equal(first.fc.weight, same.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_tied_target_starts_with_a_small_final_norm(draft_config: MakeConfig):
    assert DraftModel(draft_config(tied_target=True)).norm.weight.unique().item() == pytest.approx(
        0.3
    )
    assert DraftModel(draft_config()).norm.weight.unique().item() == 1.0


def text_config(**changes: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_theta": 1e7,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 512,
        "vocab_size": 100,
    }
    return SimpleNamespace(**values | changes)


def test_open_settings_come_from_the_targets_text_configuration():
    config = DraftModelConfig(num_draft_layers=2, num_taps=5, mask_token_id=99)
    found = DraftConfig.from_target(text_config(), config, num_target_layers=36)
    assert found.target_layer_ids == (1, 9, 17, 25, 33)
    assert (found.rope_theta, found.head_dim, found.intermediate_size) == (1e7, 16, 96)
    assert found.layer_types == ("full_attention",) * 2


def test_given_ids_are_taken_as_they_are_and_may_differ_in_number_from_layers():
    ids = (1, 6, 11, 16, 22, 27, 32, 37)
    config = DraftModelConfig(num_draft_layers=6, mask_token_id=9, target_layer_ids=ids)
    found = DraftConfig.from_target(text_config(), config, num_target_layers=40)
    assert (found.target_layer_ids, found.num_taps) == (ids, 8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": 100}, r"mask_token_id 100: embedding rows are 0\.\.99"),
        ({"target_layer_ids": (1, 36)}, r"target_layer_ids \[1, 36\].*0\.\.35"),
        ({"num_attention_heads": 5}, "num_attention_heads 5: not a multiple"),
        ({"head_dim": 7}, "head_dim 7"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_named(changes: dict[str, object], named: str):
    config = DraftModelConfig(**{"mask_token_id": 9, **changes})
    with pytest.raises(TargetError, match=named):
        DraftConfig.from_target(text_config(), config, num_target_layers=36)


def test_target_without_a_needed_size_is_told_which():
    lacking = text_config(intermediate_size=None)
    config = DraftModelConfig(num_draft_layers=1, mask_token_id=9)
    with pytest.raises(TargetError, match=r"no intermediate_size; set draft\.intermediate_size"):
        DraftConfig.from_target(lacking, config, num_target_layers=36)
    given = replace(config, intermediate_size=80)
    assert DraftConfig.from_target(lacking, given, 36).intermediate_size == 80


def test_theta_is_found_where_each_generation_of_configurations_keeps_it():
    config = DraftModelConfig(num_draft_layers=1, mask_token_id=9)
    places = [
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {}}},
    ]
    for place in places:
        found = DraftConfig.from_target(text_config(**place), config, num_target_layers=36)
        assert found.rope_theta == 5e5
    with pytest.raises(TargetError, match="no rope_theta"):
        DraftConfig.from_target(text_config(rope_parameters=None), config, 36)
