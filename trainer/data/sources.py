"""Files of chats as numbered records: JSON Lines, Parquet, a Hugging Face data set on disk.

A source is cut into slices of a fixed number of records; a slice is read by itself, in constant
memory, so that slices can be worked on in any order and again after a kill. Parquet and Arrow need
pyarrow, which is asked for only when such a file is given.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.contract.completion import digest_file
from trainer.data.chat import BadRecordError, Chat, parse_line, parse_record
from trainer.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_CHUNK_BYTES = 8 << 20
_MAX_LINE_BYTES = 16 << 20
_TABLE_ROWS = 256  # rows of a table that exist at one time
_EXCERPT_CHARACTERS = 200
# What a record is made of; the other columns of a table are not read.
_COLUMNS = ("messages", "conversations", "system", "tools", "truncated", "enable_thinking")
_NEWLINE = 10

Progress = Callable[[int], None]  # called with the bytes that were read


@dataclass(frozen=True)
class Source:
    """One input file as it was found.

    kind: jsonl, parquet or arrow. num_records: lines (blank ones too) or rows. starts: byte offsets
    of the slices of a JSONL file.
    """

    path: str
    kind: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    num_records: int
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slice:
    """``count`` records of a source from ``first`` (0-based); ``offset``: its byte, for JSONL."""

    source: int
    first: int
    count: int
    offset: int = 0


@dataclass(frozen=True)
class Record:
    """A record's number in its file, from 1, and its chat or the reason why there is none."""

    number: int
    chat: Chat | None
    reason: str = ""
    excerpt: str = ""


