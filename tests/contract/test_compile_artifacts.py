"""A file of compile caches: whole or refused, and for hosts of its own kind alone."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.manifests import make_manifest
from trainer.contract.compile_artifacts import (
    content_of,
    framed,
    may_be_written,
    require_kind,
    unframed,
)
from trainer.contract.errors import ArtifactsError
from trainer.contract.manifest import Gpu

PATH = Path("caches.bin")
MANIFEST = make_manifest(driver="580.1", packages={"torch": "2.11.0"})


def test_artefacts_come_back_for_a_host_of_the_same_kind() -> None:
    told, data = unframed(framed(b"data\nand more", MANIFEST), PATH)
    assert data == b"data\nand more"
    one_card = replace(MANIFEST, gpus=(Gpu("target", 7, "GPU-9", "H200"),), tag="other")
    require_kind(told, PATH, one_card)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gpus": (Gpu("drafter", 0, "GPU-1", "H100"),)},
            r"gpus \['H200'\], this run has \['H100'\]",
        ),
        ({"packages": {"torch": "2.99"}}, r"torch 2\.11\.0, this run has 2\.99"),
        ({"driver": "590.2"}, r"driver 580\.1, this run has 590\.2"),
    ],
)
def test_artefacts_of_another_kind_of_host_are_refused(changes: dict[str, Any], words: str) -> None:
    told, _ = unframed(framed(b"data", MANIFEST), PATH)
    with pytest.raises(ArtifactsError, match=f"caches.bin was made for {words}; warm up here"):
        require_kind(told, PATH, replace(MANIFEST, **changes))


def test_artefacts_that_are_not_whole_are_refused() -> None:
    content = framed(b"data\nand more", MANIFEST)
    head = content.index(b"{")
    cuts = (content[:-1], content[:-1] + b"x", content[: head + 9], content[:head] + b"[7]\nx")
    for cut in (*cuts, content[:head] + b"[" * 100_000 + b"\n"):
        with pytest.raises(ArtifactsError, match="is damaged"):
            unframed(cut, PATH)
    with pytest.raises(ArtifactsError, match="is no file that warmup --save-artifacts has written"):
        unframed(b"PK" + content, PATH)


def test_a_file_takes_the_place_of_a_file_alone(tmp_path: Path) -> None:
    old, pipe = tmp_path / "old.bin", tmp_path / "pipe"
    old.write_bytes(b"caches")
    os.mkfifo(pipe)
    assert may_be_written(old)
    assert may_be_written(tmp_path / "new.bin")
    for path in (tmp_path, pipe, tmp_path / ("n" * 300), tmp_path / "no" / "new.bin"):
        assert not may_be_written(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Not a file"):
        content_of(pipe)
    (tmp_path / "caches.bin").write_bytes(b"caches")
    assert content_of(tmp_path / "caches.bin") == b"caches"
