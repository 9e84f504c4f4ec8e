"""Files that matter are replaced whole or not at all."""

from pathlib import Path

import pytest

from trainer.contract.durable import write_by_rename


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    write_by_rename(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(OSError, match=r"a\.json"):
        write_by_rename(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "inside").exists()


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_by_rename(tmp_path / "none" / "a.json", b"new")
