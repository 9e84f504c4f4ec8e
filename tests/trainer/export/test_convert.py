"""z-lab to speculators and back: same bits, ids moved by one, what cannot be said is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.trainer.export.conftest import MIXED, SHAPE, Export, read_config, write_config
from trainer.__main__ import main
from trainer.contract.config import DraftModelConfig
from trainer.errors import CheckpointError, TargetError
from trainer.export.convert import convert
from trainer.export.validate import validate
from trainer.export.zlab import block_causality, export_draft, load_export
from trainer.model.draft import DraftConfig, DraftModel

Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        MIXED,
        MIXED | {"sliding_window_non_causal": True},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "causal": True},
        {"dtype": "float32", "target_layer_ids": (0, 2, 4), "block_size": 8},
    ],
    ids=["full", "mixed", "non-causal", "causal sliding", "three taps"],
)
def test_there_and_back_gives_the_same_bytes(
    changes: dict[str, Any], export: Export, tiny_target: Path, tmp_path: Path
):
    source = export(**changes)
    (source / "README.md").write_text("the card\n")
    convert(source, tmp_path / "middle", "speculators", tiny_target)
    convert(tmp_path / "middle", tmp_path / "again", "zlab")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()


def test_converted_shards_hold_the_same_tensors(export: Export, tiny_target: Path, tmp_path: Path):
    source = export()
    convert(source, tmp_path / "middle", "speculators", tiny_target, max_shard_bytes=30_000)
    assert (tmp_path / "middle" / "model.safetensors.index.json").is_file()
    convert(tmp_path / "middle", tmp_path / "again", "zlab")
    one, two = (load_file(d / "model.safetensors") for d in (source, tmp_path / "again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_speculators_layout_has_the_keys_of_its_reader(
    export: Export, tiny_target: Path, tmp_path: Path
):
    source = export(**MIXED)
    made = convert(source, tmp_path / "s", "speculators", tiny_target, verifier="org/tiny")
    raw = read_config(tmp_path / "s")
    assert (made.shift, made.num_tensors) == (1, 27)
    assert raw["speculators_model_type"] == "dflash"
    assert raw["aux_hidden_state_layer_ids"] == [2, 4]  # z-lab's 1 and 3: the embedding is 0
    assert read_config(source)["dflash_config"]["target_layer_ids"] == [1, 3]
    assert (raw["block_size"], raw["mask_token_id"], raw["draft_vocab_size"]) == (4, 43, 46)
    assert (raw["sample_from_anchor"], raw["sliding_window_non_causal"]) == (False, False)
    assert raw["speculators_config"] == {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
    }
    layers = raw["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"]) == ("qwen3", 2)
    assert (layers["layer_types"], layers["sliding_window"]) == (list(MIXED["layer_types"]), 16)
    assert not {"dflash_config", "block_size", "architectures"} & layers.keys()
    tensors, target = (
        load_file(tmp_path / "s" / "model.safetensors"),
        load_file(tiny_target / "model.safetensors"),
    )
    embedding = target["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(tensors["embed_tokens.weight"], embedding)
    assert torch.equal(tensors["lm_head.weight"], embedding)  # the tiny target's are tied


def test_drafter_of_smollm2_goes_there_and_back(smollm2: Path, tmp_path: Path):
    config = DraftConfig.from_target(
        AutoConfig.from_pretrained(smollm2), DraftModelConfig(block_size=8, mask_token_id=16), 30
    )
    export_draft(DraftModel(config), tmp_path / "z")
    assert validate(tmp_path / "z", ["all"], smollm2).ok
    convert(tmp_path / "z", tmp_path / "s", "speculators", smollm2)
    assert read_config(tmp_path / "s")["aux_hidden_state_layer_ids"] == [2, 9, 15, 21, 28]
    assert validate(tmp_path / "s", ["vllm", "speculators"], smollm2).ok
    convert(tmp_path / "s", tmp_path / "again", "zlab")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "z" / name).read_bytes()


def test_what_the_library_changed_wins_on_the_way_back(
    export: Export, tiny_target: Path, tmp_path: Path
):
    convert(export(**MIXED), tmp_path / "s", "speculators", tiny_target)
    raw = read_config(tmp_path / "s")
    raw["aux_hidden_state_layer_ids"], raw["block_size"] = [1, 5], 6
    raw["sliding_window_non_causal"] = True
    raw["transformer_layer_config"]["sliding_window"] = 12
    write_config(tmp_path / "s", raw)
    convert(tmp_path / "s", tmp_path / "z", "zlab")
    back = read_config(tmp_path / "z")
    assert back["dflash_config"]["target_layer_ids"] == [0, 4]
    assert (back["block_size"], back["dflash_config"]["block_size"]) == (6, 6)
    assert back["sliding_window"] == 12
    assert block_causality(back) == {"sliding_attention": False, "full_attention": False}


# The keys that speculators 0.9.0 writes when its own converter takes a draft of SHAPE and MIXED.
LIBRARY: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 4],
    "block_size": 4,
    "draft_vocab_size": 46,
    "dtype": "bfloat16",
    "mask_token_id": 43,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/tiny"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": None,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 16,
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 46,
    },
    "transformers_version": "5.19.0",
}


def write_library(source: Path, directory: Path, **changes: Any) -> Path:
    """Lay the tensors of a z-lab export out as the library does: without embedding and head."""
    directory.mkdir()
    save_file(load_file(source / "model.safetensors"), directory / "model.safetensors")
    write_config(directory, LIBRARY | changes)
    return directory


def test_directory_of_the_library_becomes_the_export_it_came_from(
    export: Export, tiny_target: Path, tmp_path: Path
):
    source = export(**MIXED)
    library = write_library(source, tmp_path / "library")
    with pytest.raises(CheckpointError, match="how many layers the target has; give --target"):
        convert(library, tmp_path / "z", "zlab")
    convert(library, tmp_path / "z", "zlab", tiny_target)
    same = {k: v for k, v in read_config(source).items() if not k.startswith("target_")}
    assert read_config(tmp_path / "z") == same
    drafts = load_export(source), load_export(tmp_path / "z")
    assert torch.equal(*(draft.fc.weight for draft in drafts))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft_vocab_size": 20}, "draft_vocab_size 20: the z-lab layout has no t2d and d2t"),
        ({"sample_from_anchor": True}, "sample_from_anchor: in the z-lab layout slot 0 is the"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dspark': only dflash"),
        ({"projector_type": "domino"}, "projector_type 'domino'"),
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        (
            {"transformer_layer_config": {"model_type": "llama", "vocab_size": 46}},
            "model_type 'llama': only qwen3 is a DFlash",
        ),
        ({"transformer_layer_config": 3}, "not a speculators configuration"),
        ({"aux_hidden_state_layer_ids": [0, 4]}, r"target_layer_ids\[0\] is -1"),
    ],
)
def test_speculators_that_the_zlab_layout_cannot_hold_are_refused_by_key(
    changes: dict[str, Any], named: str, export: Export, tiny_target: Path, tmp_path: Path
):
    library = write_library(export(**MIXED), tmp_path / "library", **changes)
    with pytest.raises(CheckpointError, match=named):
        convert(library, tmp_path / "z", "zlab", tiny_target)
    assert not (tmp_path / "z").exists()


def set_architecture(raw: dict[str, Any]) -> None:
    raw["architectures"] = ["DFlashDraftModelOfAnotherKind"]


def set_sinks(raw: dict[str, Any]) -> None:
    raw["dflash_config"]["attention_sink_bias"] = True


@pytest.mark.parametrize(
    ("shape", "change", "named"),
    [
        ({"target_layer_ids": (1, 5)}, None, "target_layer_ids: 5, the target's last, is no aux"),
        ({"causal": True}, None, "is_causal: speculators runs full_attention layers bidirectional"),
        ({}, set_architecture, "DFlashDraftModelOfAnotherKind.*the layout is of plain DFlash"),
        ({"variant": "dflash2"}, None, r"architectures \['DFlash2DraftModel'\]: the layout is of"),
        ({"variant": "domino"}, None, "dflash_config.projector_type: has no counterpart"),
        ({}, set_sinks, "dflash_config.attention_sink_bias: has no counterpart"),
    ],
)
def test_draft_that_speculators_cannot_hold_is_refused_by_key(
    shape: dict[str, Any],
    change: Change | None,
    named: str,
    export: Export,
    tiny_target: Path,
    tmp_path: Path,
):
    source = export(**shape)
    if change is not None:
        raw = read_config(source)
        change(raw)
        write_config(source, raw)
    with pytest.raises(CheckpointError, match=named):
        convert(source, tmp_path / "s", "speculators", tiny_target)
    assert not (tmp_path / "s").exists()


def test_target_of_another_size_is_refused(export: Export, tiny_target: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"\[46, 32\] is not the draft's vocab_size x hidden"):
        convert(export(vocab_size=48), tmp_path / "s", "speculators", tiny_target)


def test_conversion_without_a_target_or_to_the_same_layout_is_refused(
    export: Export, tiny_target: Path, tmp_path: Path
):
    source = export()
    with pytest.raises(CheckpointError, match="name the target's directory with --target"):
        convert(source, tmp_path / "s", "speculators")
    with pytest.raises(TargetError, match=r"no config\.json; name the target"):
        convert(source, tmp_path / "s", "speculators", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is in the zlab layout already"):
        convert(source, tmp_path / "z", "zlab", tiny_target)
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(source, source, "speculators", tiny_target)


def test_maps_that_move_no_token_are_dropped_and_others_refused(
    export: Export, tiny_target: Path, tmp_path: Path
):
    library = write_library(export(**MIXED), tmp_path / "library")
    tensors = load_file(library / "model.safetensors")
    maps = {"t2d": torch.ones(46, dtype=torch.bool), "d2t": torch.zeros(46, dtype=torch.long)}
    save_file(tensors | maps, library / "model.safetensors")
    assert convert(library, tmp_path / "z", "zlab", tiny_target).num_tensors == 25
    save_file(tensors | maps | {"d2t": maps["d2t"] + 1}, library / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t moves tokens"):
        convert(library, tmp_path / "z", "zlab", tiny_target)


def test_command_converts_and_says_what_it_wrote(
    export: Export, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, made = str(export()), str(tmp_path / "s")
    argv = ["convert", source, made, "--to", "speculators", "--target", str(tiny_target)]
    assert main([*argv, "--verifier", "org/tiny"]) == 0
    assert "27 tensors in the speculators layout, layer ids +1" in capsys.readouterr().out
    assert main(["convert", made, str(tmp_path / "z"), "--to", "zlab"]) == 0
    assert "25 tensors in the zlab layout, layer ids -1" in capsys.readouterr().out
    assert main(["convert", made, str(tmp_path / "t"), "--to", "speculators"]) == 2
    assert "error: " in capsys.readouterr().err
    assert (
        json.loads((tmp_path / "z" / "config.json").read_text())["vocab_size"]
        == SHAPE["vocab_size"]
    )


def test_place_that_cannot_be_written_and_a_card_that_is_no_text_are_one_line(
    export: Export, tiny_target: Path, tmp_path: Path
):
    source, place = export(), tmp_path / "made"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*choose another directory"):
        convert(source, tmp_path / "file" / "made", "speculators", tiny_target)
    with pytest.raises(CheckpointError, match="--max-shard-bytes 0: at least 1"):
        convert(source, place, "speculators", tiny_target, max_shard_bytes=0)
    (source / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"README\.md: is not UTF-8"):
        convert(source, place, "speculators", tiny_target)
    assert not place.exists()
