"""manifest.json: whole or refused."""

import json
from typing import Any

import pytest

from tests.contract.manifests import make_manifest
from trainer.contract.errors import ManifestError
from trainer.contract.manifest import Manifest


def _changed(**values: Any) -> str:
    return json.dumps(json.loads(make_manifest().to_json()) | values)


def test_manifest_survives_its_own_text() -> None:
    assert Manifest.from_json(make_manifest().to_json()) == make_manifest()


def test_devices_of_a_role_keep_the_order_of_hosts_yaml() -> None:
    manifest = make_manifest()
    assert [gpu.index for gpu in manifest.devices("target")] == [0, 1]
    assert [gpu.uuid for gpu in manifest.devices("drafter")] == ["GPU-b"]


def test_unknown_keys_are_skipped_at_both_levels() -> None:
    raw = json.loads(make_manifest().to_json())
    raw["mood"] = "good"
    for gpu in raw["gpus"]:
        gpu["fans"] = 2
    assert Manifest.from_json(json.dumps(raw)) == make_manifest()


def test_place_is_named_as_in_hosts_yaml() -> None:
    assert make_manifest().place == "kpro6/200"
    assert make_manifest(vmid=None).place == "kpro6/self"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "manifest.json is not JSON"),
        ("[1]", "has no version 'v'"),
        ("{}", "has no version 'v'"),
        ('{"v": 1, "tag": "x"}', "manifest.json lacks argv, cache_dir, config, created_unix_s,"),
        (_changed(v=2), "has version 2, this reader knows 1"),
        (_changed(config="x"), "config is 'x', not dict"),
        (_changed(seed="0"), "seed is '0', not int"),
        (_changed(argv="ls"), "argv is 'ls', not list"),
        (_changed(log_path=None), "log_path is None, not str"),
        (_changed(gpus=[{"role": "target"}]), "a GPU lacks 'index'"),
        (_changed(gpus=[3]), "a GPU lacks"),
    ],
)
def test_manifest_that_lacks_something_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ManifestError) as info:
        Manifest.from_json(text)
    assert told in str(info.value)
