"""``python -m trainer prepare``: files of chats to a directory of tokenised shards.

Every slice of the input gives one shard, made by a worker process. What is finished is on disk
(``.work/``), so a run that was killed goes on when the same command is given again, and ends with
the same shards as one that was not; another input or option is refused with what has changed.
Memory does not grow with the input, but for a moment's 70 bytes a record to find duplicates.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.contract.durable import is_named, sync, write_by_rename
from trainer.data.chat import ChatEncoder
from trainer.data.dataset import load_tokenizer
from trainer.data.prepare_options import PrepareOptions
from trainer.data.progress import Progress
from trainer.data.provenance import Provenance, require_unchanged, settle
from trainer.data.shard_job import (
    Job,
    Recipe,
    bad_path,
    begin_worker,
    digests_path,
    find_duplicates,
    record_path,
    write_digests,
    write_shard,
)
from trainer.data.shards import (
    BAD_RECORDS,
    DATASET,
    INDEX,
    VERSION,
    WORK,
    content_digest,
    read_document,
    size_problem,
)
from trainer.data.sources import Source, slices
from trainer.errors import DataError


@dataclass(frozen=True)
class _Workers:
    """Processes that work on jobs; without a pool it is this one."""

    pool: Executor | None
    count: int


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Make the data set, or go on making it; returns the document of dataset.json.

    Raises: DataError saying what is wrong and what to do.
    """
    output = options.output
    try:
        _refuse_foreign(output)
        with _locked(output):
            return _prepare(options)
    except OSError as error:
        where = error.filename or output
        raise DataError(
            f"{where}: {error.strerror or error}; what is finished is kept: mend this, then run"
            " the same command again"
        ) from error
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed (out of memory?); what is finished is kept, run the same"
            " command again, perhaps with fewer --num-workers"
        ) from error


def _prepare(options: PrepareOptions) -> dict[str, Any]:
    output = options.output
    finished = read_document(output) if (output / DATASET).is_file() else None
    if finished is not None:  # a kill may have come just before its end
        shutil.rmtree(output / WORK)
    tokenizer = load_tokenizer(options.target, options.revision)
    origin = settle(options, tokenizer, finished)
    if finished is not None:
        return finished
    for name in ("shard-", BAD_RECORDS, DATASET):
        for left in output.glob(f".{name}*"):  # what a kill left half written
            left.unlink()
    recipe = Recipe(
        output,
        options.target,
        options.revision,
        options.max_length,
        options.truncation,
        options.thinking,
    )
    parts = slices(origin.sources, options.shard_samples)
    jobs = [Job(n, _bare(origin.sources[part.source]), part) for n, part in enumerate(parts)]
    count = min(options.num_workers or len(os.sched_getaffinity(0)), max(1, len(jobs)))
    with _started(count) as workers:
        if options.dedup:
            jobs = _without_duplicates(recipe, jobs, workers)
        shards = _make_shards(recipe, jobs, workers)
    require_unchanged(origin.sources)
    takes_thinking = ChatEncoder(tokenizer, options.max_length).takes_thinking
    return _finish(options, origin, shards, takes_thinking=takes_thinking)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the directory against a second prepare. Raises: DataError when one is at work."""
    path, is_ours = output / WORK / "lock", False
    while not is_ours:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(f"--output {output}: another trainer prepare is at work") from error
            is_ours = is_named(lock.fileno(), path)  # who held it removes it at its end
            if is_ours:
                yield


def _refuse_foreign(output: Path) -> None:
    """Never write among somebody's files."""
    for path in sorted(output.iterdir()) if output.is_dir() else ():
        name = path.name.removeprefix(".")
        if name not in (WORK[1:], DATASET, BAD_RECORDS) and not name.startswith(
            ("shard-", DATASET, BAD_RECORDS)
        ):
            raise DataError(f"--output {output} holds {path.name}; give a directory of its own")


def _bare(source: Source) -> Source:
    """Leave the offsets out of what is sent to a worker; its slice has its own."""
    return replace(source, starts=())


def _without_duplicates(recipe: Recipe, jobs: list[Job], workers: _Workers) -> list[Job]:
    """Return the jobs with the records that repeat an earlier one."""
    output, counts = recipe.output, [job.part.count for job in jobs]
    progress = Progress("compare", sum(counts), "records")
    todo = [job for job in jobs if not digests_path(output, job.number).is_file()]
    progress.skip(sum(counts) - sum(job.part.count for job in todo))
    for job, _ in _work(write_digests, recipe, todo, workers):
        progress.advance(job.part.count)
    found = find_duplicates(output, counts)
    return [
        replace(job, duplicates=repeats.astype(np.int32))
        for job, repeats in zip(jobs, found, strict=True)
    ]


def _make_shards(recipe: Recipe, jobs: list[Job], workers: _Workers) -> list[dict[str, Any]]:
    """Make the shards that are not finished yet; returns the records of all, in order."""
    shards = {job.number: _finished_shard(recipe.output, job.number) for job in jobs}
    todo = [job for job in jobs if shards[job.number] is None]
    total, left = sum(j.part.count for j in jobs), sum(j.part.count for j in todo)
    progress = Progress("tokenise", total, "records")
    progress.skip(total - left)
    num_bad = sum(shard["num_bad"] for shard in shards.values() if shard)
    for job, shard in _work(write_shard, recipe, todo, workers):
        shards[job.number] = shard
        num_bad += shard["num_bad"]
        progress.advance(job.part.count, f"{num_bad:,} bad")
    return [shard for _, shard in sorted(shards.items()) if shard is not None]


