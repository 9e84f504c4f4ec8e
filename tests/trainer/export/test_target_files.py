"""Embedding, head, stop tokens and sizes are found in targets of every kind without a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainer import tiny_targets
from tests.trainer.export.conftest import Export
from trainer.errors import TargetError
from trainer.export.findings import FAIL
from trainer.export.target_files import TargetFiles
from trainer.export.validate import validate


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["qwen3", "moe", "hybrid-text", "hybrid"])
def test_embedding_and_head_are_those_of_the_model(kind: str, tied: bool, tmp_path: Path):
    model = tiny_targets.KINDS[kind](vocab_size=50, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    target = TargetFiles.open(tmp_path)
    assert torch.equal(target.read(target.embedding_name), model.get_input_embeddings().weight)
    assert torch.equal(target.read(target.head_name), model.get_output_embeddings().weight)
    assert (target.head_name == target.embedding_name) is tied
    assert (target.embedding.shape, target.num_layers) == ((50, 32), tiny_targets.NUM_LAYERS)
    assert target.rope_theta is not None
    assert target.architectures == [type(model).__name__]


def test_every_token_that_ends_an_answer_is_a_stop_token(tiny_target: Path, tmp_path: Path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert TargetFiles.open(target).stop_ids == {42, 7, 9}  # 42: config.json and the tokenizer
    path.write_text("{")
    with pytest.raises(TargetError, match="not a generation configuration"):
        _ = TargetFiles.open(target).stop_ids


def test_target_without_a_tokenizer_fails_where_one_is_needed(
    export: Export, tiny_target: Path, tmp_path: Path
):
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_target / name, target / name)
    report = validate(export(), ["all"], target)
    failed = {(f.engine, f.rule) for f in report.findings if f.level == FAIL}
    assert failed == {("every", "mask token"), ("llamacpp", "tokenizer")}


def test_target_without_weights_or_embedding_is_named(tiny_target: Path, tmp_path: Path):
    shutil.copy(tiny_target / "config.json", tmp_path / "config.json")
    with pytest.raises(TargetError, match=r"model\.safetensors: cannot be read"):
        _ = TargetFiles.open(tmp_path).embedding_name
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(TargetError, match=r"config\.json cannot be read"):
        TargetFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),  # StrictDataclassFieldValidationError
        ("num_attention_heads", 0),  # ZeroDivisionError
        ("dtype", "x"),  # AttributeError
        ("dtype", []),  # IndexError
        ("model_type", []),  # TypeError
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10**400}),  # OverflowError
    ],
)
def test_target_whose_configuration_is_damaged_is_named_whatever_the_library_raises(
    key: str, value: object, tiny_target: Path, tmp_path: Path
):
    raw = json.loads((tiny_target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(
        TargetError, match=r"(?s)--target .*config\.json.*; copy the model again, whole"
    ):
        _ = TargetFiles.open(tmp_path).rope_theta


def test_architectures_that_are_no_list_are_none(tiny_target: Path, tmp_path: Path):
    raw = json.loads((tiny_target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": 5}))
    assert TargetFiles.open(tmp_path).architectures == []
