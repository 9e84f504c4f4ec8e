"""A hub id with a revision: loaded from the container's cache; what is missing there is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import tiny_targets

COMMITS = {"v1": "1" * 40, "half": "2" * 40, "fp8": "3" * 40}
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from trainer.contract.config import DraftModelConfig, TargetConfig
from trainer.errors import TargetError
from trainer.model.target import load_target

def load(revision, path="org/tiny"):
    config = TargetConfig(path=path, revision=revision, dtype="float32")
    try:
        target = load_target(config, DraftModelConfig(target_layer_ids=(1, 3)), "cpu")
    except TargetError as error:
        return str(error)
    return [target.num_layers, float(target.head.embedding.double().sum())]

told = [load("v1"), load("half"), load("none"), load(None, "org/other"), load("fp8")]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, list[Any]]:
    """Sum of the embedding, and what loading gave: v1, half, none, another id, fp8."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--org--tiny"
    made = tiny_targets.llama(vocab_size=64)
    for revision, commit in COMMITS.items():
        made.save_pretrained(repository / "snapshots" / commit, max_shard_size="20KB")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    config = repository / "snapshots" / COMMITS["fp8"] / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantised))
    half = repository / "snapshots" / COMMITS["half"]
    sorted(half.glob("model-*.safetensors"))[1].unlink()
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return float(made.model.embed_tokens.weight.detach().double().sum()), list(
        json.loads(done.stdout)
    )


pytestmark = pytest.mark.timeout(120)  # the first of these tests starts a Python with torch


def test_revision_is_loaded_from_the_cache(told: tuple[float, list[Any]]):
    embedding, (whole, *_) = told
    assert whole == [4, pytest.approx(embedding)]


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (1, ["org/tiny (revision half) cannot be loaded", "model-00002-of-"]),
        (2, ["org/tiny (revision none) cannot be loaded"]),
        (3, ["org/other (revision default) cannot be loaded"]),
        (4, ["org/tiny (revision fp8): its weights are quantised (fp8)"]),
    ],
)
def test_what_cannot_be_loaded_is_named(
    told: tuple[float, list[Any]], place: int, named: list[str]
):
    for text in named:
        assert text in told[1][place]
