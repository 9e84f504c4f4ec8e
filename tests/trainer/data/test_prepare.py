"""Files of chats to shards: what is in them, what is left out, and what a second run may change."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.trainer.data.conftest import chat, make_tokenizer, write_lines
from trainer.data.dataset import load_chats, load_tokenizer
from trainer.data.prepare import prepare, report
from trainer.data.prepare_options import PrepareOptions
from trainer.data.shards import ShardDataset
from trainer.errors import DataError

Options = Callable[..., PrepareOptions]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Ten chats, two broken lines, one without an answer, one chat twice."""
    records: list[Any] = [chat(f"question {i}", "answer " + "y" * i) for i in range(10)]
    records[4:4] = ["{half", "", '{"text": "none"}', {"messages": [{"role": "user", "content": 5}]}]
    return write_lines(tmp_path / "chats.jsonl", [*records, records[0]])


def bad(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "bad.jsonl").read_text().splitlines()]


def digests(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("shard-*")}


def test_shards_hold_what_the_file_itself_gives(chats: Path, options: Options, target: Path):
    prepare(options(chats, dedup=False))
    found = ShardDataset(options().output)
    wanted = load_chats(chats, load_tokenizer(str(target)), 200)
    assert len(found.samples) == len(wanted.samples) == 11
    assert found.lengths.tolist() == wanted.lengths.tolist()
    for one, other in zip(found.samples, wanted.samples, strict=True):
        assert one.sample_id == other.sample_id
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_bad_records_are_listed_with_file_line_and_reason(chats: Path, options: Options):
    document = prepare(options(chats))
    found = bad(options().output)
    assert [(one["file"], one["number"]) for one in found] == [(str(chats), n) for n in (5, 7, 8)]
    assert found[0]["reason"].startswith("not JSON")
    assert found[0]["excerpt"] == "{half"
    assert found[1]["reason"] == 'no list "messages" or "conversations"'
    totals = document["content"]["totals"]
    # 15 lines, one blank; 3 bad, 1 twice
    assert (totals["num_records"], totals["num_bad"], totals["num_samples"]) == (14, 3, 10)
    lines = [str(one) for one in ShardDataset(options().output).bad_lines]
    assert lines[1] == f'{chats}:7: no list "messages" or "conversations"'


def test_repeated_chat_counts_once_across_files(chats: Path, tmp_path: Path, options: Options):
    more = write_lines(
        tmp_path / "more.jsonl", [chat("new", "chat"), chat("question 3", "answer yyy")]
    )
    document = prepare(options(chats, more))
    assert document["content"]["totals"]["num_duplicates"] == 2
    assert document["content"]["totals"]["num_samples"] == 11
    assert (
        prepare(options(chats, more, dedup=False, output=tmp_path / "all"))["content"]["totals"][
            "num_samples"
        ]
        == 13
    )


def test_processes_and_one_process_make_the_same_shards(
    chats: Path, tmp_path: Path, options: Options
):
    alone = prepare(options(chats))
    many = prepare(options(chats, output=tmp_path / "many", num_workers=2))
    assert alone["sha256"] == many["sha256"]
    assert digests(tmp_path / "out") == digests(tmp_path / "many")


def test_table_gives_the_samples_of_the_lines_it_was_made_of(tmp_path: Path, options: Options):
    records = [chat(f"question {i}", "answer " + "y" * i) for i in range(10)]
    lines = write_lines(tmp_path / "chats.jsonl", records)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet", row_group_size=3
    )
    made = [
        prepare(options(path, output=tmp_path / path.suffix[1:]))["content"]["shards"]
        for path in (lines, tmp_path / "chats.parquet")
    ]
    assert made[0] == made[1]
    assert sum(shard["num_samples"] for shard in made[0]) == 10


def test_longer_chats_are_cut_or_listed(chats: Path, tmp_path: Path, options: Options):
    # <s>user\n, question N, <e>\n, <s>assistant\n, answer and N y, <e>\n: 38 + N tokens
    cut = prepare(options(chats, max_length=43))["content"]["totals"]
    assert (cut["num_cut"], cut["num_too_long"], cut["num_samples"]) == (4, 0, 10)
    directory = tmp_path / "dropped"
    dropped = prepare(options(chats, max_length=43, truncation="drop", output=directory))
    totals = dropped["content"]["totals"]
    assert (totals["num_cut"], totals["num_too_long"], totals["num_samples"]) == (0, 4, 6)
    assert bad(directory)[-1]["reason"] == "47 tokens, more than max_length 43"


def test_thinking_is_kept_stripped_or_both_and_both_are_counted(
    tmp_path: Path, options: Options, thinking_target: Path
):
    records = [chat("q", "aa", reasoning_content="why"), chat("r", "bb"), chat("s", "cc")]
    path = write_lines(tmp_path / "chats.jsonl", records)
    found = {}
    for thinking in ("keep", "strip", "both"):
        made = options(
            path, thinking=thinking, target=str(thinking_target), output=tmp_path / thinking
        )
        document = prepare(made)
        totals = document["content"]["totals"]
        found[thinking] = totals["num_thinking"], totals["num_samples"]
        told = "\n".join(report(document))
        assert f"thinking on {found[thinking][0]}, off " in told
        assert ("no sample with thinking on" in told) == (thinking == "strip")
    assert found == {"keep": (1, 3), "strip": (0, 3), "both": (1, 4)}


