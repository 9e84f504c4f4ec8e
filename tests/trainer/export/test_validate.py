"""A sound export passes every engine's rules; each fault fails by name, for the engines it hits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.export.conftest import MIXED, Export, read_config, write_config
from trainer.__main__ import main
from trainer.errors import CheckpointError
from trainer.export.convert import convert
from trainer.export.engines import ENGINES
from trainer.export.findings import FAIL, OK, WARN, Report
from trainer.export.validate import validate
from trainer.export.zlab import load_export

Spoil = Callable[[Path], None]
ALL = list(ENGINES)
ZLAB_ALONE = ["sglang", "llamacpp", "mlx", "tensorrt-llm"]


def keys(**changes: Any) -> Spoil:
    """Change keys of config.json; those of dflash_config as dflash_config__KEY; None removes."""

    def change(directory: Path) -> None:
        raw = read_config(directory)
        for name, value in changes.items():
            holder, _, inner = name.partition("__")
            where = raw[holder] if inner else raw
            if value is None:
                where.pop(inner or holder)
            else:
                where[inner or holder] = value
        write_config(directory, raw)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Change the tensors of model.safetensors in place."""

    def spoil(directory: Path) -> None:
        held = load_file(directory / "model.safetensors")
        change(held)
        save_file(held, directory / "model.safetensors")

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(directory: Path) -> None:
        for one in spoils:
            one(directory)

    return spoil


def to_fp16(held: dict[str, torch.Tensor]) -> None:
    held.update({name: tensor.half() for name, tensor in held.items()})


def failed(report: Report) -> dict[str, set[str]]:
    """Return the rules that failed, by engine."""
    found: dict[str, set[str]] = {}
    for finding in report.findings:
        if finding.level == FAIL:
            found.setdefault(finding.engine, set()).add(finding.rule)
    return found


@pytest.mark.parametrize("shape", [{}, MIXED, {"dtype": "float32"}], ids=["full", "mixed", "fp32"])
def test_sound_export_passes_every_engine(shape: dict[str, Any], export: Export, tiny_target: Path):
    report = validate(export(**shape), ["all"], tiny_target)
    assert failed(report) == {}
    assert report.ok
    assert report.engines == tuple(ENGINES)
    rules = {finding.rule for finding in report.findings if finding.engine == "every"}
    assert {"files", "tensors", "values", "taps", "block size", "shape", "window"} <= rules
    assert {"rope", "mask token", "target"} <= rules
    assert "no engine was run" in report.table()


def test_shards_pass_as_one_file_does(export: Export, tiny_target: Path):
    assert validate(export(max_shard_bytes=40_000), ["all"], tiny_target).ok


def test_converted_export_passes_vllm_and_speculators_alone(
    export: Export, tiny_target: Path, tmp_path: Path
):
    made = tmp_path / "s"
    convert(export(**MIXED), made, "speculators", tiny_target, verifier="org/tiny")
    report = validate(made, ["all"], tiny_target)
    assert failed(report) == {engine: {"layout"} for engine in ZLAB_ALONE}
    assert validate(made, ["vllm", "speculators"], tiny_target).ok
    told = [f.what for f in report.findings if f.rule == "own head"]
    assert told == [
        "embed_tokens.weight is the target's model.embed_tokens.weight",
        "lm_head.weight is the target's model.embed_tokens.weight",
    ]


def test_warnings_tell_what_only_some_versions_do(export: Export, tiny_target: Path):
    report = validate(export(**MIXED), ["all"], tiny_target)
    warned = {(f.engine, f.rule) for f in report.findings if f.level == WARN}
    assert warned == {("every", "card")} | {
        (engine, "window") for engine in ("vllm", "speculators", "llamacpp")
    }


def every(*rules: str) -> dict[str, set[str]]:
    return {"every": set(rules)}