def find_inputs(inputs: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return (file, kind) of every input, those of a directory in the order of their names.

    Raises: DataError naming an input that is missing, of an unknown kind or empty of files.
    """
    found: list[tuple[Path, str]] = []
    for path in inputs:
        if path.is_dir():
            found += _in_directory(path)
        elif path.is_file():
            found.append((path, _kind(path)))
        else:
            raise DataError(f"--input {path}: no such file or directory")
    names = [path.resolve() for path, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"--input: {name} is given twice")
    return found


def scan(path: Path, kind: str, slice_records: int, progress: Progress) -> Source:
    """Read a file once: its digest, its number of records, and where the slices begin.

    Raises: DataError when it cannot be read as its kind.
    """
    try:
        stat = path.stat()
        if kind == "jsonl":
            sha256, lines, starts = _scan_lines(path, slice_records, progress)
            return Source(str(path), kind, stat.st_size, stat.st_mtime_ns, sha256, lines, starts)
        sha256 = digest_file(path)
        progress(stat.st_size)
        rows = _open_table(path, kind).num_rows
        return Source(str(path), kind, stat.st_size, stat.st_mtime_ns, sha256, rows)
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror or error}") from error


def slices(sources: Sequence[Source], slice_records: int) -> list[Slice]:
    """Return the slices of all sources, in order; a slice never spans two files."""
    return [
        Slice(
            number,
            first,
            min(slice_records, source.num_records - first),
            source.starts[first // slice_records] if source.starts else 0,
        )
        for number, source in enumerate(sources)
        for first in range(0, source.num_records, slice_records)
    ]


def read_slice(source: Source, part: Slice) -> Iterator[Record]:
    """Yield the records of a slice; blank lines are passed over."""
    if source.kind == "jsonl":
        yield from _read_lines(source, part)
        return
    table = _open_table(Path(source.path), source.kind)
    for number, row in enumerate(table.rows(part.first, part.count), part.first + 1):
        try:
            yield Record(number, parse_record(row))
        except BadRecordError as error:
            yield Record(number, None, str(error), _excerpt(json.dumps(row, default=str)))


def _in_directory(directory: Path) -> list[tuple[Path, str]]:
    if (directory / "dataset_dict.json").is_file():
        splits = json.loads((directory / "dataset_dict.json").read_text()).get("splits", [])
        if len(splits) != 1 and "train" not in splits:
            raise DataError(
                f"--input {directory} holds the splits {', '.join(splits)}; give one of them:"
                f" --input {directory}/SPLIT"
            )
        return _in_directory(directory / (splits[0] if len(splits) == 1 else "train"))
    if (directory / "state.json").is_file():
        state = json.loads((directory / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise DataError(f"--input {directory}: a selection of rows; save it flattened")
        return [(directory / one["filename"], "arrow") for one in state["_data_files"]]
    suffixes = (*JSONL_SUFFIXES, ".parquet")
    found = sorted(p for p in directory.rglob("*") if p.is_file() and p.suffix in suffixes)
    if not found:
        raise DataError(f"--input {directory} holds no {', '.join(suffixes)} file")
    return [(path, _kind(path)) for path in found]


def _kind(path: Path) -> str:
    if path.suffix in JSONL_SUFFIXES:
        return "jsonl"
    if path.suffix in (".parquet", ".arrow"):
        return path.suffix[1:]
    raise DataError(
        f"--input {path}: unknown kind of file {path.suffix!r}; known are"
        f" {', '.join(JSONL_SUFFIXES)}, .parquet, .arrow and directories of them (unpack .gz first)"
    )


def _scan_lines(
    path: Path, slice_records: int, progress: Progress
) -> tuple[str, int, tuple[int, ...]]:
    """Return (sha256, lines, byte offset of every slice)."""
    state = hashlib.sha256()
    lines = position = 0
    starts = [0]
    ended = True
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
            # The line after end number k begins a slice when k + 1 lines lie before it.
            first = slice_records - 1 - lines % slice_records
            starts += (position + 1 + ends[first::slice_records]).tolist()
            lines += len(ends)
            position += len(chunk)
            ended = chunk.endswith(b"\n")
            progress(len(chunk))
    lines += not ended
    return state.hexdigest(), lines, tuple(starts[: -(-lines // slice_records)])


def _read_lines(source: Source, part: Slice) -> Iterator[Record]:
    with Path(source.path).open("rb") as stream:
        stream.seek(part.offset)
        for number in range(part.first + 1, part.first + part.count + 1):
            line = stream.readline(_MAX_LINE_BYTES + 1)
            if len(line) > _MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_CHUNK_BYTES)
                yield Record(number, None, f"a line of more than {_MAX_LINE_BYTES >> 20} MiB")
                continue
            if not line.strip():
                continue
            try:
                yield Record(number, parse_line(line))
            except BadRecordError as error:
                text = line.decode(errors="replace").rstrip("\r\n")
                yield Record(number, None, str(error), _excerpt(text))


def _excerpt(text: str) -> str:
    return text[:_EXCERPT_CHARACTERS]


class _ParquetTable:
    """Rows of a Parquet file, read a few at a time."""

    def __init__(self, path: Path, parquet: Any) -> None:
        self._file = parquet.ParquetFile(path, buffer_size=1 << 20)
        self.num_rows = int(self._file.metadata.num_rows)
        self._columns = [name for name in self._file.schema_arrow.names if name in _COLUMNS]

    def rows(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield ``count`` rows from ``first``; what lies before them in a row group is decoded."""
        metadata, begin = self._file.metadata, 0
        groups: list[int] = []
        skip = first
        for group in range(metadata.num_row_groups):
            end = begin + metadata.row_group(group).num_rows
            if begin < first + count and end > first:
                skip = first - begin if not groups else skip
                groups.append(group)
            begin = end
        for batch in self._file.iter_batches(_TABLE_ROWS, groups, self._columns):
            wanted = batch.slice(min(skip, batch.num_rows), count)
            skip = max(0, skip - batch.num_rows)
            count -= wanted.num_rows
            yield from wanted.to_pylist()
            if count == 0:
                return


class _ArrowTable:
    """Rows of an Arrow stream (what ``datasets`` saves), mapped into memory."""

    def __init__(self, path: Path, arrow: Any) -> None:
        table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
        self._table = table.select([name for name in table.column_names if name in _COLUMNS])
        self.num_rows = int(self._table.num_rows)

    def rows(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield ``count`` rows from ``first``."""
        for begin in range(first, first + count, _TABLE_ROWS):
            part = self._table.slice(begin, min(_TABLE_ROWS, first + count - begin))
            yield from part.to_pylist()


def _open_table(path: Path, kind: str) -> _ParquetTable | _ArrowTable:
    try:
        import pyarrow  # noqa: PLC0415 - an optional package
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            f"--input {path}: reading .{kind} needs pyarrow; install it with:"
            " pip install 'dflashctl[data]' (or: pip install pyarrow)"
        ) from error
    try:
        if kind == "parquet":
            return _ParquetTable(path, pyarrow.parquet)
        return _ArrowTable(path, pyarrow)
    except pyarrow.ArrowException as error:
        raise DataError(f"--input {path} is no {kind} file: {error}") from error
