"""Tokenised samples on disk: how ``trainer prepare`` writes shards and how training reads them.

A prepared directory holds, a shard, ``shard-00000.ids.bin`` (int32), ``.mask.bin`` (uint8, 0 or 1)
and ``.index.bin`` (a record of ``INDEX`` a sample), all little-endian, and as the last file
``dataset.json``, whose ``content`` lists every shard with the sha256 of its files; ``sha256`` is
the digest of ``content`` and so of all. Shards are mapped into memory when a sample is asked for.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from trainer.contract.completion import digest_file
from trainer.contract.durable import sync
from trainer.data.anchors import valid_anchors
from trainer.data.chat import Encoded
from trainer.data.dataset import (
    BadLine,
    Dataset,
    Sample,
    load_chats,
    mask_token_error,
    template_digest,
    tokenizer_digest,
)
from trainer.errors import DataError

VERSION = 1
DATASET = "dataset.json"
BAD_RECORDS = "bad.jsonl"
WORK = ".work"  # what an unfinished prepare needs; gone when dataset.json is there
PARTS = ("ids", "mask", "index")
# end: tokens of the shard up to and with the sample. record, source: where it came from (from 1;
# index in the inputs). trained, anchors: its trained tokens and places where a block may start.
INDEX = np.dtype(
    [
        ("end", "<i8"),
        ("record", "<i8"),
        ("source", "<i4"),
        ("trained", "<i4"),
        ("anchors", "<i4"),
        ("flags", "<i4"),
    ]
)
THINKING, CUT, LAST_ONLY = 1, 2, 4  # bits of ``flags``
TOTALS = (
    "num_samples",
    "num_tokens",
    "num_trained",
    "num_anchors",
    "num_thinking",
    "num_cut",
    "num_last_only",
)
_OPEN_SHARDS = 16  # mapped at one time; two file descriptors each
_MAX_THREADS = 8


def shard_name(number: int) -> str:
    """Return the name that the files of a shard begin with."""
    return f"shard-{number:05d}"


def content_digest(content: dict[str, Any]) -> str:
    """Return the digest of a data set: the sha256 of its ``content`` as canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class ShardWriter:
    """Writes one shard, sample by sample; its files appear whole, or not at all.

    A context: without ``finish`` nothing stays.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._temporary = {part: directory / f".{name}.{part}.bin.{os.getpid()}" for part in PARTS}
        self._streams = {part: path.open("wb") for part, path in self._temporary.items()}
        self._digests = {part: hashlib.sha256() for part in PARTS}
        self.totals = dict.fromkeys(TOTALS, 0)  # of the samples added so far

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in PARTS:
            self._streams[part].close()
            self._temporary[part].unlink(missing_ok=True)

    def add(self, encoded: Encoded, record: int, source: int, *, thinking: bool) -> None:
        """Append a sample that came from ``record`` (from 1) of input ``source``."""
        length = len(encoded.input_ids)
        anchors = valid_anchors(encoded.loss_mask, np.zeros(length, np.int32))
        flags = THINKING * thinking | CUT * encoded.cut | LAST_ONLY * encoded.last_only
        added = {
            "num_samples": 1,
            "num_tokens": length,
            "num_trained": int(encoded.loss_mask.sum()),
            "num_anchors": int(anchors.sum()),
            "num_thinking": int(thinking),
            "num_cut": int(encoded.cut),
            "num_last_only": int(encoded.last_only),
        }
        for key, value in added.items():
            self.totals[key] += value
        entry = np.zeros(1, INDEX)
        entry["end"], entry["record"], entry["source"] = self.totals["num_tokens"], record, source
        entry["trained"], entry["anchors"] = added["num_trained"], added["num_anchors"]
        entry["flags"] = flags
        self._write("ids", encoded.input_ids.astype("<i4").tobytes())
        self._write("mask", encoded.loss_mask.astype(np.uint8).tobytes())
        self._write("index", entry.tobytes())

    def finish(self) -> dict[str, dict[str, Any]]:
        """Put the files in place, each synced; returns their sizes and digests."""
        for part in PARTS:
            self._streams[part].flush()
            os.fsync(self._streams[part].fileno())
            self._temporary[part].replace(self._directory / f"{self._name}.{part}.bin")
        sync(self._directory)
        return {
            part: {"size_bytes": self._streams[part].tell(), "sha256": state.hexdigest()}
            for part, state in self._digests.items()
        }

    def _write(self, part: str, data: bytes) -> None:
        self._streams[part].write(data)
        self._digests[part].update(data)


def size_problem(directory: Path, shard: dict[str, Any]) -> str | None:
    """Say which file of a shard is missing or of another size than was written."""
    for part, fact in shard["files"].items():
        path = directory / f"{shard['name']}.{part}.bin"
        if not path.is_file():
            return f"{path.name} is missing"
        size = path.stat().st_size
        if size != fact["size_bytes"]:
            return f"{path.name} has {size} bytes instead of {fact['size_bytes']}"
    return None


def read_document(directory: Path) -> dict[str, Any]:
    """Read dataset.json of a prepared directory and check it against itself and the files' sizes.

    Raises: DataError saying what is wrong and what to do.
    """
    path = directory / DATASET
    if not path.is_file():
        told = f"{directory} is a directory without {DATASET}"
        if (directory / WORK).is_dir():
            told = f"{directory}: trainer prepare has not finished; run the same command again"
        raise DataError(told)
    try:
        document = dict(json.loads(path.read_text(encoding="utf-8")))
        content, version = document["content"], document["v"]
        found = content_digest(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no data set of trainer prepare ({error!r})") from error
    if version != VERSION:
        raise DataError(f"{path} is of version {version!r}, not {VERSION}; prepare it again")
    if found != document["sha256"]:
        raise DataError(f"{path} was changed after trainer prepare wrote it; prepare it again")
    for shard in content["shards"]:
        problem = size_problem(directory, shard)
        if problem:
            raise DataError(f"{directory}: {problem}; copy the directory anew or prepare it again")
    return document


class ShardDataset:
    """The samples of a prepared directory, read when they are indexed.

    In memory lie 16 bytes a sample. Safe to share between threads.
    Raises (constructor): DataError, see ``read_document``.
    """

    def __init__(self, directory: Path) -> None:
        document = read_document(directory)
        self._directory = directory
        self.content: dict[str, Any] = document["content"]
        self.sha256 = str(document["sha256"])
        self.path = str(directory)
        self._names = [str(shard["name"]) for shard in self.content["shards"]]
        counts = [int(shard["num_samples"]) for shard in self.content["shards"]]
        self._firsts = np.concatenate([[0], np.cumsum(counts)])  # sample ids, [shards + 1]
        ends = [self._index(number)["end"].copy() for number in range(len(self._names))]
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])
        self._lengths = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(e, prepend=0) for e in ends)]
        )
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    @property
    def samples(self) -> Sequence[Sample]:
        """All samples; each index reads one."""
        return _Samples(len(self._lengths), self._sample)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Shapes: [samples]."""
        return self._lengths

    @property
    def num_bad(self) -> int:
        """How many records gave no sample."""
        return int(self.content["totals"]["num_bad"])

    @cached_property
    def bad_lines(self) -> tuple[BadLine, ...]:
        """The records of bad.jsonl."""
        try:
            lines = (self._directory / BAD_RECORDS).read_bytes().splitlines()
        except FileNotFoundError:  # a list for people; training does not need it
            return ()
        told = [json.loads(line) for line in lines]
        return tuple(BadLine(one["number"], one["reason"], one["file"]) for one in told)

    def check_run(self, tokenizer: Any, max_length: int) -> None:
        """Raise DataError when the data was prepared for another tokenizer, template or length."""
        wanted = {
            "tokenizer_sha256": ("tokenizer", tokenizer_digest),
            "template_sha256": ("chat template", template_digest),
        }
        for key, (what, digest) in wanted.items():
            found = digest(tokenizer)
            if found != self.content[key]:
                raise DataError(
                    f"data.path {self.path} was prepared with another {what} than the target's"
                    f" ({self.content[key][:12]}, the target has {found[:12]}); run trainer prepare"
                    " with this target"
                )
        prepared = self.content["options"]["max_length"]
        if prepared != max_length:
            raise DataError(
                f"data.max_length is {max_length}, but data.path {self.path} was prepared with"
                f" --max-length {prepared}; set data.max_length to {prepared} or prepare it again"
            )

    def verify(self) -> None:
        """Read every shard and compare its digests. Raises: DataError naming the file."""

        def problem(shard: dict[str, Any]) -> str | None:
            for part, fact in shard["files"].items():
                path = self._file(shard["name"], part)
                if digest_file(path) != fact["sha256"]:
                    return f"{path} holds other bytes than trainer prepare wrote"
            return None

        for found in self._in_threads(problem, self.content["shards"]):
            if found:
                raise DataError(f"{found}; copy the directory anew or prepare it again")

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise DataError when the mask token occurs in a sample: the draft could not tell them."""

        def first(number: int) -> int | None:
            if self._firsts[number] == self._firsts[number + 1]:
                return None
            found = np.flatnonzero(self._map(number)[0] == mask_token_id)
            return int(found[0]) if len(found) else None

        numbers = range(len(self._names))
        for number, at in zip(numbers, self._in_threads(first, numbers), strict=True):
            if at is not None:
                inside = slice(self._firsts[number], self._firsts[number + 1])
                sample = inside.start + int(np.searchsorted(self._ends[inside], at, side="right"))
                raise mask_token_error(self.path, self._sample(int(sample)), mask_token_id)

    def _in_threads(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Hashing and comparing let go of the interpreter's lock."""
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            yield from pool.map(work, items)

    def _file(self, name: str, part: str) -> Path:
        return self._directory / f"{name}.{part}.bin"

    def _index(self, number: int) -> npt.NDArray[Any]:
        return np.fromfile(self._file(self._names[number], "index"), INDEX)

    def _map(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        name = self._names[number]
        ids = np.memmap(self._file(name, "ids"), "<i4", mode="r")
        return ids, np.memmap(self._file(name, "mask"), np.uint8, mode="r")

    def _sample(self, sample_id: int) -> Sample:
        number = int(np.searchsorted(self._firsts, sample_id, side="right")) - 1
        ids, mask = self._open(number)
        end = int(self._ends[sample_id])
        part = slice(end - int(self._lengths[sample_id]), end)
        # Copies: what is kept for long must not keep a mapping alive.
        return Sample(sample_id, ids[part].astype(np.int32), mask[part].astype(np.bool_))


class _Samples(Sequence[Sample]):
    """A sequence of samples that are read one by one."""

    def __init__(self, count: int, read: Callable[[int], Sample]) -> None:
        self._ids, self._read = range(count), read

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...

    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        if isinstance(index, slice):
            return tuple(self._read(sample_id) for sample_id in self._ids[index])
        return self._read(self._ids[index])


def open_dataset(path: str | Path, tokenizer: Any, max_length: int) -> Dataset:
    """Open the data of a run: a JSONL file of chats, or a directory of trainer prepare.

    Every byte of a directory is compared with its digest. Raises: DataError when it is missing,
    damaged, or made for another tokenizer, template or max_length.
    """
    if not Path(path).is_dir():
        return load_chats(path, tokenizer, max_length)
    dataset = ShardDataset(Path(path))
    dataset.check_run(tokenizer, max_length)
    dataset.verify()
    return dataset