# What is spoiled in an export with one sliding layer -> the rules that fail, and where.
FAULTS: dict[str, tuple[Spoil, dict[str, set[str]], str]] = {
    "nan": (
        tensors(lambda t: t["norm.weight"].fill_(float("nan"))),
        every("values"),
        "model.safetensors: norm.weight",
    ),
    "dtype of one tensor": (
        tensors(lambda t: t.update({"norm.weight": t["norm.weight"].float()})),
        every("values"),
        "model.safetensors: norm.weight",
    ),
    "fp16": (
        both(tensors(to_fp16), keys(dtype="float16")),
        every("dtype"),
        "config.json: dtype",
    ),
    "missing tensor": (
        tensors(lambda t: t.pop("layers.1.mlp.up_proj.weight")),
        every("tensors"),
        "layers.1.mlp.up_proj.weight",
    ),
    "unknown tensor": (
        tensors(lambda t: t.update({"mask_hidden": torch.zeros(32)})),
        every("tensors", "values"),
        "mask_hidden",
    ),
    "no tensors": (tensors(lambda t: t.clear()), every("tensors"), "fc.weight"),
    "half copied": (
        lambda d: (d / "model.safetensors").write_bytes(b"half"),
        every("files", "tensors"),
        "model.safetensors",
    ),
    "ids not ascending": (
        keys(dflash_config__target_layer_ids=[3, 1]),
        every("taps"),
        "config.json: dflash_config.target_layer_ids",
    ),
    "id beyond the target": (
        keys(dflash_config__target_layer_ids=[1, 6]),
        every("taps"),
        "config.json: dflash_config.target_layer_ids",
    ),
    "too many taps": (
        keys(dflash_config__target_layer_ids=[0, 1, 3]),
        every("tensors", "taps"),
        "config.json: dflash_config.target_layer_ids",
    ),
    "last layer tapped": (
        keys(dflash_config__target_layer_ids=[1, 5]),
        {e: {"last tap"} for e in ("vllm", "sglang", "tensorrt-llm")} | {"speculators": {"layout"}},
        "config.json: dflash_config.target_layer_ids",
    ),
    "block sizes differ": (
        keys(block_size=8),
        every("block size"),
        "config.json: block_size",
    ),
    "block size in one place": (
        keys(block_size=None),
        every("block size"),
        "config.json: block_size",
    ),
    "kv heads": (
        keys(num_key_value_heads=3),
        every("tensors", "shape"),
        "config.json: num_attention_heads",
    ),
    "head_dim": (
        keys(head_dim=260),
        every("tensors") | {"vllm": {"head_dim"}, "tensorrt-llm": {"head_dim"}},
        "config.json: head_dim",
    ),
    "activation": (keys(hidden_act="gelu"), every("shape"), "config.json: hidden_act"),
    "biases": (keys(attention_bias=True), every("shape"), "config.json: attention_bias"),
    "no window": (
        both(keys(sliding_window=None), keys(dflash_config__swa_window_size=None)),
        every("window"),
        "config.json: sliding_window",
    ),
    "windows differ": (
        keys(dflash_config__swa_window_size=32),
        every("window"),
        "config.json: sliding_window",
    ),
    "window switched off": (
        keys(use_sliding_window=False),
        every("window"),
        "config.json: use_sliding_window",
    ),
    "window below the block": (
        keys(sliding_window=3, dflash_config__swa_window_size=3),
        every("window"),
        "config.json: sliding_window",
    ),
    "layer types": (
        keys(layer_types=["sliding_attention"]),
        every("window"),
        "config.json: layer_types",
    ),
    "window on full layers": (
        keys(layer_types=["full_attention", "full_attention"]),
        {"vllm": {"window"}},
        "config.json: dflash_config.use_swa",
    ),
    "causal for vLLM alone": (
        keys(dflash_config__causal=False),
        {e: {"causality"} for e in ZLAB_ALONE},
        "config.json: is_causal, dflash_config.causal",
    ),
    "causal flags differ": (
        keys(dflash_config__causal=False, is_causal=True),
        {e: {"causality"} for e in ["vllm", *ZLAB_ALONE]} | {"speculators": {"layout"}},
        "config.json: is_causal, dflash_config.causal",
    ),
    "rope in one place": (keys(rope_theta=None), every("rope"), "config.json: rope_theta"),
    "ropes differ": (keys(rope_theta=1e6), every("rope", "target"), "config.json: rope_parameters"),
    "scaled rope": (
        keys(rope_scaling={"type": "yarn"}),
        every("rope"),
        "config.json: rope_scaling",
    ),
    "mask beyond the rows": (
        keys(dflash_config__mask_token_id=46),
        every("mask token"),
        "config.json: dflash_config.mask_token_id",
    ),
    "mask is a stop token": (
        keys(dflash_config__mask_token_id=42),
        every("mask token"),
        "config.json: dflash_config.mask_token_id",
    ),
    "mask is a word": (
        keys(dflash_config__mask_token_id=7),
        every("mask token"),
        "config.json: dflash_config.mask_token_id",
    ),
    "mask is in the template": (
        keys(dflash_config__mask_token_id=40),
        every("mask token"),
        "config.json: dflash_config.mask_token_id",
    ),
    "another target": (keys(num_target_layers=8), every("target"), "config.json: num_target_lay"),
    "another architecture": (
        keys(architectures=["AngelSlimModel"]),
        {e: {"architecture"} for e in ["vllm", *ZLAB_ALONE]} | {"speculators": {"layout"}},
        "config.json: architectures",
    ),
    "half a convolution": (
        keys(dflash_config__conv_kernel_size=2),
        {"sglang": {"method"}, "speculators": {"layout"}},
        "config.json: dflash_config.conv_kernel_size",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_fails_where_it_is_for_the_engines_that_it_hits(
    name: str, export: Export, tiny_target: Path
):
    spoil, rules, where = FAULTS[name]
    directory = export(**MIXED)
    spoil(directory)
    report = validate(directory, ["all"], tiny_target)
    assert failed(report) == rules
    assert any(where in f.where for f in report.findings if f.level == FAIL)
    assert all(f.fix and f.where and f.what for f in report.findings if f.level != OK)
    hit = {engine for engine in ENGINES if report.failed(engine)}
    assert hit == set(ENGINES) if "every" in rules else hit == rules.keys()


def test_sliding_layers_that_see_the_whole_block_are_told_with_both_flags(
    export: Export, tiny_target: Path
):
    directory = export(**MIXED, sliding_window_non_causal=True)
    report = validate(directory, ["all"], tiny_target)
    assert failed(report) == {"llamacpp": {"causality"}, "tensorrt-llm": {"causality"}}
    told = [f.what for f in report.findings if f.engine == "vllm" and f.rule == "causality"]
    assert told[0].startswith("in a block: sliding_attention bidirectional, full_attention bid")


SMALL_PARTS: dict[str, Any] = {
    "selector_rank": 8,
    "selector_top_k": 4,
    "gru_hidden_dim": 16,
    "emb_dim": 8,
}


@pytest.mark.parametrize(
    ("variant", "fails", "serving"),
    [
        ("dflash2", {"speculators", "llamacpp", "tensorrt-llm"}, {"vllm", "sglang", "mlx"}),
        ("domino", {"vllm", "speculators", "llamacpp", "mlx"}, {"sglang", "tensorrt-llm"}),
    ],
)
def test_successors_pass_where_an_engine_has_them(
    variant: str, fails: set[str], serving: set[str], export: Export, tiny_target: Path
):
    report = validate(export(variant=variant, **SMALL_PARTS), ["all"], tiny_target)
    assert {engine for engine in ENGINES if report.failed(engine)} == fails
    assert {engine for engine in ENGINES if not report.failed(engine)} == serving


def test_domino_whose_slots_another_order_gives_is_no_draft_of_ours(export: Export):
    directory = export(variant="domino", **SMALL_PARTS)
    keys(dflash_config__shift_label=True)(directory)
    report = validate(directory, ["sglang"])
    assert failed(report) == every("config")
    assert "shift_label True: only False is known" in report.findings[0].what


# Spoiled in the converted directory -> the rules that fail.
OWN: dict[str, tuple[Spoil, dict[str, set[str]]]] = {
    "another head": (
        tensors(lambda t: t["lm_head.weight"].mul_(2)),
        every("own head"),
    ),
    "tokens of a whole block": (
        keys(
            speculators_config={
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "org/tiny"},
            }
        ),
        {"speculators": {"proposal"}},
    ),
    "unknown method": (
        keys(speculators_config__default_proposal_method="sampled"),
        {"speculators": {"proposal"}},
    ),
    "ids not moved": (keys(aux_hidden_state_layer_ids=[0, 2]), every("config")),
    "smaller vocabulary without maps": (
        both(keys(draft_vocab_size=20), tensors(lambda t: t.update(lm(t)))),
        every("vocabulary"),
    ),
}


def lm(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"lm_head.weight": held["lm_head.weight"][:20].clone()}


@pytest.mark.parametrize("name", OWN)
def test_fault_of_the_speculators_layout_is_found(
    name: str, export: Export, tiny_target: Path, tmp_path: Path
):
    spoil, rules = OWN[name]
    convert(export(), tmp_path / "s", "speculators", tiny_target, verifier="org/tiny")
    spoil(tmp_path / "s")
    report = validate(tmp_path / "s", ["vllm", "speculators"], tiny_target)
    assert failed(report) == rules


def test_smaller_vocabulary_is_read_and_its_maps_are_checked(
    export: Export, tiny_target: Path, tmp_path: Path
):
    made = tmp_path / "s"
    convert(export(), made, "speculators", tiny_target, verifier="org/tiny")
    chosen = torch.zeros(46, dtype=torch.bool)
    chosen[::2] = True  # 23 tokens: 0, 2, 4, ...
    moved = torch.arange(23)  # token i of the draft is token 2 * i of the target
    held = load_file(made / "model.safetensors")
    held |= {"t2d": chosen, "d2t": moved, "lm_head.weight": held["lm_head.weight"][::2].clone()}
    save_file(held, made / "model.safetensors")
    keys(draft_vocab_size=23)(made)
    report = validate(made, ["vllm", "speculators"], tiny_target)
    assert failed(report) == {}
    assert "23 of 46 tokens, t2d and d2t agree" in report.table()
    save_file(held | {"d2t": moved + 1}, made / "model.safetensors")
    assert failed(validate(made, ["vllm"], tiny_target)) == every("vocabulary")


def test_padded_vocabulary_that_keeps_the_head_from_being_shared_fails(
    export: Export, tiny_target: Path, tmp_path: Path
):
    padded = tmp_path / "padded"
    shutil.copytree(tiny_target, padded)
    held = load_file(padded / "model.safetensors")
    rows = torch.zeros(2, 32)
    held["model.embed_tokens.weight"] = torch.cat((held["model.embed_tokens.weight"], rows))
    save_file(held, padded / "model.safetensors")
    report = validate(export(), ["vllm"], padded)
    assert failed(report) == every("head")
    assert "embedding 48 rows, head 48, vocab_size 46" in report.table()


def test_what_is_not_there_is_warned_of(export: Export):
    directory = export()
    report = validate(directory, ["llamacpp"])
    warned = {(f.engine, f.rule) for f in report.findings if f.level == WARN}
    assert warned == {("every", "card"), ("every", "target"), ("llamacpp", "tokenizer")}
    assert report.ok
    (directory / "README.md").write_text("---\nlicense: set-a-license\n---\n")
    warned_of = [f for f in validate(directory, ["vllm"]).findings if f.rule == "card"]
    assert [(f.level, f.where) for f in warned_of] == [(WARN, "README.md: license")]
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    told = [f.level for f in validate(directory, ["vllm"]).findings if f.rule == "card"]
    assert told == [OK]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not a DFlash configuration"),
        ("[]", "not a DFlash configuration"),
        ("{}", "no key 'dflash_config'"),
        ('{"dflash_config": {}}', "no key"),
        ('{"dflash_config": 3}', "not a DFlash configuration"),
        ('{"speculators_model_type": "dspark"}', "'dspark' is no DFlash draft"),
        ('{"speculators_model_type": "dflash"}', "no key"),
        ('{"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": 3}', "not a specul"),
    ],
)
def test_unreadable_configuration_is_a_finding(
    text: str, named: str, export: Export, tiny_target: Path
):
    directory = export()
    (directory / "config.json").write_text(text)
    report = validate(directory, ["all"], tiny_target)
    assert failed(report) == every("config")
    assert named in report.findings[0].what


