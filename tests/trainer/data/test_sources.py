"""Files of records: every record once, with its number, in whatever slices."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.trainer.data.conftest import chat, write_lines
from trainer.data.sources import Record, find_inputs, read_slice, scan, slices
from trainer.errors import DataError


def records(path: Path, kind: str, slice_records: int) -> list[Record]:
    source = scan(path, kind, slice_records, lambda _: None)
    return [
        record for part in slices([source], slice_records) for record in read_slice(source, part)
    ]


def questions(found: list[Record]) -> list[tuple[int, str]]:
    return [(r.number, r.chat.messages[0]["content"] if r.chat else r.reason) for r in found]


@pytest.mark.parametrize("slice_records", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("end", ["\n", ""])
def test_every_line_is_read_once_with_its_number(tmp_path: Path, slice_records: int, end: str):
    lines = [json.dumps(chat(f"q{i}", "a")) for i in range(5)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([lines[0], "", lines[1], "{half", *lines[2:]]) + end)
    found = questions(records(path, "jsonl", slice_records))
    assert [number for number, _ in found] == [1, 3, 4, 5, 6, 7]
    assert [text for _, text in found if not text.startswith("not JSON")] == [
        *("q0", "q1", "q2", "q3", "q4"),
    ]


def test_slices_begin_at_lines_in_a_file_of_many_chunks(tmp_path: Path):
    # 60 lines of 300 kB: a file of 18 MB, read in chunks of 8 MiB
    path = write_lines(tmp_path / "chats.jsonl", [chat(f"q{i}", "a" * 300_000) for i in range(60)])
    assert questions(records(path, "jsonl", 7)) == [(i + 1, f"q{i}") for i in range(60)]


def test_line_that_is_no_chats_length_is_passed_over(tmp_path: Path):
    path = write_lines(tmp_path / "chats.jsonl", ["x" * (40 << 20), chat("q", "a")])
    assert questions(records(path, "jsonl", 10)) == [(1, "a line of more than 16 MiB"), (2, "q")]


def table(count: int) -> Any:
    rows = [chat(f"q{i}", "a") | {"id": i} for i in range(count)]
    rows[3]["messages"] = None
    return pyarrow.Table.from_pylist(rows)


@pytest.mark.parametrize("slice_records", [1, 4, 7, 100])
def test_rows_of_parquet_are_read_once_across_row_groups(tmp_path: Path, slice_records: int):
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(table(10), path, row_group_size=3)
    found = questions(records(path, "parquet", slice_records))
    wanted = [(i + 1, f"q{i}") for i in range(10)]
    wanted[3] = (4, 'no list "messages" or "conversations"')
    assert found == wanted


def save_to_disk(directory: Path, tables: list[Any]) -> None:
    """Write what ``datasets.Dataset.save_to_disk`` does."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, one in zip(names, tables, strict=True):
        with pyarrow.ipc.new_stream(str(directory / name), one.schema) as stream:
            stream.write_table(one, max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (directory / "state.json").write_text(json.dumps(state))


def test_hugging_face_data_set_on_disk_is_read_in_the_order_it_was_saved(tmp_path: Path):
    save_to_disk(tmp_path / "saved" / "train", [table(10), table(5)])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = find_inputs([tmp_path / "saved"])
    assert [path.name for path, _ in found] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]
    path, kind = found[0]
    rows = questions(records(path, kind, 4))
    assert [number for number, _ in rows] == list(range(1, 11))
    assert [text for _, text in rows][4:] == ["q4", "q5", "q6", "q7", "q8", "q9"]


def test_data_set_of_several_splits_asks_for_one(tmp_path: Path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(DataError, match="holds the splits a, b; give one of them"):
        find_inputs([tmp_path])


def test_directory_gives_its_files_by_name(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "sub/c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [(path.name, kind) for path, kind in find_inputs([tmp_path])]
    assert found == [("a.jsonl", "jsonl"), ("b.jsonl", "jsonl"), ("c.parquet", "parquet")]


def test_input_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "chats.jsonl.gz").touch()
    (tmp_path / "empty").mkdir()
    path = write_lines(tmp_path / "fake.parquet", ["no parquet"])
    with pytest.raises(DataError, match=r"gone: no such file or directory"):
        find_inputs([tmp_path / "gone"])
    with pytest.raises(
        DataError, match=r"unknown kind of file '.gz'; known are .*unpack .gz first"
    ):
        find_inputs([tmp_path / "chats.jsonl.gz"])
    with pytest.raises(DataError, match=r"empty holds no .jsonl, .ndjson, .parquet file"):
        find_inputs([tmp_path / "empty"])
    with pytest.raises(DataError, match="is given twice"):
        find_inputs([path, tmp_path / "empty" / ".." / "fake.parquet"])
    with pytest.raises(DataError, match=r"fake.parquet is no parquet file"):
        scan(path, "parquet", 4, lambda _: None)


@pytest.mark.parametrize("name", ["chats.parquet", "data.arrow"])
def test_tables_without_pyarrow_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    (tmp_path / name).touch()
    ((path, kind),) = find_inputs([tmp_path / name])
    with pytest.raises(DataError, match=rf"{name}: reading .{kind} needs pyarrow; install it with"):
        scan(path, kind, 4, lambda _: None)
