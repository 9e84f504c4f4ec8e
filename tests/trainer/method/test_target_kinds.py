"""Targets of every kind: dense, experts, hybrid, multimodal; tied and untied heads; packed rows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.utils import logging as transformers_logging

from tests.trainer import tiny_targets
from trainer.contract.config import DraftModelConfig, TargetConfig
from trainer.errors import TargetError
from trainer.model.batching import check_batching, settle_batching
from trainer.model.packed_attention import packed_row
from trainer.model.target import FULL, PACKED, ROWS, Target, load_target

KINDS = tiny_targets.KINDS
RECURRENT = {"hybrid-text", "hybrid", "hybrid-moe"}
VOCAB = 64
DOCUMENTS = [torch.arange(9), torch.arange(20, 36), torch.arange(40, 43)]

_models: dict[str, Any] = {}


def model(kind: str) -> Any:
    """One model of a kind for the whole module; tests leave it as it was."""
    if kind not in _models:
        _models[kind] = KINDS[kind](vocab_size=VOCAB)
    return _models[kind]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write a model with the file of a tokenizer, as a directory to load."""

    def save(made: Any) -> Path:
        transformers_logging.disable_progress_bar()
        made.save_pretrained(tmp_path / "target")
        (tmp_path / "target" / "tokenizer.json").write_text('{"model": {}}')
        return tmp_path / "target"

    return save


def load(directory: Path, ids: tuple[int, ...] = (1, 3)) -> Target:
    config = TargetConfig(path=str(directory), dtype="float32")
    return load_target(config, DraftModelConfig(target_layer_ids=ids), "cpu")


