"""The look at a model directory: each kind of damage is named with its file and the next step."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.model_directory import COPY, faults

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors(*names: str) -> bytes:
    """A safetensors file: 8 bytes of length, header, two bf16 numbers a tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(names):
        offsets = [4 * number, 4 * number + 4]
        header[name] = {"dtype": "BF16", "shape": [2], "data_offsets": offsets}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\1" * 4 * len(names)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Two shards, their index, a configuration and a tokenizer."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    for shard, name in zip(SHARDS, ("a", "b"), strict=True):
        (tmp_path / shard).write_bytes(tensors(name))
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_whole_directory_has_no_fault_in_shards_or_in_one_file(whole: Path):
    assert faults(whole) == []
    (whole / "model.safetensors").write_bytes(tensors("a", "b"))
    (whole / "model.safetensors.index.json").write_text("half")  # transformers takes the one file
    (whole / "tokenizer.json").rename(whole / "tokenizer.model")
    assert faults(whole) == []


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
DAMAGE: dict[str, tuple[str, bytes | None, str]] = {
    "config absent": ("config.json", None, "config.json is missing"),
    "config empty": ("config.json", b"", "config.json is empty (0 bytes)"),
    "config cut": ("config.json", b'{"model_type": "ll', "config.json is damaged or half copied"),
    "config a list": ("config.json", b"[]", "config.json is no JSON object"),
    "config of nothing": ("config.json", b"{}", "config.json names no model_type"),
    "config a pointer": ("config.json", POINTER, "config.json is a pointer of Git LFS"),
    "tokenizer absent": ("tokenizer.json", None, "tokenizer.json is missing"),
    "tokenizer of nothing": ("tokenizer.json", b"{}", "tokenizer.json is no tokenizer"),
    "tokenizer cut": ("tokenizer.json", b'{"mo', "tokenizer.json is damaged or half copied"),
    "shard absent": (SHARDS[1], None, f"{SHARDS[1]} is missing"),
    "shard empty": (SHARDS[1], b"", f"{SHARDS[1]} is empty (0 bytes)"),
    "shard a pointer": (SHARDS[1], POINTER, f"{SHARDS[1]} is a pointer of Git LFS"),
    "shard cut": (SHARDS[1], tensors("b")[:-1], f"{SHARDS[1]} is damaged or half copied ("),
    "shard cut in its header": (SHARDS[1], tensors("b")[:20], "(20 bytes; its header is cut off)"),
    "shard no safetensors": (SHARDS[1], b"\0" * 64, "(64 bytes; no header of safetensors)"),
    "shard of another": (SHARDS[1], tensors("c"), f"{SHARDS[1]} lacks 1 tensors of model."),
    "shard too long": (SHARDS[1], tensors("b") + b"\0", f"{SHARDS[1]} is damaged or half copied ("),
    "index cut": ("model.safetensors.index.json", b'{"we', "index.json is damaged or half copied"),
    "index empty": ("model.safetensors.index.json", b"{}", "index.json is no index of weights"),
    "index absent": ("model.safetensors.index.json", None, "index.json is missing, the list of"),
}


@pytest.mark.parametrize(("name", "content", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_one_fault_that_names_the_file(
    whole: Path, name: str, content: bytes | None, told: str
):
    (whole / name).unlink()
    if content is not None:
        (whole / name).write_bytes(content)
    (fault,) = faults(whole)
    assert told in fault.text
    assert COPY in fault.hint


def test_half_a_file_is_told_with_both_sizes(whole: Path):
    good = tensors("b")
    (whole / SHARDS[1]).write_bytes(good[:-3])
    assert f"({len(good) - 3} of {len(good)} bytes)" in faults(whole)[0].text


@pytest.mark.parametrize("part", ["config", "text_config"])
def test_quantised_weights_are_named_with_their_method(whole: Path, part: str):
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config = {"model_type": "qwen3_5"} | (
        quantised if part == "config" else {"text_config": quantised}
    )
    (whole / "config.json").write_text(json.dumps(config))
    (fault,) = faults(whole)
    assert fault.text == "config.json says that the weights are quantised (gptq)"
    assert "bfloat16" in fault.hint


def test_an_adapter_is_told_to_be_merged(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    found = faults(tmp_path)
    assert "an adapter (LoRA) is no target" in found[0].text
    assert "merge" in found[0].hint
    assert [fault.text for fault in found[1:]] == [
        "config.json is missing",
        "tokenizer.json is missing",
        "model.safetensors is missing",
    ]


def test_weights_of_pickle_alone_are_told_to_be_saved_again(whole: Path):
    for path in whole.glob("model*"):
        path.unlink()
    (whole / "pytorch_model.bin").write_bytes(b"x")
    (fault,) = faults(whole)
    assert fault.text == "pytorch_model.bin is there, but no safetensors"


def test_a_name_that_no_file_can_have_is_a_fault_not_a_traceback(whole: Path):
    index = {"weight_map": {"a": SHARDS[0], "b": "x" * 300}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    (fault,) = faults(whole)
    assert "cannot be read: File name too long" in fault.text
