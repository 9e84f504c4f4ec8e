"""COMPLETE.json: a directory is whole, or the reason is told."""

import hashlib
import json
from pathlib import Path

import pytest

from trainer.contract.completion import (
    COMPLETE,
    describe,
    digest_file,
    latest_complete,
    step_directory,
    step_of,
    verify,
)
from trainer.contract.errors import CompletionError


def _complete(root: Path, step: int, content: bytes = b"weights") -> Path:
    directory = root / step_directory(step)
    directory.mkdir()
    (directory / "a.bin").write_bytes(content)
    (directory / COMPLETE).write_text(describe(directory, ["a.bin"]))
    return directory


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_00000100", 100),
        ("step_123456789", 123456789),
        ("step_100", None),
        ("step_00000100.partial", None),
        ("step_0000010x", None),
        ("export", None),
    ],
)
def test_name_of_a_checkpoint_directory_tells_its_step(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_step_directory_sorts_as_numbers_do() -> None:
    assert step_directory(100) == "step_00000100"
    assert step_of(step_directory(10**9)) == 10**9


def test_description_holds_sizes_and_digests(tmp_path: Path) -> None:
    directory = _complete(tmp_path, 1)
    described = json.loads((directory / COMPLETE).read_text())
    digest = hashlib.sha256(b"weights").hexdigest()
    assert described == {"v": 1, "files": {"a.bin": {"size_bytes": 7, "sha256": digest}}}
    verify(directory, digests=True)


def test_digest_of_a_file_larger_than_a_chunk(tmp_path: Path) -> None:
    data = b"0123456789" * 150_000
    (tmp_path / "big").write_bytes(data)
    assert digest_file(tmp_path / "big") == hashlib.sha256(data).hexdigest()


def test_file_of_another_size_is_named_with_both_sizes(tmp_path: Path) -> None:
    directory = _complete(tmp_path, 1)
    (directory / "a.bin").write_bytes(b"weigh")
    with pytest.raises(CompletionError, match=r"a\.bin has 5 bytes, not 7"):
        verify(directory, digests=False)


def test_changed_byte_is_found_with_digests_alone(tmp_path: Path) -> None:
    directory = _complete(tmp_path, 1)
    (directory / "a.bin").write_bytes(b"Weights")
    verify(directory, digests=False)
    with pytest.raises(CompletionError, match="another sha256"):
        verify(directory, digests=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not readable"),
        ("[]", "not readable"),
        ('{"v": 1}', "not readable"),
        ('{"v": 1, "files": [1]}', "not readable"),
        ('{"v": 1, "files": {"a": {}}}', "not readable"),
        ('{"v": 3, "files": {}}', "has version 3"),
    ],
)
def test_unreadable_description_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    directory = _complete(tmp_path, 1)
    (directory / COMPLETE).write_text(text)
    with pytest.raises(CompletionError, match=told):
        verify(directory, digests=False)


def test_newest_complete_is_found_among_other_entries(tmp_path: Path) -> None:
    old, new = _complete(tmp_path, 9), _complete(tmp_path, 10)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "step_00000099").write_text("a file, not a directory")
    assert latest_complete(tmp_path) == (new, [])
    (new / "a.bin").unlink()
    path, skipped = latest_complete(tmp_path)
    assert path == old
    assert [(one.path, one.reason) for one in skipped] == [(new, "a.bin is missing")]


def test_only_damaged_ones_mean_none_with_every_reason(tmp_path: Path) -> None:
    (tmp_path / "step_00000003.partial").mkdir()
    (tmp_path / "step_00000002").mkdir()
    path, skipped = latest_complete(tmp_path)
    assert path is None
    assert [one.path.name for one in skipped] == ["step_00000003.partial", "step_00000002"]
