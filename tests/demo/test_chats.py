"""The committed data set: what every line holds, and that README and prompts agree with it."""

import json
import re
from pathlib import Path

import pytest

import dflashctl.demo
from dflashctl.demo.prompts import split
from trainer.contract.completion import digest_file
from trainer.contract.config import TrainConfig

DEMO = Path(dflashctl.demo.__file__).parent
FILES = {"chats.jsonl": 0, "heldout.jsonl": 1}  # the place of its prompts in split()


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text().split("\n")[:-1]]


@pytest.mark.parametrize("name", FILES)
def test_each_line_is_a_question_and_its_answer(name: str):
    for record in records(name):
        assert sorted(record) == ["id", "messages", "truncated"]
        assert [sorted(message) for message in record["messages"]] == [["content", "role"]] * 2
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
        assert isinstance(record["truncated"], bool)


@pytest.mark.parametrize("name", FILES)
def test_each_answer_is_text_without_chat_marks_or_broken_characters(name: str):
    for record in records(name):
        content = record["messages"][1]["content"]
        assert content.strip(), record["id"]
        assert "<|" not in content, record["id"]
        assert "\ufffd" not in content, record["id"]


@pytest.mark.parametrize("name", FILES)
def test_the_prompt_generator_gives_the_prompts_in_the_file(name: str):
    made = [(prompt.prompt_id, prompt.text) for prompt in split()[FILES[name]]]
    assert made == [(r["id"], r["messages"][0]["content"]) for r in records(name)]


def test_the_files_hold_2220_and_80_chats_with_ids_of_their_own():
    train, heldout = records("chats.jsonl"), records("heldout.jsonl")
    assert (len(train), len(heldout)) == (2220, 80)
    assert len({record["id"] for record in train + heldout}) == 2300


def test_the_two_files_stay_within_one_and_a_half_megabytes():
    assert sum((DEMO / name).stat().st_size for name in FILES) < 1_500_000


@pytest.mark.parametrize("name", FILES)
def test_the_readme_states_the_digest_and_the_counts_of_the_file(name: str):
    readme = (DEMO / "README.md").read_text()
    row = re.search(rf"^\| `{name}` \| (\d+) \| (\d+) \| `(\w+)` \|$", readme, re.MULTILINE)
    assert row, f"README.md has no row for {name}"
    num_truncated = sum(record["truncated"] for record in records(name))
    assert row.groups() == (
        str(len(records(name))),
        str(num_truncated),
        digest_file(DEMO / name),
    )


def test_the_training_configuration_is_valid_once_the_paths_are_given():
    yaml = pytest.importorskip("yaml")
    raw = yaml.safe_load((DEMO / "train.yaml").read_text())
    raw["target"]["path"], raw["data"]["path"] = "target", "chats.jsonl"
    config = TrainConfig.from_dict(raw)
    assert (config.draft.block_size, config.position_decay, config.optim.name) == (4, 3.0, "muon")
