"""A small draft for the tiny target of all trainer tests, exported in the way a test asks for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.config import TargetConfig
from trainer.export.zlab import export_draft
from trainer.model.draft import DraftConfig, DraftModel

# The tiny target's: width, heads, layers, words; id 43 is <|mask|>, 42 ends an answer.
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_draft_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 46,
    "block_size": 4,
    "mask_token_id": 43,
    "target_layer_ids": (1, 3),
    "num_target_layers": 6,
    "layer_types": ("full_attention", "full_attention"),
    "dtype": "bfloat16",
}
MIXED: dict[str, Any] = {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 16,
}

Export = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Tests share the machine; tiny products are not faster with more threads."""
    torch.set_num_threads(1)


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Export a fresh draft: export(name="export", max_shard_bytes=..., **shape) -> directory."""

    def make(name: str = "export", *, max_shard_bytes: int = 1 << 30, **changes: Any) -> Path:
        draft = DraftModel(DraftConfig(**SHAPE | changes), seed=5)
        target = TargetConfig(path="made-up/tiny", revision="r1")
        export_draft(draft, tmp_path / name, target, max_shard_bytes=max_shard_bytes)
        return tmp_path / name

    return make


def read_config(directory: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return raw


def write_config(directory: Path, raw: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