@pytest.mark.parametrize("value", ["64", 0, -1, 2.5, None, [1], True])
@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_number_of_another_kind_is_a_finding(key: str, value: Any, export: Export):
    directory = export()
    raw = read_config(directory)
    raw[key] = value
    write_config(directory, raw)
    report = validate(directory, ["all"])
    assert failed(report) == every("config")
    assert key in report.findings[0].what


def test_odd_values_end_in_findings_and_never_in_a_traceback(export: Export, tiny_target: Path):
    directory = export(**MIXED)
    sound = read_config(directory)
    for key in sound:
        for value in (None, [], {}, "x", -1, [{}], 1e400):
            write_config(directory, sound | {key: value})
            assert validate(directory, ["all"], tiny_target).findings


def test_command_gives_the_table_the_document_and_the_status(
    export: Export, tiny_target: Path, capsys: pytest.CaptureFixture[str]
):
    directory = str(export())
    target = ["--target", str(tiny_target)]
    assert main(["validate", directory, "--engine", "vllm", "--engine", "mlx", *target]) == 0
    printed = capsys.readouterr().out
    assert "vllm ok, mlx ok" in printed
    keys(dflash_config__target_layer_ids=[1, 5])(Path(directory))
    assert main(["validate", directory, "--json", *target]) == 7
    document = json.loads(capsys.readouterr().out)
    assert document["engines"] == {
        "vllm": False,
        "sglang": False,
        "speculators": False,
        "llamacpp": True,
        "mlx": True,
        "tensorrt-llm": False,
    }
    assert (document["ok"], document["engine_run"]) == (False, False)
    worst = [f for f in document["findings"] if f["engine"] == "sglang" and f["level"] == "FAIL"]
    assert worst[0]["what"] == "5 is the target's last layer: SGLang ends with an IndexError"
    assert 46 in worst[0]["faults"]


