"""Speculative decoding with a real target: equal output, counted acceptance."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from trainer.contract.config import TrainConfig
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import BatchMaker, BatchPlan, place_features
from trainer.errors import DataError
from trainer.evaluate import (
    Decoded,
    decode_plain,
    decode_speculative,
    evaluate,
    first_difference,
    walk,
    walk_blocks,
)
from trainer.export import export_draft, load_export
from trainer.loss import draft_loss
from trainer.model.draft import DraftConfig, DraftModel, measured_tap_scale
from trainer.model.target import Target, default_target_layer_ids

MakeTrainConfig = Callable[..., TrainConfig]
NUM_NEW = 24


@dataclass(frozen=True)
class Overfitted:
    """A draft trained on ten greedy answers of the tiny target."""

    target: Target
    draft: DraftModel
    prompts: list[list[int]]
    samples: list[Sample]


_made: list[Overfitted] = []


@pytest.fixture
def overfitted(tiny_llama: LlamaForCausalLM, train_config: MakeTrainConfig) -> Overfitted:
    """Ten samples, 120 steps; made once."""
    if _made:
        return _made[0]
    target = Target(tiny_llama, default_target_layer_ids(6, 3))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, 8).tolist() for _ in range(10)]
    samples = []
    for i, prompt in enumerate(prompts):
        answer = decode_plain(target, prompt, NUM_NEW).tokens
        ids = np.array(prompt + answer, np.int32)
        samples.append(Sample(i, ids, np.arange(len(ids)) >= len(prompt)))
    dataset = ChatDataset("made", "0" * 64, tuple(samples))
    unused = min(set(range(260)) - {int(t) for s in samples for t in s.input_ids})
    config = train_config(draft={"normalise_taps": True, "mask_token_id": unused})
    maker = BatchMaker(dataset, BatchPlan(dataset.lengths, config.data, 0), config)
    draft = DraftModel(DraftConfig.from_target(target.text_config, config.draft, 6))
    taps = target.document_features([torch.tensor(p) for p in prompts])
    draft.tap_scale.copy_(measured_tap_scale(taps, 3))
    optimiser = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for step in range(120):
        batch = maker.make(step)
        taps = place_features(target.document_features(batch.document_tokens()), batch)
        sums = draft_loss(draft, target.head, batch, taps, config)
        (sums.loss_sum / sums.weight_sum).backward()
        optimiser.step()
        optimiser.zero_grad()
    _made.append(Overfitted(target, draft, prompts, samples))
    return _made[0]


def test_overfitted_draft_is_accepted_and_its_output_is_the_plain_one(overfitted: Overfitted):
    told: list[tuple[str, int, int]] = []
    found = evaluate(
        overfitted.target,
        overfitted.draft,
        overfitted.prompts,
        NUM_NEW,
        progress=lambda *step: told.append(step),
    )
    assert found.acceptance_length > 1.5
    assert (found.num_equal, found.lossless, found.differences) == (10, True, [])
    assert found.speed_up == pytest.approx(found.plain_s / found.speculative_s)
    assert told == [("decoding", i + 1, 10) for i in range(10)]
    # every token but the first of a prompt comes out of a verify call
    calls = sum(p.num_verify_calls for p in found.prompts)
    assert found.acceptance_length == pytest.approx((found.num_tokens_speculative - 10) / calls)
    assert found.interval[0] <= found.acceptance_length <= found.interval[1]


def test_share_of_accepted_slots_never_rises_along_the_block(overfitted: Overfitted):
    by_position = evaluate(
        overfitted.target, overfitted.draft, overfitted.prompts[:4], NUM_NEW
    ).by_position
    assert len(by_position) == 3
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] > 0.5


def test_result_is_json_with_the_named_facts(overfitted: Overfitted):
    result = evaluate(overfitted.target, overfitted.draft, overfitted.prompts[:2], 8).to_dict()
    read = json.loads(json.dumps(result, allow_nan=False))
    assert (read["num_prompts"], read["equal_frac"], read["lossless"]) == (2, 1.0, True)
    assert read["target_dtype"] == "float32"
    assert len(read["prompts"]) == 2


def test_walk_over_the_targets_own_answers_gives_what_decoding_gives(overfitted: Overfitted):
    found = evaluate(overfitted.target, overfitted.draft, overfitted.prompts, NUM_NEW)
    estimate = walk(overfitted.target, overfitted.draft, overfitted.samples)
    assert estimate.walk_acceptance_length == pytest.approx(found.acceptance_length)
    assert estimate.to_dict()["num_walk_samples"] == 10


def test_export_decodes_as_the_draft_it_was_written_from(overfitted: Overfitted, tmp_path: Path):
    export_draft(overfitted.draft, tmp_path / "export")
    loaded = load_export(tmp_path / "export")
    ours, theirs = (
        evaluate(overfitted.target, draft, overfitted.prompts[:3], NUM_NEW)
        for draft in (overfitted.draft, loaded)
    )
    assert ours.acceptance_length == theirs.acceptance_length


def untrained(target: Target, config: TrainConfig) -> DraftModel:
    return DraftModel(DraftConfig.from_target(target.text_config, config.draft, target.num_layers))


def test_useless_draft_still_leaves_the_output_unchanged(
    tiny_llama: LlamaForCausalLM, train_config: MakeTrainConfig
):
    target = Target(tiny_llama, (1, 2, 3))
    draft = untrained(target, train_config())
    found = evaluate(target, draft, [[5, 6, 7], [9]], 12)
    assert found.lossless
    assert 1.0 <= found.acceptance_length < 1.5


def test_lower_precision_never_counts_as_lossless(
    tiny_llama: LlamaForCausalLM, train_config: MakeTrainConfig
):
    model = LlamaForCausalLM(tiny_llama.config)
    model.load_state_dict(tiny_llama.state_dict())
    target = Target(model.bfloat16(), (1, 2, 3))
    found = evaluate(target, untrained(target, train_config()), [[5, 6, 7], [9, 8]], 12)
    assert (found.lossless, found.target_dtype) == (False, "bfloat16")
    assert found.num_equal + len(found.differences) == 2


def test_answer_ends_at_the_stop_token_in_the_middle_of_a_block(
    overfitted: Overfitted, tiny_llama: LlamaForCausalLM
):
    prompt = overfitted.prompts[0]
    whole = decode_plain(overfitted.target, prompt, NUM_NEW).tokens
    stop = next(t for i, t in enumerate(whole) if i >= 5 and t not in whole[:i])
    expected = whole[: whole.index(stop) + 1]
    before = tiny_llama.generation_config.eos_token_id
    tiny_llama.generation_config.eos_token_id = stop
    try:
        plain = decode_plain(overfitted.target, prompt, NUM_NEW)
        fast = decode_speculative(
            overfitted.target, overfitted.draft, prompt, NUM_NEW, head=overfitted.target.head
        )
    finally:
        tiny_llama.generation_config.eos_token_id = before
    assert plain.tokens == fast.tokens == expected
    assert sum(fast.emitted) == len(expected) - 1


@pytest.mark.parametrize("num_new", [1, 2, 7])
def test_no_more_than_the_asked_tokens_come_out(overfitted: Overfitted, num_new: int):
    found = evaluate(overfitted.target, overfitted.draft, overfitted.prompts[:2], num_new)
    assert found.num_tokens_speculative == found.num_tokens_plain == 2 * num_new
    assert found.lossless


def test_hybrid_target_replays_what_its_recurrent_state_cannot_forget(
    train_config: MakeTrainConfig,
):
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    text = qwen.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target = Target(qwen.Qwen3_5ForCausalLM(text), (1, 2))
    config = train_config(draft={"mask_token_id": 63, "target_layer_ids": [1, 2]})
    found = evaluate(target, untrained(target, config), [[5, 6, 7, 8], [9, 1]], 16)
    assert found.differences == []
    assert found.acceptance_length < 2  # blocks were rejected, so the state was put back


def test_walk_takes_a_block_at_a_time_and_stops_at_the_answers_end():
    # anchors 0 (accepts 2), 3 (accepts 0), 4 (accepts 3, of which only token 5 is left)
    assert walk_blocks([2, 0, 0, 0, 3], 6) == (5, 3)


def test_first_difference_is_a_near_tie_when_the_plain_logits_nearly_tie():
    plain = Decoded([1, 2, 3], 0.0, [], [], gaps=[5.0, 0.1, 5.0], tops=[20.0, 20.0, 20.0])
    fast = Decoded([1, 9, 9], 0.0, [], [], [], [])
    bf16 = 4 * 2.0**-7  # four roundings of bfloat16: 0.03 x 20 = 0.6
    found = first_difference(3, plain, fast, bf16)
    assert found is not None
    assert (found.prompt, found.token, found.gap, found.near_tie) == (3, 1, 0.1, True)
    wide = first_difference(3, plain, Decoded([7, 2, 3], 0.0, [], [], [], []), bf16)
    assert wide is not None
    assert not wide.near_tie


def test_evaluation_without_prompts_is_refused(overfitted: Overfitted):
    with pytest.raises(DataError, match="at least one prompt"):
        evaluate(overfitted.target, overfitted.draft, [], 4)
    with pytest.raises(DataError, match="no empty one"):
        evaluate(overfitted.target, overfitted.draft, [[1], []], 4)


def test_windowed_target_replays_what_its_window_has_dropped(train_config: MakeTrainConfig):
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=6,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target = Target(MistralForCausalLM(config), (1, 2))
    settings = train_config(draft={"mask_token_id": 63, "target_layer_ids": [1, 2]})
    found = evaluate(target, untrained(target, settings), [[5, 6, 7, 8], [9, 1]], 16)
    assert found.differences == []
    assert found.acceptance_length < 2