def text_decoder(made: Any) -> nn.Module:
    """The module with embed_tokens, layers and norm: one level deeper in a wrapper."""
    inner = made.model
    found = inner.language_model if hasattr(inner, "language_model") else inner
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_outputs_of_the_decoder_layers_before_the_final_norm(kind: str):
    made = model(kind)
    target = Target(made, (0, 3))  # 3 is the last layer
    (features,) = target.document_features(DOCUMENTS[:1])
    with torch.no_grad():
        out = text_decoder(made)(input_ids=DOCUMENTS[0][None], output_hidden_states=True)
        after_norm = text_decoder(made).norm(features[:, 32:])
    assert torch.equal(features[:, :32], out.hidden_states[1][0])
    torch.testing.assert_close(after_norm, out.hidden_states[-1][0])
    assert (features[:, 32:] - after_norm).abs().max() > 0.1  # the two do differ


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_behind_the_last_tap_is_called(kind: str):
    made = model(kind)
    called: list[str] = []
    decoder = text_decoder(made)
    watched = {"norm": decoder.norm, "head": made.lm_head}
    watched |= {f"layer {i}": layer for i, layer in enumerate(decoder.layers)}  # type: ignore[arg-type]
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, module in watched.items()
    ]
    try:
        Target(made, (0, 2)).document_features(DOCUMENTS[:1])
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_same_features_alone_and_beside_others(kind: str):
    target = Target(model(kind), (1, 3))
    settled = settle_batching(target, "auto")
    assert target.batching == settled.batching == (ROWS if kind in RECURRENT else PACKED)
    together = target.document_features(DOCUMENTS)
    for document, found in zip(DOCUMENTS, together, strict=True):
        (alone,) = target.document_features([document], ROWS)
        torch.testing.assert_close(found, alone, atol=2e-5, rtol=1e-5)
    changed = target.document_features([DOCUMENTS[0] + 1, *DOCUMENTS[1:]])
    assert not torch.equal(changed[0], together[0])
    for found, before in zip(changed[1:], together[1:], strict=True):
        torch.testing.assert_close(found, before, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_groups_of_a_few_tokens_give_the_features_of_one_forward(kind: str):
    documents = [torch.arange(n) for n in (7, 2, 30, 5, 5)]
    whole, little = (Target(model(kind), (1, 3), forward_tokens=n) for n in (1000, 8))
    for batching in (ROWS, PACKED):
        whole.attend_by_document()
        first = whole.document_features(documents, batching)
        second = little.document_features(documents, batching)
        assert [len(found) for found in second] == [7, 2, 30, 5, 5]
        for found, wanted in zip(second, first, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_loaded_with_the_head_and_embedding_of_its_files(
    kind: str, saved: Callable[..., Path]
):
    directory = saved(model(kind))
    files = load_file(directory / "model.safetensors")
    (name,) = [key for key in files if key.endswith("embed_tokens.weight")]
    wrapped = kind in {"hybrid", "hybrid-moe", "vision"}
    assert name == f"model.{'language_model.' if wrapped else ''}embed_tokens.weight"
    target = load(directory)
    assert torch.equal(target.head.embedding, files[name])
    assert torch.equal(target.head.lm_head, files["lm_head.weight"])
    assert (target.num_layers, target.text_config.hidden_size) == (4, 32)
    assert target.recurrent_kinds == ({"linear_attention"} if kind in RECURRENT else set())
    wanted = Target(model(kind), (1, 3)).document_features(DOCUMENTS, ROWS)
    for found, one in zip(target.document_features(DOCUMENTS), wanted, strict=True):
        assert torch.equal(found, one)
    logits, taps = target.verify(DOCUMENTS[0][None], DynamicCache(config=target.model.config))
    with torch.no_grad():
        torch.testing.assert_close(logits, model(kind)(input_ids=DOCUMENTS[0][None]).logits)
    torch.testing.assert_close(taps[0], wanted[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "moe", "hybrid"])
def test_tied_head_is_one_tensor_with_the_embedding(kind: str, saved: Callable[..., Path]):
    target = load(saved(KINDS[kind](vocab_size=VOCAB, tie_word_embeddings=True)))
    assert target.head.lm_head is target.head.embedding
    assert target.head.embedding.shape == (VOCAB, 32)


def test_a_head_that_the_files_do_not_hold_is_refused_not_drawn(saved: Callable[..., Path]):
    directory = saved(model("llama"))
    files = load_file(directory / "model.safetensors")
    del files["lm_head.weight"]  # as a tied checkpoint whose tie flag was lost
    save_file(files, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"no weights for 1 .*, first lm_head\.weight"):
        load(directory)


def test_weights_of_another_shape_are_refused_with_their_directory(saved: Callable[..., Path]):
    directory = saved(model("llama"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(TargetError, match=r"/target \(.* no weights for 12 .*mlp"):
        load(directory)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"model_type": "no_such_model"}, "cannot be loaded"),
        ({"auto_map": {"AutoConfig": "x.Y"}, "model_type": "mine"}, "trust_remote_code"),
        ({"model_type": "bert", "architectures": ["NoSuch"]}, "finds no weights for"),
    ],
)
def test_a_configuration_that_cannot_be_a_target_is_told(
    saved: Callable[..., Path], change: dict[str, Any], told: str
):
    directory = saved(model("llama"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(TargetError, match=told):
        load(directory)


class Mixing(nn.Module):
    """A layer that adds the mean of all earlier tokens of its row, wherever documents begin."""

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1)[None, :, None]
        return x + x.cumsum(1) / counts


@pytest.fixture
def mixing() -> Iterator[Target]:
    """A real Llama with one layer in which a packed row leaks, as a recurrent state would."""
    made = tiny_targets.llama(vocab_size=VOCAB)
    handle = made.model.layers[1].register_forward_hook(lambda _m, _a, out: Mixing()(out))
    yield Target(made, (1, 3))
    handle.remove()


def test_self_test_finds_a_layer_that_mixes_packed_documents(mixing: Target):
    finding = check_batching(mixing, PACKED)
    assert not finding.passed
    assert finding.max_difference is not None
    assert finding.max_difference > 0.1
    assert finding.max_leak is not None
    assert finding.max_leak > 0.01
    assert check_batching(mixing, ROWS).passed
    assert mixing.batching == ROWS  # a check settles nothing


def test_auto_takes_rows_and_packed_is_refused_where_the_self_test_fails(mixing: Target):
    assert settle_batching(mixing, "auto").batching == mixing.batching == ROWS
    with pytest.raises(TargetError, match=r"neighbour changes.*set target\.batching to row"):
        settle_batching(mixing, "packed")


def test_packed_hybrid_is_refused_with_the_kernels_that_are_active():
    target = Target(model("hybrid"), (1, 3))
    finding = check_batching(target, PACKED)
    assert set(finding.kernels) == {"attention", "delta rule", "convolution"}
    if finding.passed:  # kernels that keep documents apart are installed here
        assert settle_batching(target, "packed").batching == PACKED
        target.batching = ROWS
        return
    assert finding.kernels["delta rule"].startswith(f"torch {torch.__version__}")
    with pytest.raises(TargetError, match="packed") as caught:
        settle_batching(target, "packed")
    assert f"delta rule: torch {torch.__version__}" in str(caught.value)
    assert target.batching == ROWS


def test_windowed_target_takes_rows_and_refuses_packed():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
    target = Target(MistralForCausalLM(MistralConfig(vocab_size=VOCAB, **sizes, **heads)), (1, 3))
    assert settle_batching(target, "auto").batching == ROWS
    with pytest.raises(TargetError, match="windowed layers"):
        settle_batching(target, "packed")


def test_attention_by_document_changes_nothing_outside_a_packed_row():
    made = tiny_targets.llama(vocab_size=VOCAB)
    ids = torch.stack((torch.arange(12), torch.arange(20, 32)))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # padded on the left, which needs a mask
    with torch.no_grad():
        before = made(input_ids=ids, attention_mask=mask).logits
        Target(made, (1, 3)).attend_by_document()
        assert torch.equal(made(input_ids=ids, attention_mask=mask).logits, before)
        with packed_row([12]):
            inside = made(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(inside[1], before[1])
    assert not torch.allclose(inside[0], before[0])


def test_kinds_of_layers_tell_what_can_be_packed_and_cropped():
    kinds = {kind: Target(model(kind), (1, 3)).layer_kinds for kind in ("llama", "moe", "hybrid")}
    assert kinds["llama"] == kinds["moe"] == {FULL}
    assert kinds["hybrid"] == {FULL, "linear_attention"}
