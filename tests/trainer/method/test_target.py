"""The frozen target: layer numbers, padding, threads, incomplete directories."""

import copy
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from tests.trainer.method.conftest import VOCAB
from trainer.contract.config import TrainConfig
from trainer.contract.errors import ConfigError
from trainer.errors import TargetError
from trainer.model.target import Target, default_target_layer_ids, load_target


class AddLayer(nn.Module):
    """Adds 10 ** number to every value, so that a sum of digits tells which layers ran."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.num_calls = number, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + 10**self.number


class DigitModel(nn.Module):
    """Four layers over an embedding of zeros: the output of layer l has ones in digits 0..l."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 2)
        nn.init.zeros_(self.embed.weight)
        self.layers = nn.ModuleList(AddLayer(i) for i in range(4))
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(num_hidden_layers=4, eos_token_id=3)
        )

    def get_decoder(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:  # noqa: ARG002
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_id_l_is_the_output_of_the_0_based_layer_l():
    target = Target(DigitModel(), (0, 2))
    (features,) = target.document_features([torch.tensor([5, 1])])
    assert features.tolist() == [[1, 1, 111, 111]] * 2


def test_forward_ends_after_the_last_tap():
    model = DigitModel()
    Target(model, (0, 1)).document_features([torch.tensor([5, 1])])
    assert [layer.num_calls for layer in model.layers] == [1, 1, 0, 0]


def test_taps_are_hugging_faces_hidden_states_one_further_on(tiny_llama: LlamaForCausalLM):
    ids = torch.arange(9)
    (features,) = Target(tiny_llama, (0, 2, 4)).document_features([ids])
    with torch.no_grad():
        states = tiny_llama(ids[None], output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[number + 1][0] for number in (0, 2, 4)], -1))


def test_tap_of_the_last_layer_is_taken_before_the_final_norm(tiny_llama: LlamaForCausalLM):
    ids = torch.arange(9)
    (features,) = Target(tiny_llama, (5,)).document_features([ids])
    with torch.no_grad():
        after_norm = tiny_llama(ids[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(tiny_llama.model.norm(features), after_norm)


def test_right_padding_and_order_do_not_change_features(tiny_llama: LlamaForCausalLM):
    target = Target(tiny_llama, (1, 3))
    documents = [torch.arange(3, 3 + length) for length in (4, 19, 1, 11)]
    together = target.document_features(documents)
    for document, found in zip(documents, together, strict=True):
        (alone,) = target.document_features([document])
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "max_rows", "forwards"),
    [
        ((1000, 10, 1000, 10), 10_000, [(2, 1000), (2, 10)]),  # 2532 tokens, not 4256
        ((100, 90), 10_000, [(2, 100)]),  # 456, not 702
        ((400, 400, 400), 800, [(1, 400), (2, 400)]),
        ((900, 5), 800, [(1, 900), (1, 5)]),  # one document may be longer
    ],
)
def test_rows_are_joined_where_padding_costs_less_than_a_forward(
    lengths: tuple[int, ...],
    max_rows: int,
    forwards: list[tuple[int, int]],
    tiny_llama: LlamaForCausalLM,
):
    seen: list[tuple[int, int]] = []
    target = Target(tiny_llama, (1, 3), forward_tokens=max_rows)
    handle = tiny_llama.model.embed_tokens.register_forward_pre_hook(
        lambda _module, ids: seen.append(tuple(ids[0].shape))
    )
    try:
        features = target.document_features([torch.arange(n) % 200 for n in lengths])
    finally:
        handle.remove()
    assert seen == forwards
    assert [len(found) for found in features] == list(lengths)


def test_threads_that_share_a_target_do_not_mix_their_taps(tiny_llama: LlamaForCausalLM):
    target = Target(tiny_llama, (1, 3))
    documents = [torch.arange(start, start + 30) for start in range(0, 120, 30)]
    wanted = [target.document_features([d])[0] for d in documents]
    faults: list[int] = []

    def work(number: int) -> None:
        found = [target.document_features([documents[number]])[0] for _ in range(10)]
        faults.extend(number for features in found if not torch.equal(features, wanted[number]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_verifying_piece_by_piece_gives_the_taps_of_one_forward(tiny_llama: LlamaForCausalLM):
    target = Target(tiny_llama, (1, 3))
    ids = torch.arange(12)
    cache = DynamicCache(config=tiny_llama.config)
    first, second = target.verify(ids[None, :5], cache), target.verify(ids[None, 5:], cache)
    found = torch.cat((first[1], second[1]), 1)[0]
    torch.testing.assert_close(found, target.document_features([ids])[0], atol=1e-5, rtol=0)
    with torch.no_grad():
        logits = tiny_llama(ids[None]).logits
    torch.testing.assert_close(torch.cat((first[0], second[0]), 1), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5: half to even
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 1, (15,)),
    ],
)
def test_default_ids_are_the_published_ones(layers: int, taps: int, ids: tuple[int, ...]):
    assert default_target_layer_ids(layers, taps) == ids


