"""Whether a launch is told the truth about the warm-up: by real manifests and stamps on disk."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnosis.warmth import needs_warmth, warmth_of
from tests.dflashctl.act.test_run_store import EXAMPLE
from trainer.contract.config import TrainConfig
from trainer.contract.manifest import Gpu, Manifest
from trainer.contract.warmup_stamp import NAME, write_stamp

CONFIG = TrainConfig.from_dict(
    {"target": {"path": "/m"}, "data": {"path": "/d"}, "draft": {"mask_token_id": 1}}
)


def _manifest(cache: Path, **changes: Any) -> Manifest:
    config = TrainConfig.from_dict(CONFIG.to_dict() | changes.pop("config", {})).to_dict()
    gpus = (Gpu("drafter", 0, "GPU-a", "H200"),)
    facts = {"release": "ab" * 32, "packages": {"torch": "2.13.0"}, "driver": "570.86.15"}
    facts |= {"cache_dir": str(cache), "config": config, "gpus": gpus} | changes
    return replace(EXAMPLE, **facts)


def _stamp(cache: Path, manifest: Manifest) -> dict[str, Any]:
    """Write the stamp of a warm-up and read it as the facts program does."""
    write_stamp(manifest, [], 1.0)
    stamp: dict[str, Any] = json.loads((cache / NAME).read_text())
    return stamp | {"key": cache.name}


def test_a_warm_up_of_the_same_run_is_fresh(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path / "k")
    found = warmth_of(manifest, [_stamp(tmp_path / "k", manifest)])
    assert (found.state, found.why) == ("fresh", "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"release": "cd" * 32}, "release cdcdcdcdcdcd, the warm-up had abababababab"),
        ({"packages": {"torch": "2.14.1"}}, "torch 2.14.1, the warm-up had 2.13.0"),
        ({"driver": None}, "driver none, the warm-up had 570.86.15"),
        ({"gpus": (Gpu("target", 1, "GPU-b", "A100"),)}, "gpus A100, the warm-up had H200"),
        ({"config": {"data": {"path": "/d", "max_anchors": 7}}}, "data.max_anchors 7, the"),
    ],
    ids=["release", "torch", "driver", "gpu", "shapes"],
)
def test_a_warm_up_of_something_else_is_stale_and_says_of_what(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    stamp = _stamp(tmp_path / "k", _manifest(tmp_path / "k"))
    found = warmth_of(_manifest(tmp_path / "k", **change), [stamp])
    assert found.state == "stale"
    assert found.why.startswith(f"the warm-up is stale: {why}")


def test_the_lengths_of_the_chats_count_only_where_rows_have_them(tmp_path: Path) -> None:
    for packing, state in ((True, "fresh"), (False, "stale")):
        config = {"data": {"path": "/d", "packing": packing}}
        before = _manifest(tmp_path / "k", config=config)
        stamp = _stamp(tmp_path / "k", before)
        assert warmth_of(replace(before, dataset_sha256="ef" * 32), [stamp]).state == state


def test_without_a_stamp_of_its_own_cache_the_nearest_one_tells_what_changed(
    tmp_path: Path,
) -> None:
    old = _stamp(tmp_path / "old", _manifest(tmp_path / "old", release="cd" * 32))
    far = _stamp(tmp_path / "far", _manifest(tmp_path / "far", release="cd" * 32, driver="1.2"))
    found = warmth_of(_manifest(tmp_path / "new"), [old, far])
    expected = "the warm-up is stale: release abababababab, the warm-up had cdcdcdcdcdcd"
    assert (found.state, found.why) == ("stale", expected)
    assert warmth_of(_manifest(tmp_path / "new"), []).state == "none"


def test_a_stamp_of_an_older_program_or_of_nonsense_is_stale(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path / "k")
    for stamp in ({"v": 1, "release": "ab" * 32, "torch": "2.13.0"}, {"shapes": [1], "gpus": 3}):
        assert warmth_of(manifest, [stamp | {"key": "k"}]).state == "stale"


@pytest.mark.parametrize(
    ("section", "needed"),
    [({}, True), ({"run": {"device": "cpu"}}, False), ({"compile": {"mode": "off"}}, False)],
)
def test_only_what_compiles_needs_a_warm_up(section: dict[str, Any], needed: bool) -> None:
    assert needs_warmth(TrainConfig.from_dict(CONFIG.to_dict() | section)) is needed
