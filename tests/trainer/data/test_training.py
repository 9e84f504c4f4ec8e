"""Prepared shards in a run: the steps are those of the same chats in a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.session import Session

MakeRun = Callable[..., Path]


def point_at(run_dir: Path, data: Path) -> None:
    """Make the run's manifest name prepared data."""
    path = run_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["data"]["path"] = str(data)
    manifest["dataset_sha256"] = json.loads((data / "dataset.json").read_text())["sha256"]
    path.write_text(json.dumps(manifest))


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def prepared(tiny_target: Path, tiny_chats: Path, tmp_path: Path) -> Path:
    output = tmp_path / "prepared"
    argv = ["prepare", "--input", str(tiny_chats), "--output", str(output)]
    argv += ["--target", str(tiny_target), "--max-length", "32", "--no-dedup"]
    assert main([*argv, "--shard-samples", "5", "--num-workers", "1"]) == 0
    return output


def test_run_on_shards_steps_as_on_the_file_they_were_made_of(make_run: MakeRun, prepared: Path):
    runs = [
        make_run(tag, optim={"max_steps": 4, "epochs": 50.0}, run={"log_every_steps": 1})
        for tag in ("file", "shards")
    ]
    point_at(runs[1], prepared)
    for run_dir in runs:
        Session(run_dir, resume=False).train()
    first, second = ([e["loss"] for e in events(run_dir, "step")] for run_dir in runs)
    assert first == second
    assert len(first) == 4
    told = [e["coverage_frac"] for e in events(runs[1], "phase") if e["phase"] == "load"]
    assert len(told) == 1
    assert 0 < told[0] < 1


def test_shards_that_changed_after_the_launch_stop_the_run(
    make_run: MakeRun, prepared: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = make_run("shards")
    point_at(run_dir, prepared)
    shard = prepared / "shard-00001.ids.bin"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    assert main(["train", "--run-dir", str(run_dir)]) == 2
    told = capsys.readouterr().err
    assert f"error: {shard} holds other bytes than trainer prepare wrote" in told


def test_prepare_tells_a_mistake_in_one_line_with_status_2(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["prepare", "--input", str(tmp_path / "gone.jsonl"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--target", str(tiny_target)]) == 2
    told = f"error: --input {tmp_path}/gone.jsonl: no such file or directory\n"
    assert capsys.readouterr().err.endswith(told)
