"""Chats in, token ids and loss masks out.

A line of the file is a JSON object with ``messages``, a list of ``{"role", "content"}``; an
optional ``"truncated": true`` says that the last answer was cut, so no end token is taught. The
loss mask comes from rendering the chat turn by turn with the tokenizer's chat template and from
comparing prefixes, so templates need no generation marker.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from trainer.errors import DataError


@dataclass(frozen=True)
class Sample:
    """One conversation. Shapes: input_ids [len] int32, loss_mask [len] bool."""

    sample_id: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BadLine:
    """A line that gave no sample."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(frozen=True)
class ChatDataset:
    """All samples of one file; sample_id is the index in ``samples``."""

    path: str
    sha256: str
    samples: tuple[Sample, ...]
    bad_lines: tuple[BadLine, ...] = field(default=())

    @property
    def num_bad(self) -> int:
        """How many lines gave no sample."""
        return len(self.bad_lines)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Shapes: [samples]."""
        return np.array([len(s.input_ids) for s in self.samples], np.int64)

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise DataError when the mask token occurs in a sample: the draft could not tell them."""
        for sample in self.samples:
            if mask_token_id in sample.input_ids:
                at = int(np.flatnonzero(sample.input_ids == mask_token_id)[0])
                raise DataError(
                    f"{self.path}: sample {sample.sample_id} holds draft.mask_token_id"
                    f" {mask_token_id} at token {at}; choose an id that never occurs in data"
                )


class _BadRecordError(Exception):
    """Why a line gives no sample; becomes a BadLine."""


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """Load the target's tokenizer; raises DataError when it is absent, slow or has no template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise DataError(f"target.path {path}: no tokenizer can be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise DataError(f"target.path {path}: its tokenizer reports no offsets (tokenizer.json)")
    if not tokenizer.chat_template:
        raise DataError(f"target.path {path}: its tokenizer has no chat template")
    return tokenizer


def load_chats(path: str | Path, tokenizer: Any, max_length: int) -> ChatDataset:
    """Read, render and tokenise a JSONL file of chats.

    Bad lines are counted with their number and reason. Raises: DataError when the file is missing
    or no line is usable.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"data.path {path}: {error.strerror or error}") from error
    samples: list[Sample] = []
    bad: list[BadLine] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            ids, mask = encode_chat(_record(line), tokenizer, max_length)
        except _BadRecordError as error:
            bad.append(BadLine(number, str(error)))
        else:
            samples.append(Sample(len(samples), ids, mask))
    if not samples:
        told = "; ".join(str(b) for b in bad[:3]) or "the file is empty"
        raise DataError(f"data.path {path}: no usable chat ({told})")
    return ChatDataset(str(path), hashlib.sha256(data).hexdigest(), tuple(samples), tuple(bad))


def split_answer(sample: Sample) -> tuple[list[int], list[int]]:
    """Return (prompt, first answer) of a sample: what decoding starts from and should give."""
    trained = np.flatnonzero(sample.loss_mask)
    start = int(trained[0])
    gaps = np.flatnonzero(np.diff(trained) > 1)
    end = int(trained[gaps[0]] if len(gaps) else trained[-1]) + 1
    return sample.input_ids[:start].tolist(), sample.input_ids[start:end].tolist()


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRecordError(f"not JSON ({error})") from error
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise _BadRecordError('no list "messages"')
    for turn, message in enumerate(messages):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise _BadRecordError(f'message {turn} has no text "role" and "content"')
        for key in ("role", "content"):
            _check_text(message[key], f"{key} of message {turn}")
    if all(message["role"] != "assistant" for message in messages):
        raise _BadRecordError("no assistant message")
    return dict(record)


def _check_text(text: str, what: str) -> None:
    """Refuse half a surrogate pair: JSON may hold one (a cut emoji), no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadRecordError(f"{what}: {error.reason}") from error


def encode_chat(
    record: dict[str, Any], tokenizer: Any, max_length: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return ids and loss mask of one checked record. Shapes: [len] each."""
    text, spans = _render(record["messages"], tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoded["input_ids"], np.int32)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
    special = _special_ids(tokenizer)
    mask = np.zeros(len(ids), np.bool_)
    end = len(ids)
    for begin, stop in spans:
        inside = np.flatnonzero((starts >= begin) & (starts < stop))
        last = _last_trained(ids, inside, special, tokenizer)
        cut = bool(record.get("truncated")) and stop == spans[-1][1]
        if cut and last >= 0 and int(ids[last]) in special:
            end = last  # the end token was never the target's own choice; drop it and what follows
            last -= 1
        mask[inside[inside <= last]] = True
    ids, mask = ids[: min(end, max_length)], mask[: min(end, max_length)]
    if not (mask[:-1] & mask[1:]).any():
        raise _BadRecordError(f"fewer than 2 answer tokens within max_length {max_length}")
    return ids, mask


def _render(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat's text and the character span of every answer.

    A template that rewrites earlier turns (one that strips old reasoning) leaves only the last
    answer trained, in the context the target would have seen.
    """

    def text_of(count: int, *, prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages[:count], tokenize=False, add_generation_prompt=prompt
                )
            )
        except Exception as error:  # a template may raise anything
            raise _BadRecordError(f"the chat template refuses it ({error})") from error

    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    whole = text_of(answers[-1] + 1, prompt=False)
    spans: list[tuple[int, int]] = []
    for turn in answers:
        upto = whole if turn == answers[-1] else text_of(turn + 1, prompt=False)
        before = text_of(turn, prompt=True) if turn else ""
        if upto.startswith(before) and whole.startswith(upto):
            spans.append((len(before), len(upto)))
        elif turn == answers[-1]:
            raise _BadRecordError("the chat template does not continue its own generation prompt")
        else:
            spans.clear()
    if len(spans) < len(answers):
        del spans[:-1]
    return whole, spans


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _last_trained(
    ids: npt.NDArray[np.int32],
    inside: npt.NDArray[np.int64],
    special: frozenset[int],
    tokenizer: Any,
) -> int:
    """Return the index of an answer's last token: its end token, or its last one without any.

    What follows the end token (a line break in most templates) is the template's, not an answer.
    """
    if not len(inside):
        return -1
    ends = [int(i) for i in inside if int(ids[i]) in special]
    if ends and not tokenizer.decode(ids[ends[-1] + 1 : inside[-1] + 1].tolist()).strip():
        return ends[-1]
    return int(inside[-1])
