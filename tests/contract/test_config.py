"""The training configuration: defaults, checks, and errors that name the key."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.contract.config import TrainConfig, with_override
from trainer.contract.errors import ConfigError

NEEDED: dict[str, Any] = {
    "target": {"path": "/models/t"},
    "data": {"path": "/data/c.jsonl"},
    "draft": {"mask_token_id": 16},
}


def _with(section: str, **values: Any) -> dict[str, Any]:
    return NEEDED | {section: NEEDED.get(section, {}) | values}


def test_defaults_are_the_published_recipe() -> None:
    config = TrainConfig.from_dict(NEEDED)
    assert (config.optim.lr, config.optim.epochs, config.optim.warmup_frac) == (6e-4, 6.0, 0.04)
    assert (config.draft.num_draft_layers, config.draft.block_size) == (5, 16)
    assert config.data.max_length == 3072
    assert config.position_decay == 7.0


@pytest.mark.parametrize(("block_size", "decay"), [(8, 4.0), (10, 5.0), (16, 7.0)])
def test_position_decay_is_the_published_one_of_the_block_size(
    block_size: int, decay: float
) -> None:
    assert TrainConfig.from_dict(_with("draft", block_size=block_size)).position_decay == decay


def test_position_decay_that_is_given_wins_over_the_table() -> None:
    assert TrainConfig.from_dict(_with("loss", position_decay=2)).position_decay == 2.0


def test_configuration_survives_its_own_dictionary() -> None:
    config = TrainConfig.from_dict(
        _with(
            "draft",
            target_layer_ids=[1, 9],
            num_draft_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
        )
    )
    assert config.draft.target_layer_ids == (1, 9)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_numbers_are_taken_as_yaml_gives_them() -> None:
    config = TrainConfig.from_dict(_with("optim", lr="6e-4", clip_norm=1, betas=[0.9, "0.99"]))
    assert (config.optim.lr, config.optim.clip_norm) == (6e-4, 1.0)
    assert config.optim.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"optim": {"learning_rate": 1}}, "optim.learning_rate: unknown key; known: name, lr,"),
        ({"optim": {"epoch": 1}}, "optim.epoch: unknown key; did you mean epochs?"),
        ({"optm": {}}, "optm: unknown key; did you mean optim?"),
        ({"optim": 3}, "optim: expected a mapping, got 3"),
        ({"optim": {"lr": "fast"}}, "optim.lr: expected float, got 'fast'"),
        ({"optim": {"lr": True}}, "optim.lr: expected float, got True"),
        ({"optim": {"lr": "nan"}}, "optim.lr: expected a finite number, got nan"),
        ({"optim": {"lr": float("inf")}}, "optim.lr: expected a finite number, got inf"),
        ({"optim": {"betas": [0.9]}}, "optim.betas: expected 2 values, got [0.9]"),
        ({"optim": {"betas": 0.9}}, "optim.betas: expected a list, got 0.9"),
        ({"optim": {"betas": [0.9, "x"]}}, "optim.betas[1]: expected float, got 'x'"),
        ({"seed": 1.5}, "seed: expected int, got 1.5"),
        ({"seed": True}, "seed: expected int, got True"),
        ({"draft": {"num_taps": None}}, "draft.num_taps: expected int, got None"),
        ({"run": {"queue_depth": "none"}}, "run.queue_depth: expected int or null, got 'none'"),
    ],
)
def test_value_of_the_wrong_kind_is_named_by_its_dotted_key(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as info:
        TrainConfig.from_dict(raw)
    assert str(info.value).startswith(told)


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_torch_cannot_take_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"seed: expected 0 to 2\*\*63 - 1, got "):
        TrainConfig.from_dict(NEEDED | {"seed": seed})


def test_configuration_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="the configuration: expected a mapping"):
        TrainConfig.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("target", {"path": ""}, "target.path: expected the target's directory, got ''"),
        ("target", {"cache_bytes": -1}, "target.cache_bytes: expected at least 0, got -1"),
        ("target", {"dtype": "float16"}, "target.dtype: expected one of float32, bfloat16"),
        ("data", {"path": ""}, "data.path: expected a JSONL file of chats"),
        ("data", {"max_length": 1}, "data.max_length: expected at least 2"),
        ("data", {"max_batch_size": 0}, "data.max_batch_size: expected at least 1"),
        ("data", {"max_anchors": 0}, "data.max_anchors: expected at least 1"),
        ("data", {"row_lengths": [8192]}, "data.row_lengths: expected with data.packing off"),
        (
            "data",
            {"packing": False, "row_lengths": [512, 2048]},
            "data.row_lengths: expected with data.packing off, ascending lengths",
        ),
        (
            "data",
            {"packing": False, "row_lengths": [4096, 512]},
            "data.row_lengths: expected with data.packing off, ascending lengths",
        ),
        ("data", {"token_budget": 100}, "data.token_budget: expected at least data.max_length"),
        ("draft", {"mask_token_id": -1}, "draft.mask_token_id: expected an embedding row"),
        ("draft", {"block_size": 1}, "draft.block_size: expected at least 2"),
        ("draft", {"num_draft_layers": 0}, "draft.num_draft_layers: expected at least 1"),
        ("draft", {"num_taps": 0}, "draft.num_taps: expected at least 1"),
        ("draft", {"head_dim": 0}, "draft.head_dim: expected at least 1"),
        ("draft", {"block_size": 12}, "loss.position_decay: no published value for"),
        ("draft", {"target_layer_ids": [3, 1]}, "draft.target_layer_ids: expected ascending"),
        ("draft", {"target_layer_ids": []}, "draft.target_layer_ids: expected ascending"),
        ("draft", {"layer_types": ["full_attention"]}, "draft.layer_types: expected 5 entries"),
        ("draft", {"layer_types": ["linear"] * 5}, "draft.layer_types: unknown kind 'linear'"),
        (
            "draft",
            {"layer_types": ["sliding_attention"] * 5},
            "draft.sliding_window: needed by a sliding_attention layer",
        ),
        ("draft", {"variant": "eagle"}, "draft.variant: expected one of dflash, dflash2, domino"),
        ("draft", {"selector_rank": 0}, "draft.selector_rank: expected at least 1"),
        (
            "draft",
            {"causal": True, "sliding_window_non_causal": True},
            "draft.sliding_window_non_causal: draft.causal makes every layer causal",
        ),
        ("loss", {"name": "kl"}, "loss.name: expected one of decay, dpace, got 'kl'"),
        ("loss", {"dpace_alpha": 1.5}, "loss.dpace_alpha: expected 0 to 1"),
        ("loss", {"base_decay_frac": 0.0}, "loss.base_decay_frac: expected above 0, to 1"),
        ("loss", {"position_decay": 0.0}, "loss.position_decay: expected above 0"),
        ("loss", {"head_sample": -1}, "loss.head_sample: expected at least 0"),
        ("loss", {"chunk_rows": 0}, "loss.chunk_rows: expected at least 1"),
        ("loss", {"head_fp8": "rows"}, "loss.head_fp8: expected one of off, logits, both"),
        (
            "loss",
            {"head_fp8": "both", "head_sample": 9},
            "loss.head_fp8: both needs the whole head and a bfloat16 draft on a GPU, but loss.head",
        ),
        ("optim", {"name": "sgd"}, "optim.name: expected one of adamw, muon, got 'sgd'"),
        ("optim", {"lr": 0.0}, "optim.lr: expected above 0"),
        ("optim", {"adamw_lr": -1.0}, "optim.adamw_lr: expected above 0"),
        ("optim", {"betas": [0.9, 1.0]}, "optim.betas: expected 0 to below 1"),
        ("optim", {"weight_decay": -0.1}, "optim.weight_decay: expected at least 0"),
        ("optim", {"warmup_frac": 1.0}, "optim.warmup_frac: expected 0 to below 1"),
        ("optim", {"min_lr_frac": 2.0}, "optim.min_lr_frac: expected 0 to 1"),
        ("optim", {"clip_norm": 0.0}, "optim.clip_norm: expected above 0"),
        ("optim", {"grad_accumulation": 0}, "optim.grad_accumulation: expected at least 1"),
        ("optim", {"epochs": 0.0}, "optim.epochs: expected above 0, to 1e+06"),
        ("optim", {"epochs": 1e7}, "optim.epochs: expected above 0, to 1e+06"),
        ("optim", {"max_steps": 0}, "optim.max_steps: expected at least 1"),
        ("run", {"device": "tpu"}, "run.device: expected one of cuda, cpu, got 'tpu'"),
        ("run", {"queue_depth": 0}, "run.queue_depth: expected at least 1"),
        ("run", {"queue_bytes": -1}, "run.queue_bytes: expected at least 0"),
        ("run", {"cpu_threads": 0}, "run.cpu_threads: expected 1 to 256"),
        ("run", {"cpu_threads": 100_000}, "run.cpu_threads: expected 1 to 256"),
        ("run", {"keep_checkpoints": 0}, "run.keep_checkpoints: expected at least 1"),
        ("run", {"log_every_steps": 0}, "run.log_every_steps: expected at least 1"),
        ("run", {"checkpoint_every_steps": 0}, "run.checkpoint_every_steps: expected at least 1"),
        ("compile", {"mode": "yes"}, "compile.mode: expected one of auto, on, off"),
        ("target", {"fp8": "rows", "compile": "off"}, "target.fp8: rows needs compiled layers on"),
        ("compile", {"gate": "auto"}, "compile.gate: expected one of on, off"),
        ("compile", {"watchdog_s": 0.0}, "compile.watchdog_s: expected above 0"),
        ("compile", {"limit_s": 1.0}, "compile.limit_s: expected at least watchdog_s (120.0)"),
    ],
)
def test_value_out_of_range_is_named_with_what_was_expected(
    section: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as info:
        TrainConfig.from_dict(_with(section, **values))
    assert str(info.value).startswith(told)


def test_head_in_fp8_is_refused_where_it_cannot_be_had() -> None:
    raw = _with("loss", head_fp8="both")
    assert TrainConfig.from_dict(raw).loss.head_fp8 == "both"
    wide = raw | {"run": {"device": "cpu"}, "draft": NEEDED["draft"] | {"dtype": "float32"}}
    with pytest.raises(ConfigError, match=r"but run\.device is cpu, draft\.dtype is float32; set"):
        TrainConfig.from_dict(wide)
    domino = NEEDED["draft"] | {"variant": "domino"}
    with pytest.raises(
        ConfigError, match=r"domino needs the slopes .* set loss\.head_fp8 to logits"
    ):
        TrainConfig.from_dict(raw | {"draft": domino})
    halved = TrainConfig.from_dict(raw | {"draft": domino, "loss": {"head_fp8": "logits"}})
    assert halved.loss.head_fp8 == "logits"


def test_what_needs_compiled_code_is_refused_on_a_cpu() -> None:
    raw = _with("target", fp8="rows")
    assert TrainConfig.from_dict(raw).target.fp8 == "rows"
    with pytest.raises(ConfigError, match=r"target\.fp8: .*device is cpu, compile\.mode is off"):
        TrainConfig.from_dict(raw | {"run": {"device": "cpu"}, "compile": {"mode": "off"}})
    with pytest.raises(ConfigError, match=r"compile\.mode: on needs run\.device cuda"):
        TrainConfig.from_dict(NEEDED | {"run": {"device": "cpu"}, "compile": {"mode": "on"}})


def test_dpace_needs_no_decay_by_position() -> None:
    raw = _with("draft", block_size=12) | {"loss": {"name": "dpace"}}
    assert TrainConfig.from_dict(raw).position_decay == math.inf


def test_override_sets_a_dotted_key_in_a_copy() -> None:
    raw = {"optim": {"lr": 1.0, "name": "adamw"}, "seed": 0}
    assert with_override(raw, "optim.lr", 2.0) == {"optim": {"lr": 2.0, "name": "adamw"}, "seed": 0}
    assert with_override(raw, "run.device", "cpu")["run"] == {"device": "cpu"}
    assert with_override(raw, "seed", 3)["seed"] == 3
    assert raw == {"optim": {"lr": 1.0, "name": "adamw"}, "seed": 0}


@pytest.mark.parametrize("key", ["", ".lr", "optim.", "optim..lr"])
def test_override_of_what_is_no_dotted_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a dotted key such as optim\.lr"):
        with_override({}, key, 1)


def test_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed is a value, not a section; it has no key x"):
        with_override({"seed": 0}, "seed.x", 1)


def test_settings_that_prove_nothing_of_others_are_named_as_experiments() -> None:
    assert TrainConfig.from_dict(NEEDED).compile.experiments == ()
    chosen = {"gate": "off", "force_during_fx_trace": True, "error_on_nested_fx_trace": False}
    assert TrainConfig.from_dict(_with("compile", **chosen)).compile.experiments == (
        "compile.gate=off",
        "compile.force_during_fx_trace=true",
        "compile.error_on_nested_fx_trace=false",
    )
    allowed = TrainConfig.from_dict(_with("compile", allow_fallback=True))
    assert allowed.compile.experiments == ("compile.allow_fallback=true",)


def test_the_page_about_train_yaml_has_every_key_with_its_default() -> None:
    page = Path(trainer.__file__).parents[1] / "docs/train_yaml.md"
    told = dict(re.findall(r"^\| `([a-z0-9_.]+)` \| (.+?) \|", page.read_text(), re.MULTILINE))
    expected = {"seed": "0"}
    for section, values in TrainConfig().to_dict().items():
        for key, value in values.items() if section != "seed" else ():
            plain = value if isinstance(value, str) else json.dumps(value)
            expected[f"{section}.{key}"] = "to be set" if key in NEEDED.get(section, {}) else plain
    assert told == expected
