"""What a worker process of ``trainer prepare`` does: the digests of a slice, or its shard.

Both are pure functions of the slice and the recipe, so a worker that is killed costs its slice and
nothing else, and shards come out the same in whatever order and however often they are made.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.durable import write_by_rename
from trainer.data.chat import BadRecordError, ChatEncoder, TooLongError, variants
from trainer.data.dataset import load_tokenizer
from trainer.data.shards import WORK, ShardWriter, shard_name
from trainer.data.sources import Record, Slice, Source, read_slice

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Recipe:
    """What decides how a chat becomes samples, and where they go."""

    output: Path
    target: str
    revision: str | None
    max_length: int
    truncation: str
    thinking: str


@dataclass(frozen=True)
class Job:
    """One shard to make: ``number``, its slice of ``source``, and the records to leave out.

    Shapes: duplicates [records left out], from 0 in the slice.
    """

    number: int
    source: Source
    part: Slice
    duplicates: npt.NDArray[np.int32] | None = None


def begin_worker() -> None:
    """Prepare a worker process: it ends with its parent, however that one ends.

    A worker holds both ends of the pipe it waits on, so without this a killed parent would leave it
    waiting for ever. Ctrl-C reaches the whole group; the parent decides what it means.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def digests_path(output: Path, number: int) -> Path:
    """Return where the content digests of a slice lie: 16 bytes a record, 0 for one without."""
    return output / WORK / f"{number:05d}.digests"


def write_digests(recipe: Recipe, job: Job) -> None:
    """Write the content digest of every record of the slice that holds a chat."""
    found = np.zeros((job.part.count, _DIGEST_BYTES), np.uint8)
    for record in read_slice(job.source, job.part):
        if record.chat is not None:
            chats = variants(record.chat, recipe.thinking)
            state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            for chat in chats:
                state.update(chat.digest())
            found[record.number - job.part.first - 1] = np.frombuffer(state.digest(), np.uint8)
    write_by_rename(digests_path(recipe.output, job.number), found.tobytes())


def find_duplicates(output: Path, counts: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Return, a slice, which of its records (from 0) repeat an earlier one.

    Needs about 70 bytes a record while it runs. ``counts``: records of each slice.
    """
    if not counts:
        return []
    parts = [np.fromfile(digests_path(output, n), "<u8") for n in range(len(counts))]
    pairs = np.concatenate(parts).reshape(-1, 2)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: of equal ones the first stays first
    repeats = np.zeros(len(pairs), np.bool_)
    repeats[order[1:]] = (pairs[order[1:]] == pairs[order[:-1]]).all(axis=1)
    repeats &= pairs.any(axis=1)
    return [np.flatnonzero(part) for part in np.split(repeats, np.cumsum(counts)[:-1])]


def record_path(output: Path, number: int) -> Path:
    """Return where the facts of a finished shard lie until all are finished."""
    return output / WORK / f"{shard_name(number)}.json"


def bad_path(output: Path, number: int) -> Path:
    """Return where the bad records of a shard lie until all are finished."""
    return output / WORK / f"{shard_name(number)}.bad.jsonl"


def write_shard(recipe: Recipe, job: Job) -> dict[str, Any]:
    """Make one shard and, last of all, the record that says that it is finished; returns that."""
    encoder = _encoder(recipe.target, recipe.revision, recipe.max_length, recipe.truncation)
    told: Counter[str] = Counter(num_records=0, num_bad=0, num_too_long=0, num_duplicates=0)
    bad: list[bytes] = []
    repeats = set() if job.duplicates is None else set(job.duplicates.tolist())
    with ShardWriter(recipe.output, shard_name(job.number)) as writer:
        for record in read_slice(job.source, job.part):
            told["num_records"] += 1
            if record.number - job.part.first - 1 in repeats:
                told["num_duplicates"] += 1
                continue
            problem = _add(writer, encoder, record, (recipe, job))
            if problem is not None:
                told["num_bad"] += 1
                told["num_too_long"] += isinstance(problem, TooLongError)
                bad.append(_bad_line(job.source, record, problem))
        files = writer.finish()
    write_by_rename(bad_path(recipe.output, job.number), b"".join(bad))
    shard = {"name": shard_name(job.number), **told, **writer.totals, "files": files}
    write_by_rename(record_path(recipe.output, job.number), json.dumps(shard).encode())
    return shard


def _add(
    writer: ShardWriter, encoder: ChatEncoder, record: Record, place: tuple[Recipe, Job]
) -> BadRecordError | None:
    """Add all samples of a record, or none and return why."""
    recipe, job = place
    if record.chat is None:
        return BadRecordError(record.reason)
    try:
        chats = variants(record.chat, recipe.thinking)
        made = [(encoder.encode(chat), chat.thinking) for chat in chats]
    except BadRecordError as error:
        return error
    for encoded, thinking in made:
        writer.add(encoded, record.number, job.part.source, thinking=thinking)
    return None


def _bad_line(source: Source, record: Record, problem: BadRecordError) -> bytes:
    told = {"file": source.path, "number": record.number, "reason": str(problem)}
    if record.excerpt:
        told["excerpt"] = record.excerpt
    return (json.dumps(told) + "\n").encode()


@lru_cache(maxsize=1)
def _encoder(target: str, revision: str | None, max_length: int, truncation: str) -> ChatEncoder:
    tokenizer = load_tokenizer(target, revision)
    return ChatEncoder(tokenizer, max_length, drop_longer=truncation == "drop")
