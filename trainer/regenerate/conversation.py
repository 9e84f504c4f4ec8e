"""One line of the input: which answers to ask for, and the line that is written in its place."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.chat import BadRecordError, parse_unanswered

Message = dict[str, Any]
# Written anew, or true of the old answers alone; an enable_thinking that was asked for is added.
_LEFT_OUT = frozenset(
    ("messages", "conversations", "system", "truncated", "enable_thinking", "generation")
)


_THINK, _THINK_END = "<think>", "</think>"


class UnusableError(Exception):
    """Why a line gives no conversation; it is written aside with the line's number."""


@dataclass(frozen=True)
class Reply:
    """One answer of the server.

    cut: it ended at max_tokens. num_tokens: as the server counted, None when it did not.
    """

    content: str
    reasoning: str | None
    cut: bool
    num_tokens: int | None

    def message(self) -> Message:
        """Return the assistant's message; reasoning stands where chat templates look for it."""
        message = {"role": "assistant", "content": self.content}
        return message | ({"reasoning_content": self.reasoning} if self.reasoning else {})


@dataclass(frozen=True)
class Chat:
    """A line of the input: number counts from 1, turns are what is said before each answer."""

    number: int
    record: dict[str, Any]
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Any, ...] = ()

    @property
    def id(self) -> str:
        """The record's own id, or its line."""
        return str(self.record.get("id", f"line-{self.number}"))

    def output(self, replies: list[Reply], generation: dict[str, Any]) -> dict[str, Any]:
        """Return the line to write; ``generation`` tells how the answers were made.

        A cut answer ends the conversation: what the user said next answered another one.
        """
        messages: list[Message] = []
        for turn, reply in zip(self.turns, replies, strict=False):
            messages += [*turn, reply.message()]
        kept = {key: value for key, value in self.record.items() if key not in _LEFT_OUT}
        cut = {"truncated": True} if replies[-1].cut else {}
        told = {
            "finish": ["length" if reply.cut else "stop" for reply in replies],
            "tokens": [reply.num_tokens for reply in replies],
        }
        made = {"id": self.id, "messages": messages} | cut
        return kept | made | {"generation": generation | told}


def parse_chat(number: int, line: bytes) -> Chat:
    """Read a line of chats; answers that are there are left out, a last question gets one too.

    Raises: UnusableError with the reason.
    """
    try:
        record = json.loads(line)
        chat = parse_unanswered(record)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"not JSON ({error})") from error
    except BadRecordError as error:
        raise UnusableError(str(error)) from error
    return Chat(number, record, _turns(chat.messages), chat.tools)


def _turns(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Return what stands before each answer, without the messages before the answer before."""
    turns: list[tuple[Message, ...]] = []
    said: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            if not any(one["role"] == "user" for one in said):
                raise UnusableError(f"message {place} answers no user")
            turns.append(tuple(said))
            said = []
            continue
        if message["role"] not in ("system", "developer", "user"):
            # What a tool answered belongs to the call that the old answer made.
            raise UnusableError(f"message {place} has the role {message['role']!r}")
        said.append(message)
    if any(one["role"] == "user" for one in said):
        turns.append(tuple(said))
    if not turns:
        raise UnusableError("no user message to answer")
    return tuple(turns)


def parse_reply(document: Any) -> Reply:
    """Read a chat completion.

    Raises: UnusableError when it holds no answer that could be trained on, ValueError when it is
    no completion at all.
    """
    try:
        choice = document["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        usage = document.get("usage") or {}
        count = usage.get("completion_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion ({error!r})") from error
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise ValueError("no chat completion (its content is no text)")
    if finish not in ("stop", "length"):
        raise UnusableError(f"the server ended the answer with {finish!r}")
    if not reasoning:
        content, reasoning = _split_thought(content)
    if not content.strip() and finish == "stop":
        content = ""  # blanks answer nothing
    if not content and not reasoning:
        raise UnusableError("the server gave an empty answer")
    if not content and finish == "stop":
        raise UnusableError("the server gave reasoning without an answer")
    for text in (content, reasoning or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnusableError(f"the answer holds half a character ({error.reason})") from error
    return Reply(content, reasoning, finish == "length", count if isinstance(count, int) else None)


def _split_thought(content: str) -> tuple[str, str | None]:
    """Part what a server without a reasoning parser leaves in one: (answer, thought or None).

    The opening mark is missing where the chat template's prompt ends with it; a thought without
    its closing mark was cut.
    """
    head = content.lstrip()
    if not head.startswith(_THINK) and _THINK in head.split(_THINK_END)[0]:
        return content, None  # an answer that speaks of such marks
    thought, closed, answer = head.removeprefix(_THINK).partition(_THINK_END)
    if closed:
        return answer.lstrip("\n"), thought.strip("\n") or None
    return ("", thought.strip("\n")) if head.startswith(_THINK) else (content, None)


def encode(value: Any) -> bytes:
    """Return one line of JSON, readable where its text can be written as UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair in a field that is only passed on
        return json.dumps(value).encode()
