"""One conversation: what a record may look like, and how it becomes token ids and a loss mask.

A record has ``messages``, a list of ``{"role", "content"}``, or ShareGPT's ``conversations``, a
list of ``{"from", "value"}``; both may carry ``tools``, and an assistant message its reasoning in
``reasoning_content`` or at the head of the content, between ``<think>`` and ``</think>``. An
optional ``"truncated": true`` says that the last answer was cut, so no end token is taught.

The loss mask comes from rendering the chat turn by turn with the tokenizer's chat template and from
comparing prefixes, so templates need no generation marker.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

_THINK_END = "</think>"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class BadRecordError(Exception):
    """Why a record gives no sample."""


class TooLongError(BadRecordError):
    """A sound record with more tokens than are wanted."""


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that chat templates read.

    thinking: whether the last answer reasons, for templates that must know when they open it.
    truncated: the last answer was cut before its end.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    thinking: bool = False
    truncated: bool = False

    def without_reasoning(self) -> "Chat":
        """Return the same conversation with the reasoning of every answer removed."""
        messages = tuple(_without_reasoning(message) for message in self.messages)
        return replace(self, messages=messages, thinking=False)

    def digest(self) -> bytes:
        """Return 16 bytes that equal conversations share."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Encoded:
    """Tokens of one chat. Shapes: input_ids [len] int32, loss_mask [len] bool.

    cut: tokens beyond max_length were left out. last_only: the template rewrites earlier turns, so
    of several answers the last one alone is trained.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    cut: bool
    last_only: bool


def parse_line(line: bytes) -> Chat:
    """Return the chat of a line of JSON. Raises: BadRecordError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"not JSON ({error})") from error
    return parse_record(record)


def parse_record(record: Any) -> Chat:
    """Return the chat of a record. Raises: BadRecordError naming the message that is wrong."""
    chat = parse_unanswered(record)
    if not chat_answers(chat):
        raise BadRecordError("no assistant message")
    return chat


def parse_unanswered(record: Any) -> Chat:
    """Return the chat of a record that may lack its answers; raises as ``parse_record``."""
    if not isinstance(record, Mapping):
        raise BadRecordError('no list "messages" or "conversations"')
    messages = tuple(_message(turn, raw) for turn, raw in enumerate(_raw_messages(record)))
    answers = [message for message in messages if message["role"] == "assistant"]
    thinking = record.get("enable_thinking")
    if not isinstance(thinking, bool):
        thinking = bool(answers) and _reasons(answers[-1])
    return Chat(messages, _tools(record), thinking, bool(record.get("truncated")))


def variants(chat: Chat, thinking: str) -> tuple[Chat, ...]:
    """Return the chats that one chat gives: ``thinking`` is keep, strip or both.

    ``both`` gives a chat that reasons twice, with its reasoning and without.
    """
    if thinking == "keep":
        return (chat,)
    stripped = chat.without_reasoning()
    return (stripped,) if thinking == "strip" or stripped == chat else (chat, stripped)


class ChatEncoder:
    """Renders and tokenises chats; safe to share between threads.

    max_length: tokens that a sample keeps. drop_longer: refuse a longer chat instead of keeping its
    beginning.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, drop_longer: bool = False) -> None:
        self._tokenizer = tokenizer
        self._max_length, self._drop_longer = max_length, drop_longer
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = frozenset(added | set(tokenizer.all_special_ids))
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else json.dumps(template)

    @property
    def takes_thinking(self) -> bool:
        """Whether the template opens an answer differently with thinking on and off."""
        return "enable_thinking" in self._template

    def encode(self, chat: Chat) -> Encoded:
        """Return ids and loss mask. Raises: BadRecordError, TooLongError."""
        text, spans = self._render(chat)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], np.int32)
        starts, stops = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), np.bool_)
        end = len(ids)
        for begin, stop in spans:
            inside = np.flatnonzero((starts >= begin) & (starts < stop))
            last = self._last_trained(ids, inside)
            cut = chat.truncated and stop == spans[-1][1]
            if cut and (thought := _unfinished_thought(chat)):
                # The template closes the thought and the answer; the target wrote neither.
                at = text.rfind(thought, begin, stop)
                written = at + len(thought) if at >= 0 else begin
                last = int(inside[stops[inside] <= written].max(initial=-1))
                end = last + 1
            elif cut and last >= 0 and int(ids[last]) in self._special:
                end = last  # the end token was never the target's own choice; drop what follows too
                last -= 1
            mask[inside[inside <= last]] = True
        return self._within(ids[:end], mask[:end], last_only=len(spans) < chat_answers(chat))

    def _within(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], *, last_only: bool
    ) -> Encoded:
        most = self._max_length
        if len(ids) > most and self._drop_longer:
            raise TooLongError(f"{len(ids)} tokens, more than max_length {most}")
        kept = mask[:most]
        if not (kept[:-1] & kept[1:]).any():
            raise BadRecordError(f"fewer than 2 answer tokens within max_length {most}")
        return Encoded(ids[:most], kept, len(ids) > most, last_only)

    def _render(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the chat's text and the character span of every answer.

        A template that rewrites earlier turns (one that strips old reasoning) leaves only the last
        answer trained, in the context the target would have seen.
        """
        if chat.thinking and "reasoning_content" not in self._template:
            for turn, message in enumerate(chat.messages):
                if message.get("reasoning_content"):
                    raise BadRecordError(
                        f"message {turn} holds reasoning_content, which the chat template does not"
                        " render (prepare --thinking strip leaves it out)"
                    )
        messages = chat.messages
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        whole = self._text(chat, answers[-1] + 1, prompt=False)
        spans: list[tuple[int, int]] = []
        for turn in answers:
            upto = whole if turn == answers[-1] else self._text(chat, turn + 1, prompt=False)
            before = self._text(chat, turn, prompt=True) if turn else ""
            if upto.startswith(before) and whole.startswith(upto):
                spans.append((len(before), len(upto)))
            elif turn == answers[-1]:
                raise BadRecordError("the chat template does not continue its own prompt")
            else:
                spans.clear()
        if len(spans) < len(answers):
            del spans[:-1]
        return whole, spans

    def _text(self, chat: Chat, count: int, *, prompt: bool) -> str:
        more: dict[str, Any] = {"tools": list(chat.tools)} if chat.tools else {}
        if self.takes_thinking:
            more["enable_thinking"] = chat.thinking
        try:
            text = self._tokenizer.apply_chat_template(
                list(chat.messages[:count]), tokenize=False, add_generation_prompt=prompt, **more
            )
        except Exception as error:  # a template may raise anything
            raise BadRecordError(f"the chat template refuses it ({error})") from error
        _check_text(text, "the rendered chat")
        return str(text)

    def _last_trained(self, ids: npt.NDArray[np.int32], inside: npt.NDArray[np.int64]) -> int:
        """Return the index of an answer's last token: its end token, or its last one without any.

        What follows the end token (a line break in most templates) is the template's, not an
        answer.
        """
        if not len(inside):
            return -1
        ends = [int(i) for i in inside if int(ids[i]) in self._special]
        if ends:
            after = self._tokenizer.decode(ids[ends[-1] + 1 : inside[-1] + 1].tolist())
            if not after.strip():
                return ends[-1]
        return int(inside[-1])


