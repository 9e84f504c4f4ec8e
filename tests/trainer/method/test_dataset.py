"""Chats to tokens: which tokens are trained, which lines are refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.data.dataset import ChatDataset, load_chats, load_tokenizer, split_answer
from trainer.errors import DataError

START, END, MASK = 256, 257, 258


def chat(*contents: str, **more: Any) -> str:
    """A line of alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return json.dumps({"messages": messages, **more})


def load(tmp_path: Path, tokenizer: Any, *lines: str, max_length: int = 200) -> ChatDataset:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return load_chats(path, tokenizer, max_length)


def trained(dataset: ChatDataset, tokenizer: Any, number: int = 0) -> str:
    """Text with every untrained token as a dot."""
    sample = dataset.samples[number]
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    return "".join(tokenizer.decode([token]) if on else "." for token, on in pairs)


def test_answer_and_its_end_token_are_trained_and_nothing_else(tmp_path: Path, byte_tokenizer: Any):
    found = trained(load(tmp_path, byte_tokenizer, chat("hi", "yes")), byte_tokenizer)
    # <start>user\n hi <end>\n <start>assistant\n : 1+5+2+2+1+10 = 21 tokens; then yes<end> and \n
    assert found == "." * 21 + "yes<|im_end|>" + "."


def test_every_answer_of_a_long_chat_is_trained(tmp_path: Path, byte_tokenizer: Any):
    found = trained(load(tmp_path, byte_tokenizer, chat("a", "bb", "c", "dd")), byte_tokenizer)
    # between the answers: \n <start>user\n c <end>\n <start>assistant\n = 1+6+1+2+11 = 21 tokens
    assert found == "." * 20 + "bb<|im_end|>" + "." * 21 + "dd<|im_end|>" + "."


def test_truncated_answer_ends_with_its_last_word(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(tmp_path, byte_tokenizer, chat("hi", "yes", truncated=True))
    assert trained(dataset, byte_tokenizer) == "." * 21 + "yes"
    assert END not in dataset.samples[0].input_ids[21:]


def test_max_length_cuts_and_keeps_the_mask_in_step(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(tmp_path, byte_tokenizer, chat("hi", "yes"), max_length=23)
    assert trained(dataset, byte_tokenizer) == "." * 21 + "ye"


def test_template_that_rewrites_history_leaves_the_last_answer_trained(
    tmp_path: Path, byte_tokenizer: Any
):
    # earlier answers lose what stands before the bar, as reasoning is stripped by some templates
    byte_tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['content'] if loop.last else "
        "m['content'].split('|')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    dataset = load(tmp_path, byte_tokenizer, chat("a", "x|b", "c", "y|d"))
    # <start>a<end>\n <start>b<end>\n <start>c<end>\n <start> = 13 tokens
    assert trained(dataset, byte_tokenizer) == "." * 13 + "y|d<|im_end|>" + "."


def test_bytes_of_one_character_are_trained_together(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(tmp_path, byte_tokenizer, chat("hi", "é"))
    assert int(dataset.samples[0].loss_mask.sum()) == 3  # two bytes and the end token


def test_bad_lines_are_counted_with_line_and_reason(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(
        tmp_path,
        byte_tokenizer,
        "{half",
        chat("hi", "yes"),
        "",
        '{"text": "no messages"}',
        '{"messages": [{"role": "user", "content": 5}]}',
        chat("only a question"),
        chat("x" * 300, "yes"),
    )
    assert len(dataset.samples) == 1
    told = [str(bad) for bad in dataset.bad_lines]
    assert dataset.num_bad == 5
    assert told[0].startswith("line 1: not JSON")
    assert told[1:] == [
        'line 4: no list "messages" or "conversations"',
        'line 5: message 0 has no text "role" and "content"',
        "line 6: no assistant message",
        "line 7: fewer than 2 answer tokens within max_length 200",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (chat("hi", "\ud83d cut emoji"), "content of message 1: surrogates not allowed"),
        (chat("\udc00", "yes"), "content of message 0: surrogates not allowed"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
    ],
)
def test_a_line_that_json_admits_and_no_tokenizer_takes_is_a_bad_line(
    tmp_path: Path, byte_tokenizer: Any, line: str, reason: str
):
    dataset = load(tmp_path, byte_tokenizer, line, chat("hi", "yes"))
    assert len(dataset.samples) == 1
    (told,) = dataset.bad_lines
    assert str(told).startswith(f"line 1: {reason}")


def test_template_that_refuses_a_chat_makes_a_bad_line(tmp_path: Path, byte_tokenizer: Any):
    byte_tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        + byte_tokenizer.chat_template
    )
    dataset = load(tmp_path, byte_tokenizer, chat("no", "yes"), chat("hi", "yes"))
    assert [str(b) for b in dataset.bad_lines] == [
        "line 1: the chat template refuses it (not this)"
    ]


def test_file_without_a_usable_line_is_refused(tmp_path: Path, byte_tokenizer: Any):
    with pytest.raises(DataError, match=r"chats.jsonl: no usable chat \(line 1: not JSON"):
        load(tmp_path, byte_tokenizer, "{half")
    with pytest.raises(DataError, match="the file is empty"):
        load(tmp_path, byte_tokenizer, "")


def test_missing_file_is_named(tmp_path: Path, byte_tokenizer: Any):
    with pytest.raises(DataError, match=r"gone.jsonl: No such file"):
        load_chats(tmp_path / "gone.jsonl", byte_tokenizer, 200)


def test_digest_is_that_of_the_files_bytes(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(tmp_path, byte_tokenizer, chat("hi", "yes"))
    data = (chat("hi", "yes") + "\n").encode()
    assert dataset.sha256 == hashlib.sha256(data).hexdigest()


def test_mask_token_in_the_data_is_refused(tmp_path: Path, byte_tokenizer: Any):
    dataset = load(tmp_path, byte_tokenizer, chat("hi", "yes"), chat("<|mask|>", "yes"))
    dataset.check_mask_token(255)
    with pytest.raises(DataError, match=r"sample 1 holds draft\.mask_token_id 258 at token 6"):
        dataset.check_mask_token(MASK)


def test_prompt_and_first_answer_are_split_where_decoding_starts(
    tmp_path: Path, byte_tokenizer: Any
):
    dataset = load(tmp_path, byte_tokenizer, chat("a", "bb", "c", "dd"))
    prompt, answer = split_answer(dataset.samples[0])
    assert byte_tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert byte_tokenizer.decode(answer) == "bb<|im_end|>"


def test_tokenizer_comes_from_the_targets_directory(
    tiny_target_directory: Path, byte_tokenizer: Any
):
    loaded = load_tokenizer(str(tiny_target_directory))
    assert loaded.chat_template == byte_tokenizer.chat_template
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tiny_target_directory / "absent"))