def test_too_many_taps_for_a_small_target_are_refused():
    with pytest.raises(TargetError, match="5 taps do not fit a target of 4 layers"):
        default_target_layer_ids(4, 5)


def test_tap_beyond_the_last_layer_is_refused(tiny_llama: LlamaForCausalLM):
    with pytest.raises(TargetError, match=r"\[1, 6\].*0\.\.5"):
        Target(tiny_llama, (1, 6))


def test_tied_head_stays_one_tensor_when_it_is_moved():
    head = Target(DigitModel(), (0,)).head.to("cpu", torch.bfloat16)
    assert head.lm_head is head.embedding


def test_a_head_that_a_plain_product_cannot_reproduce_is_refused():
    model = DigitModel()
    model.embed.embed_scale = 8.0  # as Gemma has
    with pytest.raises(TargetError, match="scaled embeddings"):
        Target(model, (0,))


def test_a_head_with_other_rows_than_the_embedding_is_refused():
    model = DigitModel()
    model.get_output_embeddings = lambda: nn.Linear(2, 9, bias=False)  # type: ignore[method-assign]
    with pytest.raises(TargetError, match=r"differ in shape, \[7, 2\] and \[9, 2\]"):
        Target(model, (0,))


def test_rows_that_pad_the_vocabulary_are_rows_of_embedding_and_head(tiny_llama: LlamaForCausalLM):
    padded = copy.deepcopy(tiny_llama)
    padded.resize_token_embeddings(264, mean_resizing=False)
    padded.config.vocab_size = VOCAB  # 260 ids in rows that are a multiple of 8
    head = Target(padded, (0,)).head
    assert (head.embedding.shape, head.lm_head.shape) == ((264, 64), (264, 64))


MakeTrainConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"batching": "both"}, "target.batching: expected one of auto, rows, packed, got 'both'"),
        ({"forward_tokens": 0}, "target.forward_tokens: expected at least 1, got 0"),
    ],
)
def test_batching_that_does_not_exist_is_refused(
    values: dict[str, str | int], told: str, train_config: MakeTrainConfig
):
    with pytest.raises(ConfigError, match=re.escape(told)):
        train_config(target=values)


def load(config: TrainConfig) -> Target:
    return load_target(config.target, config.draft, "cpu")


def test_directory_is_loaded_frozen_in_the_asked_dtype(
    tiny_target_directory: Path, train_config: MakeTrainConfig
):
    where = {"path": str(tiny_target_directory), "dtype": "bfloat16"}
    target = load(train_config(target=where))
    assert (target.dtype, target.target_layer_ids) == (torch.bfloat16, (1, 2, 3))
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.stop_ids == {257}
    assert target.head.lm_head.data_ptr() != target.head.embedding.data_ptr()


def spoil_nothing_there(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def spoil_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def spoil_shard(directory: Path) -> None:
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


def spoil_half(directory: Path) -> None:
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def spoil_lfs(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    sorted(directory.glob("model-*.safetensors"))[1].write_text(pointer)


def spoil_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    shard = held["weight_map"]["model.embed_tokens.weight"]
    held["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    index.write_text(json.dumps(held))


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_nothing_there, "no such directory"),
        (spoil_config, "config.json is missing"),
        (spoil_shard, r"model-00002-of-\d+.safetensors is missing"),
        (spoil_half, "model-00002.*damaged or half copied"),
        (spoil_lfs, "model-00002.*is a pointer of Git LFS.*git lfs pull"),
        (spoil_index, "lacks 1 tensors .*, first model.layers.9.mlp.up_proj.weight"),
        (spoil_tokenizer, "tokenizer.json is missing"),
    ],
)
def test_incomplete_directory_is_named_with_its_fault(
    spoil: Callable[[Path], None],
    named: str,
    tiny_target_directory: Path,
    train_config: MakeTrainConfig,
):
    spoil(tiny_target_directory)
    with pytest.raises(TargetError, match=named) as caught:
        load(train_config(target={"path": str(tiny_target_directory)}))
    assert str(tiny_target_directory) in str(caught.value)