def chat_answers(chat: Chat) -> int:
    """Return how many answers the chat holds."""
    return sum(message["role"] == "assistant" for message in chat.messages)


def _raw_messages(record: Mapping[str, Any]) -> list[Any]:
    raw = record.get("messages")
    if raw is None:
        raw = record.get("conversations")
    if not isinstance(raw, list) or not raw:
        raise BadRecordError('no list "messages" or "conversations"')
    system = record.get("system")
    if isinstance(system, str) and system:
        raw = [{"role": "system", "content": system}, *raw]
    return raw


def _message(turn: int, raw: Any) -> dict[str, Any]:
    """Return a message as templates read it; what is null is left out."""
    if not isinstance(raw, Mapping):
        raise BadRecordError(f'message {turn} has no text "role" and "content"')
    message = {key: value for key, value in raw.items() if value is not None}
    if "from" in message and "role" not in message:
        source = message.pop("from")
        if source not in _SHAREGPT_ROLES:
            raise BadRecordError(f'message {turn}: unknown "from" {source!r}')
        message = {"role": _SHAREGPT_ROLES[source], "content": message.pop("value", None)} | message
    message["content"] = _content(turn, message)
    if not isinstance(message.get("role"), str) or not isinstance(message["content"], str):
        raise BadRecordError(f'message {turn} has no text "role" and "content"')
    if "reasoning" in message:  # the name that newer servers answer with
        message.setdefault("reasoning_content", message.pop("reasoning"))
    for key in ("role", "content", "reasoning_content"):
        if key in message:
            _check_text(message[key], f"{key} of message {turn}")
    return message


def _content(turn: int, message: dict[str, Any]) -> Any:
    content = message.get("content")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise BadRecordError(f"message {turn}: tool_calls is no list of calls")
        message["tool_calls"] = [_tool_call(call) for call in calls]
        content = "" if content is None else content
    if isinstance(content, list):  # parts, as OpenAI's interface has them
        kinds = {part.get("type") if isinstance(part, Mapping) else None for part in content}
        if kinds != {"text"}:
            raise BadRecordError(f"message {turn} holds parts that are no text")
        content = "".join(str(part.get("text", "")) for part in content)
    return content


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object: templates go through its items."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return dict(call)
        changed = dict(function) | {"arguments": arguments}
        return dict(call) | {"function": changed} if "function" in call else changed
    return dict(call)


def _tools(record: Mapping[str, Any]) -> tuple[Any, ...]:
    tools = record.get("tools")
    if isinstance(tools, str):  # columns of a table hold them as text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRecordError(f"tools: not JSON ({error})") from error
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadRecordError("tools: expected a list")
    return tuple(tools)


def _unfinished_thought(chat: Chat) -> str:
    """Return the reasoning within which the last answer was cut, if it has nothing else."""
    answer = next(m for m in reversed(chat.messages) if m["role"] == "assistant")
    thought = str(answer.get("reasoning_content") or "")
    return "" if answer["content"].strip() else thought.strip()


def _reasons(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) or _split_think(message["content"]) is not None


def _split_think(content: str) -> str | None:
    """Return what follows the reasoning at the head of an answer; None where there is none."""
    if not content.lstrip().startswith("<think>") or _THINK_END not in content:
        return None
    inner, after = content.split(_THINK_END, 1)
    reasoning = inner.lstrip().removeprefix("<think>")
    return after.lstrip("\n") if reasoning.strip() else None


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    answer = _split_think(message["content"])
    return kept if answer is None else kept | {"content": answer}


def _check_text(text: Any, what: str) -> None:
    """Refuse half a surrogate pair: JSON may hold one (a cut emoji), no tokenizer takes it."""
    if not isinstance(text, str):
        raise BadRecordError(f"{what}: expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(f"{what}: {error.reason}") from error
