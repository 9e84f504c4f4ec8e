"""A prepare that is killed and started again ends with the shards of one that nobody killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.prepare_kills import digest_directory, write_chats
from trainer.data.prepare import prepare
from trainer.data.prepare_options import PrepareOptions
from trainer.errors import DataError

NUM_RECORDS = 2000
# Prepares in children of its own, each of which kills itself when it is about to rename a file for
# the n-th time; then once to the end.
DRIVER = """
import os, signal, sys
from pathlib import Path
from trainer.data.dataset import load_tokenizer
from trainer.data.prepare import prepare
from trainer.data.prepare_options import PrepareOptions

source, output, target, *points = sys.argv[1:]
options = PrepareOptions((Path(source),), Path(output), target, max_length=400, shard_samples=50,
                         num_workers=1)
load_tokenizer(target)  # once for all children, which share what this has imported
for point in map(int, points):
    child = os.fork()
    if child == 0:
        renames = 0

        def kill(event, arguments):
            global renames
            if event != "os.rename":
                return
            renames += 1
            if renames == point:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        prepare(options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point
prepare(options)
"""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """2,000 chats in a file, and the lines of the 20 broken ones."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return path, write_chats(path, NUM_RECORDS)


@pytest.fixture(scope="module")
def whole(
    chats: tuple[Path, list[int]], target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory that nobody killed."""
    output = tmp_path_factory.mktemp("whole")
    prepare(
        PrepareOptions(
            (chats[0],), output, str(target), max_length=400, shard_samples=50, num_workers=1
        )
    )
    return output


def same(output: Path, whole: Path) -> bool:
    digests = {json.loads((p / "dataset.json").read_text())["sha256"] for p in (output, whole)}
    return len(digests) == 1 and digest_directory(output) == digest_directory(whole)


def test_broken_lines_of_a_large_file_are_all_listed(chats: tuple[Path, list[int]], whole: Path):
    found = [json.loads(line)["number"] for line in (whole / "bad.jsonl").read_text().splitlines()]
    assert found == chats[1]
    assert len(found) == 20


def test_shards_are_the_same_whenever_it_is_killed(
    chats: tuple[Path, list[int]], whole: Path, target: Path, tmp_path: Path
):
    # The renames of a whole run: 1 for what it is made from, 40 for digests, 5 for each of the 40
    # shards (ids, mask, index, bad records, facts), bad.jsonl and dataset.json. Killed about to do:
    # the first; a digest; the 30th digest; an index; a mask; bad records of shard 9; facts of
    # shard 28; ids of shard 35; dataset.json; bad.jsonl again.
    points = [1, 2, 30, 14, 7, 44, 100, 36, 27, 1]
    argv = [sys.executable, "-c", DRIVER, str(chats[0]), str(tmp_path / "out"), str(target)]
    done = subprocess.run([*argv, *map(str, points)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "out", whole)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in whole.iterdir()
    )


def test_workers_end_with_a_killed_parent_and_another_run_may_begin(target: Path, tmp_path: Path):
    chats, output = tmp_path / "chats.jsonl", tmp_path / "out"
    write_chats(chats, 20_000)  # many seconds of work, so that none of it ends before the kill
    argv = [sys.executable, "-m", "trainer", "prepare", "--input", str(chats)]
    argv += ["--output", str(output), "--target", str(target), "--max-length", "400"]
    argv += ["--shard-samples", "50", "--num-workers", "2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        while process.poll() is None and not any(output.glob(".work/*.digests")):
            time.sleep(0.005)
        assert process.poll() is None, (tmp_path / "log").read_text()
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = [int(child) for child in listed.read_text().split()]
    finally:
        process.kill()
        process.wait()
    assert len(children) >= 2
    while any(alive(child) for child in children):
        time.sleep(0.005)  # the time limit of the test ends this
    # Nobody holds the directory: the next run gets as far as to see what it belongs to.
    with pytest.raises(DataError, match=r"is half done .* --max-length was 400, is 300"):
        prepare(PrepareOptions((chats,), output, str(target), max_length=300, shard_samples=50))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
