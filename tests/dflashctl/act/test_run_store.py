"""The laptop's records: whole or absent, and an unproven launch stays an intent."""

import dataclasses
from pathlib import Path

import pytest

from dflashctl.errors import RefusedError
from dflashctl.operations.init import init
from dflashctl.run_store import RunStore
from trainer.contract.errors import TagError
from trainer.contract.manifest import Manifest

EXAMPLE = Manifest(
    run_id="fresh7-1",
    tag="fresh7",
    created_unix_s=100.0,
    dflashctl_version="0.1.0",
    release="ab",
    git_commit=None,
    git_dirty=None,
    packages={},
    host="kpro6",
    vmid=200,
    gpus=(),
    python="python3",
    workspace="/w",
    log_path="/w/x.log",
    cache_dir="/w/cache",
    target_revision="r",
    dataset_sha256="d",
    config={},
    seed=0,
    argv=(),
)


def test_an_intent_becomes_the_record_and_is_gone(tmp_path: Path) -> None:
    runs = RunStore(tmp_path / "runs")
    assert (runs.tags(), runs.manifest("fresh7"), runs.intent("fresh7")) == ([], None, None)
    runs.intend(EXAMPLE)
    assert (runs.tags(), runs.manifest("fresh7"), runs.intent("fresh7")) == ([], None, EXAMPLE)
    assert runs.place_of("fresh7") == "kpro6/200"
    path = runs.record(EXAMPLE)
    assert [p.name for p in path.parent.iterdir()] == ["manifest.json"]
    assert (runs.tags(), runs.manifest("fresh7"), runs.intent("fresh7")) == (
        ["fresh7"],
        EXAMPLE,
        None,
    )


def test_a_forgotten_intent_leaves_no_directory_but_keeps_other_files(tmp_path: Path) -> None:
    runs = RunStore(tmp_path)
    runs.intend(EXAMPLE)
    runs.forget_intent("fresh7")
    assert list(tmp_path.iterdir()) == []
    runs.intend(EXAMPLE)
    (tmp_path / "fresh7" / "notes.txt").write_text("mine")
    runs.forget_intent("fresh7")
    assert [p.name for p in (tmp_path / "fresh7").iterdir()] == ["notes.txt"]


def test_tags_are_ordered_by_launch_and_a_broken_record_is_skipped(tmp_path: Path) -> None:
    runs = RunStore(tmp_path)
    for tag, created in (("b", 30.0), ("a", 40.0), ("c", 20.0)):
        runs.record(dataclasses.replace(EXAMPLE, tag=tag, created_unix_s=created))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert runs.tags() == ["c", "b", "a"]


def test_the_host_itself_is_recorded_as_self_and_bad_tags_are_refused(tmp_path: Path) -> None:
    runs = RunStore(tmp_path)
    runs.record(dataclasses.replace(EXAMPLE, vmid=None))
    assert runs.place_of("fresh7") == "kpro6/self"
    assert runs.place_of("other") is None
    with pytest.raises(TagError):
        runs.directory("../x")


def test_init_writes_a_starter_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    assert init(path).path == str(path)
    written = path.read_text()
    assert "version: 1" in written
    with pytest.raises(RefusedError, match="not changed"):
        init(path)
    assert path.read_text() == written
