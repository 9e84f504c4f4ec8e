"""The small random target: same class and kinds of layers, whatever the real one's size."""

from types import SimpleNamespace

import pytest
import transformers

from trainer.check.findings import NotApplicableError
from trainer.check.miniature import build_miniature, cut_settings, layer_count, tap_ids


def qwen36() -> transformers.Qwen3_5TextConfig:
    """The text part of a 27B hybrid, by its published sizes."""
    return transformers.Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
    )


def test_taps_hold_the_first_and_the_last_layer() -> None:
    assert tap_ids(6, 5) == (0, 2, 3, 4, 5)
    assert tap_ids(4, 4) == (0, 1, 2, 3)
    assert tap_ids(4, 1) == (3,)


def test_widths_are_cut_and_what_decides_the_code_stays() -> None:
    text = qwen36()
    cut = cut_settings(text, layer_count(text, 5))
    assert (cut["num_hidden_layers"], cut["hidden_size"], cut["intermediate_size"]) == (6, 64, 96)
    assert (cut["num_attention_heads"], cut["num_key_value_heads"]) == (4, 2)
    assert (cut["linear_num_key_heads"], cut["linear_num_value_heads"]) == (2, 6)
    assert (cut["head_dim"], cut["vocab_size"]) == (256, 512)
    linear, full = "linear_attention", "full_attention"
    assert cut["layer_types"] == [linear, linear, linear, full, linear, linear]


def test_a_model_of_the_same_class_comes_out_with_the_same_weights_each_time() -> None:
    text = qwen36()
    models = [build_miniature(text, 4, seed=3) for _ in range(2)]
    assert type(models[0]).__name__ == "Qwen3_5ForCausalLM"
    first, second = (model.get_output_embeddings().weight for model in models)
    assert bool((first == second).all())


def test_a_kind_of_layer_that_comes_late_is_said_to_be_out_of_reach() -> None:
    kinds = ["full_attention"] * 20 + ["sliding_attention"]
    text = SimpleNamespace(num_hidden_layers=21, layer_types=kinds)
    with pytest.raises(NotApplicableError, match="first 16 layers do not hold every kind"):
        layer_count(text, 2)


def test_an_architecture_that_refuses_small_sizes_is_not_applicable() -> None:
    text = transformers.LlamaConfig(num_hidden_layers=4, hidden_act="no such function")
    with pytest.raises(NotApplicableError, match="cannot be cut small"):
        build_miniature(text, 2, seed=0)
