"""Shards with an index, and a directory that is whole at every instant."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.export.conftest import Export
from trainer.errors import CheckpointError
from trainer.export.files import TensorFiles, recover, write_directory
from trainer.export.zlab import load_export


def test_big_draft_is_written_in_shards_whose_index_sums_up(export: Export):
    whole, directory = export("whole"), export(max_shard_bytes=30_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    count = len(shards)
    assert count >= 3
    assert shards == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert set(index["weight_map"].values()) == set(shards)
    # 8,192 B of fc and 3 norms, then 2 layers: 6 norms' and 7 matrices' rows, 2 bytes a weight.
    per_layer = 2 * 32 + 2 * 64 + 2 * 256 * 32 + 2 * 128 * 32 + 3 * 48 * 32
    assert index["metadata"]["total_size"] == 2 * (32 * 64 + 2 * 32 + 2 * per_layer)
    one, many = TensorFiles(whole).read_all(), TensorFiles(directory).read_all()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert torch.equal(load_export(directory).norm.weight, one["norm.weight"])


def lose_shard(directory: Path) -> None:
    (directory / "model-00002-of-00004.safetensors").unlink()


def cut_shard(directory: Path) -> None:
    path = directory / "model-00001-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def change_index(directory: Path, name: str, value: object) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if name == "total_size":
        index["metadata"]["total_size"] = value
    else:
        index["weight_map"][name] = value
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lose_shard, "model-00002-of-00004.safetensors: cannot be read"),
        (cut_shard, "model-00001-of-00004.safetensors: cannot be read"),
        (lambda d: change_index(d, "total_size", 7), "metadata.total_size: says 7 bytes, the sh"),
        (
            lambda d: change_index(d, "norm.weight", "model-00001-of-00004.safetensors"),
            "norm.weight: says model-00001-of-00004.safetensors, is in model-00004-of-00004",
        ),
        (
            lambda d: change_index(d, "ghost.weight", "model-00001-of-00004.safetensors"),
            "ghost.weight: says model-00001-of-00004.safetensors, is in no file",
        ),
        (lambda d: change_index(d, "norm.weight", "../x.safetensors"), "which is no plain file"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text("{"),
            "is not an index of weights",
        ),
    ],
)
def test_shards_that_do_not_match_their_index_are_refused_by_name(
    spoil: object, told: str, export: Export
):
    directory = export(max_shard_bytes=40_000)
    assert len(list(directory.glob("*.safetensors"))) == 4
    spoil(directory)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        load_export(directory)
    assert told in str(caught.value)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from trainer.export.files import TensorFiles, read_json, write_directory

place = Path(sys.argv[1])
def write(mark):
    weights = {f"t{i}": torch.full((64, 64), float(mark)) for i in range(8)}
    write_directory(place, weights, {"mark": mark}, max_shard_bytes=40_000)

write(0)
draw, seen = random.Random(3), set()
for _ in range(15):
    child = os.fork()
    if child == 0:
        for turn in range(100_000):
            write(turn % 2)
        os._exit(0)
    time.sleep(draw.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mark, tensors = read_json(place / "config.json")["mark"], TensorFiles(place).read_all()
    assert len(tensors) == 8, sorted(tensors)
    assert all(bool((tensor == mark).all()) for tensor in tensors.values()), mark
    seen.add(mark)
write(1)
print(sorted(seen), sorted(path.name for path in place.parent.iterdir()))
"""


def test_export_killed_at_any_moment_leaves_the_old_or_the_new_one_whole(tmp_path: Path):
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "export")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0") or done.stdout.startswith("[1")
    assert done.stdout.rstrip().endswith("['export']")  # nothing is left beside it


def test_export_that_a_kill_left_under_its_old_name_is_put_back(tmp_path: Path):
    # Between two renames, on a file system that cannot exchange names.
    write_directory(tmp_path / "export", {"t": torch.ones(2)}, {"mark": 1})
    (tmp_path / "export").rename(tmp_path / ".export.old")
    recover(tmp_path / "export")
    assert torch.equal(TensorFiles(tmp_path / "export").read("t"), torch.ones(2))
    assert not (tmp_path / ".export.old").exists()


def test_file_in_the_place_of_an_export_is_not_overwritten(tmp_path: Path):
    (tmp_path / "export").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file; choose another directory"):
        write_directory(tmp_path / "export", {"t": torch.ones(2)}, {})
    assert (tmp_path / "export").read_text() == "mine"
