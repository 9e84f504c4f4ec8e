"""Reading prepared shards: lazily, the right sample, and only for the run they were made for."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashctl.remote import program
from tests.trainer.data.conftest import chat, make_tokenizer, write_lines
from trainer.data.dataset import Sample, load_chats
from trainer.data.prepare import prepare
from trainer.data.prepare_options import PrepareOptions
from trainer.data.shards import INDEX, THINKING, ShardDataset, content_digest, open_dataset
from trainer.errors import DataError

END = 257


@pytest.fixture
def prepared(tmp_path: Path, options: Callable[..., PrepareOptions]) -> Path:
    """Thirty chats in ten shards; the sixth shard holds none, its records are broken."""
    records: list[Any] = [chat(f"question {i}", "answer " + "y" * i) for i in range(30)]
    records[15:15] = ["{half"] * 3
    path = write_lines(tmp_path / "chats.jsonl", records)
    return prepare_here(options(path, shard_samples=3))


def prepare_here(options: PrepareOptions) -> Path:
    prepare(options)
    return options.output


def flat(samples: Any) -> list[tuple[int, list[int], list[bool]]]:
    return [(s.sample_id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples]


def test_samples_are_the_same_in_any_order_and_from_any_thread(prepared: Path, tmp_path: Path):
    wanted = flat(load_chats(tmp_path / "chats.jsonl", make_tokenizer(), 200).samples)
    dataset = ShardDataset(prepared)
    assert flat(dataset.samples) == wanted
    assert flat(dataset.samples[28:3:-7]) == wanted[28:3:-7]
    assert flat([dataset.samples[-1]]) == wanted[-1:]
    with pytest.raises(IndexError):
        dataset.samples[30]
    found: dict[int, Sample] = {}

    def read(first: int) -> None:
        for number in np.random.default_rng(first).permutation(range(first, 30, 4)).tolist():
            found[number] = dataset.samples[number]

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flat(found[number] for number in range(30)) == wanted


def test_index_says_where_each_sample_came_from(
    tmp_path: Path, options: Callable[..., PrepareOptions], thinking_target: Path
):
    first = write_lines(tmp_path / "a.jsonl", ["{half", chat("q", "abc")])
    second = write_lines(tmp_path / "b.jsonl", [chat("r", "de", reasoning_content="why")])
    made = options(first, second, target=str(thinking_target), thinking="both")
    index = np.concatenate(
        [np.fromfile(path, INDEX) for path in sorted(prepare_here(made).glob("*.index.bin"))]
    )
    assert index["source"].tolist() == [0, 1, 1]
    assert index["record"].tolist() == [2, 1, 1]
    # abc<e> ; why</think>de<e> ; de<e>
    assert index["trained"].tolist() == [4, 14, 3]
    assert index["anchors"].tolist() == [3, 13, 2]
    assert index["flags"].tolist() == [0, THINKING, 0]


def test_reading_many_shards_keeps_few_of_them_open(tmp_path: Path, options: Any):
    path = write_lines(tmp_path / "chats.jsonl", [chat(f"q {i}", "yes") for i in range(80)])
    dataset = ShardDataset(prepare_here(options(path, shard_samples=1)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert len(list(dataset.samples)) == 80
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * 16


def test_mask_token_in_a_shard_is_refused_with_its_sample_and_place(prepared: Path):
    dataset = ShardDataset(prepared)
    dataset.check_mask_token(255)
    only_in_21 = write_token(prepared, 21, 9, 250)
    assert only_in_21.sample_id == 21
    with pytest.raises(
        DataError, match=r"out: sample 21 holds draft\.mask_token_id 250 at token 9"
    ):
        ShardDataset(prepared).check_mask_token(250)


def write_token(prepared: Path, sample_id: int, at: int, token: int) -> Sample:
    """Overwrite one token of a sample in its shard; returns the sample as it was."""
    dataset = ShardDataset(prepared)
    # shards of three records; the sixth (number 5) is empty
    shard = sample_id // 3 + (sample_id >= 15)
    before = int(dataset.lengths[sample_id // 3 * 3 : sample_id].sum())
    ids = np.memmap(prepared / f"shard-{shard:05d}.ids.bin", "<i4", mode="r+")
    sample = dataset.samples[sample_id]
    ids[before + at] = token
    ids.flush()
    return sample


def test_open_dataset_takes_a_directory_or_a_file(prepared: Path, tmp_path: Path):
    shards = open_dataset(prepared, make_tokenizer(), 200)
    chats = open_dataset(tmp_path / "chats.jsonl", make_tokenizer(), 200)
    assert flat(shards.samples) == flat(chats.samples)
    assert shards.num_bad == chats.num_bad == 3
    assert str(shards.bad_lines[0]).startswith(f"{tmp_path}/chats.jsonl:16: not JSON")


def test_data_of_another_tokenizer_template_or_length_is_refused_by_name(prepared: Path):
    other = make_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(DataError, match="was prepared with another tokenizer than the target's"):
        open_dataset(prepared, other, 200)
    reworded = make_tokenizer()
    reworded.chat_template = str(reworded.chat_template) + "!"
    with pytest.raises(DataError, match="was prepared with another chat template than"):
        open_dataset(prepared, reworded, 200)
    told = r"data.max_length is 300, but .* was prepared with --max-length 200; set data.max_length"
    with pytest.raises(DataError, match=told):
        open_dataset(prepared, make_tokenizer(), 300)


def test_changed_shard_of_the_same_size_is_named_when_training_opens_it(prepared: Path):
    write_token(prepared, 4, 0, END)
    with pytest.raises(DataError, match=r"shard-00001.ids.bin holds other bytes than trainer prep"):
        open_dataset(prepared, make_tokenizer(), 200)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def forge(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_bad": 3', '"num_bad": 4'))


DAMAGE: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("shard-00002.ids.bin", shorten, "shard-00002.ids.bin has .* bytes instead of", "not whole"),
    ("shard-00002.mask.bin", Path.unlink, "shard-00002.mask.bin is missing", "not whole"),
    ("dataset.json", forge, "dataset.json was changed after trainer prepare", "was changed after"),
    ("dataset.json", shorten, "dataset.json is no data set", "is none of `trainer prepare`"),
    ("dataset.json", Path.unlink, "is a directory without dataset.json", "without dataset.json"),
]


def facts(data: Path, max_length: int = 200) -> dict[str, Any]:
    """Ask the program that a launch runs in the container about the data."""
    arguments = {
        "workspace": str(data.parent),
        "data": str(data),
        "max_length": max_length,
    }
    code = program("facts").replace('if __name__ == "__main__":', "if False:") + (
        "\nfacts = Facts(json.loads(sys.argv[1]))\nfacts.dataset()\n"
        "print(json.dumps({'answer': facts.answer, 'problems': facts.problems}))"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, json.dumps(arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_launch_pins_the_digest_that_training_finds(prepared: Path):
    assert facts(prepared) == {
        "answer": {"dataset_sha256": ShardDataset(prepared).sha256},
        "problems": [],
    }
    (problem,) = facts(prepared, max_length=300)["problems"]
    assert problem[0] == "data-max-length"
    assert problem[1:] == [
        f"data.max_length is 300, but {prepared} was prepared with 200",
        "--set data.max_length=200",
    ]


@pytest.mark.parametrize(("name", "change", "told", "told_at_launch"), DAMAGE)
def test_damage_is_named_by_the_launch_and_by_the_trainer(
    prepared: Path, name: str, change: Callable[[Path], None], told: str, told_at_launch: str
):
    change(prepared / name)
    with pytest.raises(DataError, match=told):
        ShardDataset(prepared)
    found = facts(prepared)
    assert told_at_launch in found["problems"][0][1]
    assert "dataset_sha256" not in found["answer"]


def test_unfinished_directory_says_how_to_finish_it(prepared: Path):
    (prepared / "dataset.json").unlink()
    (prepared / ".work").mkdir()
    with pytest.raises(DataError, match="has not finished; run the same command again"):
        ShardDataset(prepared)


def test_digest_of_the_content_covers_every_shard(prepared: Path):
    document = json.loads((prepared / "dataset.json").read_text())
    document["content"]["shards"][3]["files"]["mask"]["sha256"] = "0" * 64
    assert content_digest(document["content"]) != document["sha256"]


def test_training_data_is_told_apart_by_order_but_not_by_place(tmp_path: Path, options: Any):
    lines = [chat("a", "first"), chat("b", "second")]
    found = []
    for name, records in (("one", lines), ("two", lines), ("turned", lines[::-1])):
        (tmp_path / name).mkdir()
        path = write_lines(tmp_path / name / "chats.jsonl", records)
        os.utime(path, ns=(len(name), len(name)))
        found.append(prepare(options(path, output=tmp_path / name / "out"))["sha256"])
    assert found[0] == found[1] != found[2]