def _finished_shard(output: Path, number: int) -> dict[str, Any] | None:
    path = record_path(output, number)
    if not path.is_file():
        return None
    shard = dict(json.loads(path.read_text()))
    return None if size_problem(output, shard) else shard


@contextmanager
def _started(count: int) -> Iterator[_Workers]:
    """Yield worker processes; where one is enough, none but this one."""
    if count == 1:
        yield _Workers(None, 1)
        return
    # Processes are started anew, not forked: tokenizers and pyarrow hold threads and locks.
    pool = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=begin_worker
    )
    try:
        yield _Workers(pool, count)
    finally:
        pool.shutdown(cancel_futures=True)


def _work(
    job_work: Callable[[Recipe, Job], Any],
    recipe: Recipe,
    jobs: Sequence[Job],
    workers: _Workers,
) -> Iterator[tuple[Job, Any]]:
    """Yield (job, result) as they end; few jobs are in flight, so that little is in memory."""
    if workers.pool is None:
        for job in jobs:
            yield job, job_work(recipe, job)
        return
    waiting = deque(jobs)
    running: dict[Future[Any], Job] = {}
    while waiting or running:
        while waiting and len(running) < 2 * workers.count:
            job = waiting.popleft()
            running[workers.pool.submit(job_work, recipe, job)] = job
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            yield running.pop(future), future.result()


def _finish(
    options: PrepareOptions,
    origin: Provenance,
    shards: list[dict[str, Any]],
    *,
    takes_thinking: bool,
) -> dict[str, Any]:
    """Write bad.jsonl and, last, dataset.json; the work directory goes."""
    output = options.output
    totals = {
        key: sum(shard[key] for shard in shards)
        for key, value in (shards[0] if shards else {}).items()
        if isinstance(value, int)
    }
    _join_bad(output, len(shards))
    if not totals.get("num_samples"):
        raise DataError(
            f"no usable chat in {', '.join(map(str, options.inputs))}: {totals.get('num_bad', 0)}"
            f" bad records, see {output / BAD_RECORDS}"
        )
    content = {
        "options": origin.options,
        "tokenizer_sha256": origin.tokenizer_sha256,
        "template_sha256": origin.template_sha256,
        "takes_thinking": takes_thinking,
        "totals": totals,
        "lengths": _lengths(output, shards),
        "shards": shards,
    }
    made = {"target": options.target, "revision": options.revision, "provenance": asdict(origin)}
    digest = content_digest(content)
    document = {"v": VERSION, "sha256": digest, "content": content, "made": made}
    write_by_rename(output / DATASET, (json.dumps(document, indent=1) + "\n").encode())
    shutil.rmtree(output / WORK, ignore_errors=True)  # one that begins now may put its lock there
    return read_document(output)


def _join_bad(output: Path, num_shards: int) -> None:
    temporary = output / f".{BAD_RECORDS}.{os.getpid()}"
    with temporary.open("wb") as joined:
        for number in range(num_shards):
            with bad_path(output, number).open("rb") as part:
                shutil.copyfileobj(part, joined)
        joined.flush()
        os.fsync(joined.fileno())
    temporary.replace(output / BAD_RECORDS)
    sync(output)


def _lengths(output: Path, shards: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return percentiles of the samples' tokens."""
    parts = [np.zeros(0, np.int64)]
    for shard in shards:
        index = np.fromfile(output / f"{shard['name']}.index.bin", INDEX)
        parts.append(np.diff(index["end"], prepend=0))
    at = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = np.percentile(np.concatenate(parts), list(at.values()), method="nearest")
    return {name: int(value) for name, value in zip(at, found, strict=True)}


def report(document: dict[str, Any]) -> list[str]:
    """Return what a person should know of a prepared data set, a line each."""
    content = document["content"]
    totals, lengths = content["totals"], content["lengths"]
    samples, tokens = totals["num_samples"], totals["num_tokens"]
    trained = totals["num_trained"] / tokens
    thinking = totals["num_thinking"]
    lines = [
        f"{totals['num_records']:,} records -> {samples:,} samples, {tokens:,} tokens",
        (
            f"bad {totals['num_bad']:,} (in {BAD_RECORDS}), of them too long"
            f" {totals['num_too_long']:,}; duplicates {totals['num_duplicates']:,}"
        ),
        (
            f"cut at max_length {totals['num_cut']:,}; last answer alone trained"
            f" {totals['num_last_only']:,}; trained tokens {trained:.1%}"
        ),
        (
            f"tokens of a sample: median {lengths['p50']:,}, 90 % {lengths['p90']:,}, longest"
            f" {lengths['max']:,}"
        ),
        f"thinking on {thinking:,}, off {samples - thinking:,}",
        f"{len(content['shards'])} shards, sha256 {document['sha256']}",
    ]
    if content["takes_thinking"] and thinking in (0, samples):
        missing = "off" if thinking else "on"
        lines.append(
            f"warning: no sample with thinking {missing}, though the template has both; drafts"
            " collapse on what they never saw"
        )
    if not 0.02 <= trained <= 0.98:
        lines.append(f"warning: {trained:.1%} of the tokens are trained; look at the template")
    return lines
