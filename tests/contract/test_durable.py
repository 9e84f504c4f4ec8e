"""Files that matter are replaced whole or not at all."""

import resource
import signal
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


def test_a_disk_without_room_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    number, before = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(number, (1024, before[1]))
    try:
        with pytest.raises(OSError, match=r"a\.json") as caught:
            write_by_rename(path, b"new" * 1024)
    finally:
        resource.setrlimit(number, before)
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