def test_finished_directory_is_left_as_it_is(chats: Path, options: Options):
    first = prepare(options(chats))
    before = {path: path.stat().st_mtime_ns for path in options().output.iterdir()}
    os.utime(chats, ns=(1, 1))  # another time, the same bytes
    assert prepare(options(chats)) == first
    assert {path: path.stat().st_mtime_ns for path in options().output.iterdir()} == before


def half_done(options: PrepareOptions) -> None:
    """Leave the directory as a kill after its first shard does."""
    prepare(options)
    output = options.output
    document = json.loads((output / "dataset.json").read_text())
    (output / "dataset.json").unlink()
    (output / ".work").mkdir()
    (output / ".work" / "provenance.json").write_text(json.dumps(document["made"]["provenance"]))


@pytest.mark.parametrize("state", ["half done", "finished"])
def test_changed_input_or_option_is_refused_with_what_changed(
    chats: Path, options: Options, tmp_path: Path, thinking_target: Path, state: str
):
    if state == "finished":
        prepare(options(chats))
    else:
        half_done(options(chats))
    before = digests(tmp_path / "out")
    for changes, told in (
        ({"max_length": 300}, "--max-length was 200, is 300"),
        ({"dedup": False}, "--dedup was True, is False"),
        ({"target": str(thinking_target)}, "the target's chat template differs"),
    ):
        with pytest.raises(DataError, match=f"out is {state} and belongs to another .*{told}"):
            prepare(options(chats, **changes))
    more = write_lines(tmp_path / "more.jsonl", [chat("new", "chat")])
    with pytest.raises(DataError, match="there were 1 input files, are 2"):
        prepare(options(chats, more))
    with chats.open("a") as stream:
        stream.write(json.dumps(chat("one", "more")) + "\n")
    with pytest.raises(DataError, match=r"chats.jsonl holds other bytes than .*chats.jsonl did"):
        prepare(options(chats))
    assert digests(tmp_path / "out") == before


def test_half_done_directory_goes_on_though_a_file_was_copied_anew(chats: Path, options: Options):
    half_done(options(chats))
    os.utime(chats, ns=(1, 1))
    assert prepare(options(chats))["content"]["totals"]["num_samples"] == 10


def test_two_at_work_on_one_directory_are_refused(chats: Path, options: Options):
    work = options().output / ".work"
    work.mkdir(parents=True)
    with (work / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another trainer prepare is at work"):
            prepare(options(chats))


def test_files_of_others_are_never_written_among(chats: Path, options: Options, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"out holds thesis.tex; give a directory of its own"):
        prepare(options(chats))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_kill_just_before_the_end_leaves_nothing_that_stays(chats: Path, options: Options):
    first = prepare(options(chats))
    (options().output / ".work").mkdir()
    (options().output / ".work" / "00000.digests").touch()
    assert prepare(options(chats)) == first
    assert not (options().output / ".work").exists()


def test_input_without_a_usable_chat_is_refused(tmp_path: Path, options: Options):
    path = write_lines(tmp_path / "chats.jsonl", ["{half", '{"a": 1}'])
    with pytest.raises(
        DataError, match=r"no usable chat in .*chats.jsonl: 2 bad records, see .*bad.jsonl"
    ):
        prepare(options(path))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match=r"no usable chat in .*empty.jsonl: 0 bad records"):
        prepare(options(empty, output=tmp_path / "none"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_length": 1}, "--max-length: expected at least 2, got 1"),
        ({"num_workers": 0}, "--num-workers: expected at least 1, got 0"),
        ({"truncation": "cut"}, "--truncation: expected one of keep-prefix, drop"),
        ({"thinking": "on"}, "--thinking: expected one of keep, strip, both"),
    ],
)
def test_option_that_cannot_be_is_named(options: Options, changes: dict[str, Any], told: str):
    with pytest.raises(DataError, match=told):
        options(**changes).check()


def test_tokenizer_without_a_template_is_refused(chats: Path, options: Options, tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match="its tokenizer has no chat template"):
        prepare(options(chats, target=str(tmp_path / "bare")))


def test_output_that_cannot_be_written_is_told_with_what_to_do(chats: Path, options: Options):
    options().output.write_text("a file")
    with pytest.raises(DataError, match=r"Not a directory; .*: mend this, then run the same"):
        prepare(options(chats))


def test_data_set_that_another_process_ends_meanwhile_is_found_finished(
    chats: Path, options: Options, monkeypatch: pytest.MonkeyPatch
):
    asked, flock = options(chats), fcntl.flock
    told: list[Any] = []
    made: list[dict[str, Any]] = []

    def after_another_has_ended(lock: Any, operation: int) -> None:
        told.append(lock)
        if len(told) == 1:  # opened, not locked yet
            made.append(prepare(asked))
        flock(lock, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", after_another_has_ended)
        found = prepare(asked)
    assert [found] == made
    assert not (asked.output / ".work").exists()
