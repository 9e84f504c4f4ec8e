"""Records to chats: their shapes, reasoning, tools, and what the template makes of them."""

import json
from typing import Any

import pytest

from tests.trainer.data.conftest import TEMPLATE, chat, make_tokenizer
from trainer.data.chat import (
    BadRecordError,
    Chat,
    ChatEncoder,
    TooLongError,
    parse_line,
    parse_record,
    variants,
)


def trained(found: Chat, template: str | None = None, **options: Any) -> str:
    """Text with every untrained token as a dot."""
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    encoded = ChatEncoder(tokenizer, options.pop("max_length", 200), **options).encode(found)
    pairs = zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True)
    return "".join(tokenizer.decode([token]) if on else "." for token, on in pairs)


def test_sharegpt_conversations_are_the_same_chat_as_messages():
    sharegpt = {
        "system": "be brief",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
    }
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    assert parse_record(sharegpt) == parse_record({"messages": messages})
    assert parse_record(sharegpt).digest() == parse_record({"messages": messages}).digest()


def test_parts_of_text_are_joined_and_nulls_of_a_table_are_left_out():
    parts = [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]
    table = chat("hi", "yes", tool_calls=None, reasoning_content=None) | {"tools": None}
    assert parse_record(chat("hi", parts)) == parse_record(table) == parse_record(chat("hi", "yes"))  # type: ignore[arg-type]


def test_arguments_of_a_tool_call_become_an_object_and_its_empty_content_text():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = parse_record({"messages": messages, "tools": json.dumps(tools)})
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.messages[1]["content"] == ""
    assert found.tools == tuple(tools)


def test_tools_reach_the_template():
    template = (
        "{{ tools[0].name if tools else 'none' }}"
        "{% for m in messages %}|{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    record = chat("hi", "yes") | {"tools": [{"name": "tool"}]}
    assert trained(parse_record(record), template) == "." * len("tool|hi|") + "yes"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], 'no list "messages" or "conversations"'),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "message 0: unknown \"from\" 'alien'",
        ),
        ({"messages": [3]}, 'message 0 has no text "role" and "content"'),
        (chat("hi", [{"type": "image"}]), "message 1 holds parts that are no text"),  # type: ignore[arg-type]
        (chat("hi", "yes", reasoning_content=5), "reasoning_content of message 1: expected text"),
        (chat("hi", "yes") | {"tools": "{"}, "tools: not JSON"),
        (chat("hi", "yes") | {"tools": 5}, "tools: expected a list"),
        (chat("hi", "yes", tool_calls="x"), "message 1: tool_calls is no list of calls"),
    ],
)
def test_a_record_that_is_no_chat_is_refused_by_what_is_wrong(record: Any, reason: str):
    with pytest.raises(BadRecordError) as caught:
        parse_record(record)
    assert str(caught.value).startswith(reason)


def test_answer_that_reasons_is_opened_as_the_target_opens_it():
    # <s>user\n q <e>\n <s>assistant\n <think> = 1 + 5 + 1 + 2 + 11 + 7 = 27 tokens, </think> 8 more
    on = parse_record(chat("q", "a", reasoning_content="why"))
    off = parse_record(chat("q", "a"))
    assert (on.thinking, off.thinking) == (True, False)
    assert trained(on, TEMPLATE) == "." * 27 + "why</think>a<e>" + "."
    assert trained(off, TEMPLATE) == "." * 35 + "a<e>" + "."


def test_thinking_of_a_record_can_be_said_outright():
    found = parse_record(chat("q", "a") | {"enable_thinking": True})
    assert trained(found, TEMPLATE) == "." * 27 + "</think>a<e>" + "."


def test_answer_cut_within_its_reasoning_teaches_no_end_of_it():
    record = chat("q", "", reasoning_content="why") | {"truncated": True}
    assert trained(parse_record(record), TEMPLATE) == "." * 27 + "why"


def test_reasoning_of_earlier_answers_is_neither_seen_nor_trained():
    messages = [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        *chat("q", "a", reasoning_content="new")["messages"],
    ]
    found = parse_record({"messages": messages})
    # the first turn comes without reasoning: 1+5+1+2 (p) + 11 + 1 + 2 (b) = 23 tokens before q's 27
    assert trained(found, TEMPLATE) == "." * 50 + "new</think>a<e>" + "."
    assert ChatEncoder(make_tokenizer(TEMPLATE), 200).encode(found).last_only


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "a", "reasoning_content": "why"},
        {"content": "a", "reasoning": "why"},
        {"content": "<think>\nwhy\n</think>\n\na"},
    ],
)
def test_reasoning_is_stripped_or_kept_beside(answer: dict[str, str]):
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]}
    found = parse_record(record)
    assert found.thinking
    plain = parse_record(chat("q", "a"))
    assert variants(found, "keep") == (found,)
    assert variants(found, "strip") == (plain,)
    assert variants(found, "both") == (found, plain)
    assert variants(plain, "both") == (plain,)


def test_reasoning_that_the_template_would_swallow_is_a_bad_record():
    found = parse_record(chat("q", "aa", reasoning_content="why"))
    with pytest.raises(BadRecordError, match="message 1 holds reasoning_content, which the chat"):
        trained(found)
    assert trained(found.without_reasoning()).endswith("aa<e>.")


def test_longer_chat_is_cut_or_left_out():
    found = parse_record(chat("hi", "yes"))
    whole = trained(found)
    assert trained(found, max_length=len("." * 21) + 2) == "." * 21 + "ye"
    with pytest.raises(TooLongError, match="26 tokens, more than max_length 25"):
        trained(found, max_length=25, drop_longer=True)
    assert trained(found, max_length=26, drop_longer=True) == whole


def test_digest_tells_chats_apart_by_what_they_say_alone():
    same = [
        parse_line(
            b'{"id": 1, "messages": [{"role": "user", "content": "q"},'
            b' {"content": "a", "role": "assistant"}]}'
        ),
        parse_record(chat("q", "a")),
    ]
    assert same[0].digest() == same[1].digest()
    others = [chat("q", "b"), chat("q", "a") | {"truncated": True}, chat("q", "a", name="x")]
    assert len({parse_record(record).digest() for record in [chat("q", "a"), *others]}) == 4