def test_unknown_engine_or_directory_is_refused(export: Export, tmp_path: Path):
    with pytest.raises(CheckpointError, match="--engine ollama: expected one of vllm"):
        validate(export(), ["ollama"])
    with pytest.raises(CheckpointError, match="no such directory"):
        validate(tmp_path / "nowhere", ["all"])


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, expected at most 1000"),
        ("hidden_size", 2**31, "hidden_size is 2147483648, expected at most 2147483647"),
        ("rope_theta", 10**400, "int too large to convert to float"),
    ],
)
def test_number_that_no_draft_can_have_is_a_finding_and_no_hang(
    key: str, value: int, told: str, export: Export
):
    directory = export()
    write_config(directory, read_config(directory) | {key: value})
    report = validate(directory, ["all"])
    assert [told in finding.what for finding in report.findings] == [True]
    with pytest.raises(CheckpointError, match=told):
        load_export(directory)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", None), ("dtype", []), ("rms_norm_eps", "x")]
)
def test_speculators_layers_that_the_library_refuses_are_a_finding(
    key: str, value: object, export: Export, tiny_target: Path, tmp_path: Path
):
    directory = tmp_path / "speculators"
    convert(export(), directory, "speculators", tiny_target)
    raw = read_config(directory)
    raw["transformer_layer_config"][key] = value
    write_config(directory, raw)
    report = validate(directory, ["all"])
    assert ["transformer_layer_config" in f.what for f in report.findings] == [True]


def test_configuration_nested_beyond_reading_is_a_finding(export: Export):
    directory = export()
    (directory / "config.json").write_text("[" * 100_000)
    report = validate(directory, ["all"])
    assert ["not a DFlash configuration" in f.what for f in report.findings] == [True]
