"""The exported directory: names, shapes, configuration, round trip, faults."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from trainer.contract.config import TargetConfig
from trainer.errors import CheckpointError, TrainerError
from trainer.export import export_draft, load_export, tensor_shapes
from trainer.model.draft import DraftConfig, DraftModel

MakeConfig = Callable[..., DraftConfig]


def test_table_of_the_27b_drafter_is_the_published_one(draft_config: MakeConfig):
    config = draft_config(
        num_draft_layers=5,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
    )
    shapes = tensor_shapes(config)
    assert len(shapes) == 58
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_730_213_120


def test_files_hold_exactly_the_published_tensors(draft_config: MakeConfig, tmp_path: Path):
    config = draft_config(dtype="bfloat16")
    export_draft(DraftModel(config), tmp_path / "export")
    assert sorted(p.name for p in (tmp_path / "export").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in found} == {torch.bfloat16}
    assert found == tensor_shapes(config)


def test_configuration_has_what_engines_read_in_every_place(
    draft_config: MakeConfig, tmp_path: Path
):
    config = draft_config(
        layer_types=("full_attention", "sliding_attention"), sliding_window=64, rope_theta=1e7
    )
    target = TargetConfig(path="/models/Qwen3.6-27B/", revision="r1")
    export_draft(DraftModel(config), tmp_path / "export", target)
    read = json.loads((tmp_path / "export" / "config.json").read_text())
    assert read["architectures"] == ["DFlashDraftModel"]
    assert read["model_type"] == "qwen3"
    assert (read["block_size"], read["dflash_config"]["block_size"]) == (4, 4)
    assert (read["rope_theta"], read["rope_parameters"]["rope_theta"]) == (1e7, 1e7)
    assert read["dflash_config"] == {
        "mask_token_id": 39,
        "target_layer_ids": [1, 3],
        "block_size": 4,
        "use_swa": True,
        "swa_window_size": 64,
    }
    assert "is_causal" not in read  # the flag would hold for every layer, see causality
    assert (read["num_hidden_layers"], read["num_target_layers"]) == (2, 6)
    assert (read["use_sliding_window"], read["sliding_window"]) == (True, 64)
    assert read["dtype"] == "float32"
    assert (read["target_model"], read["target_revision"]) == ("Qwen3.6-27B", "r1")
    loaded = AutoConfig.from_pretrained(tmp_path / "export")
    assert (loaded.head_dim, loaded.num_key_value_heads) == (8, 2)


SLIDE, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({}, None),
        ({"layer_types": (SLIDE, FULL)}, None),
        ({"layer_types": (SLIDE, SLIDE)}, None),
        ({"causal": True}, True),
        ({"layer_types": (SLIDE, FULL), "causal": True}, True),
        ({"layer_types": (SLIDE, FULL), "sliding_window_non_causal": True}, False),
    ],
)
def test_one_flag_for_all_layers_is_written_where_their_kinds_do_not_tell(
    changes: dict[str, object], flag: bool | None, draft_config: MakeConfig, tmp_path: Path
):
    window = {"sliding_window": 64} if SLIDE in changes.get("layer_types", ()) else {}
    config = draft_config(**changes, **window)
    export_draft(DraftModel(config), tmp_path / "export")
    read = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (read.get("is_causal"), read["dflash_config"].get("causal")) == (flag, flag)
    loaded = load_export(tmp_path / "export").config
    assert loaded.rules == config.rules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_draft_computes_the_same_with_the_tap_scales_in_fc(
    draft_config: MakeConfig, tmp_path: Path, dtype: str
):
    draft = DraftModel(draft_config(normalise_taps=True, tied_target=True, dtype=dtype), seed=4)
    draft.tap_scale.copy_(torch.tensor([0.3, 2.7]))
    export_draft(draft, tmp_path / "export")
    loaded = load_export(tmp_path / "export")
    features, block = torch.randn(1, 6, 64).to(draft.fc.weight.dtype), torch.randn(1, 4, 32)
    results = []
    for model in (draft, loaded):
        cache = model.new_cache()
        model.append(cache, features)
        results.append(model.draft_block(cache, block, 6))
    assert torch.equal(*results)


def test_second_export_of_a_loaded_one_has_the_same_bytes(draft_config: MakeConfig, tmp_path: Path):
    export_draft(DraftModel(draft_config(normalise_taps=True)), tmp_path / "one")
    export_draft(load_export(tmp_path / "one"), tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_export_replaces_an_older_one_and_leaves_nothing_beside_it(
    draft_config: MakeConfig, tmp_path: Path
):
    export_draft(DraftModel(draft_config(), seed=1), tmp_path / "export")
    (tmp_path / ".export.partial").mkdir()  # what a killed export leaves
    (tmp_path / ".export.partial" / "model.safetensors").write_bytes(b"half")
    new = DraftModel(draft_config(), seed=2)
    export_draft(new, tmp_path / "export")
    assert torch.equal(load_export(tmp_path / "export").fc.weight, new.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_directory_that_is_no_export_is_not_overwritten(draft_config: MakeConfig, tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "keep.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not an export"):
        export_draft(DraftModel(draft_config()), tmp_path / "notes")
    assert (tmp_path / "notes" / "keep.txt").read_text() == "mine"


def test_draft_with_nan_is_not_exported(draft_config: MakeConfig, tmp_path: Path):
    draft = DraftModel(draft_config())
    with torch.no_grad():
        draft.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm\.weight: holds NaN"):
        export_draft(draft, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def spoil_tensor(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def spoil_config(directory: Path, key: str, value: object) -> None:
    read = json.loads((directory / "config.json").read_text())
    read[key] = value
    (directory / "config.json").write_text(json.dumps(read))


def add_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(3, 3)


def lose_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.1.self_attn.q_norm.weight"]


def lose_tap(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()


def round_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: spoil_tensor(d, add_head), "lm_head.weight: 1 unknown tensors"),
        (lambda d: spoil_tensor(d, lose_norm), "layers.1.self_attn.q_norm.weight: 1 missing ten"),
        (lambda d: spoil_tensor(d, lose_tap), r"fc.weight: is \[32, 32\], expected \[32, 64\]"),
        (lambda d: spoil_tensor(d, round_weight), "norm.weight: is torch.bfloat16, the configu"),
        (lambda d: (d / "config.json").unlink(), "config.json cannot be read: No such file"),
        (lambda d: (d / "config.json").write_text("{"), "config.json: not a DFlash configuration"),
        (lambda d: (d / "config.json").write_text("{}"), "no key 'dflash_config'"),
        (lambda d: (d / "model.safetensors").write_bytes(b"half"), "safetensors: cannot be read"),
    ],
)
def test_damaged_export_is_refused_by_name(
    spoil: Callable[[Path], object], named: str, draft_config: MakeConfig, tmp_path: Path
):
    export_draft(DraftModel(draft_config()), tmp_path / "export")
    spoil(tmp_path / "export")
    with pytest.raises(CheckpointError, match=named):
        load_export(tmp_path / "export")


def test_export_whose_layer_types_do_not_match_its_layers_is_refused(
    draft_config: MakeConfig, tmp_path: Path
):
    export_draft(DraftModel(draft_config()), tmp_path / "export")
    spoil_config(tmp_path / "export", "layer_types", ["full_attention"])
    with pytest.raises(TrainerError, match=r"layer_types.*expected 2 times"):
        load_export(tmp_path / "export")
