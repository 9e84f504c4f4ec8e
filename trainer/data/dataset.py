"""Samples, and the data sets that hold them: all in memory, from a JSONL file of chats.

A directory made by ``trainer prepare`` is read by ``trainer.data.shards``; both kinds look the
same to batches, training and evaluation (``Dataset``).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.chat import BadRecordError, ChatEncoder, parse_line
from trainer.errors import DataError

# Its ids depend on the normaliser, the pre-tokeniser and the merges of a tokenizer.
_PROBE = "Ünïcode \uff11\uff12 A\u0301 don't 2,048.5\n\n  def f(x):\t# 你好 🙂 <think> </s>\r\n"


@dataclass(frozen=True)
class Sample:
    """One conversation. Shapes: input_ids [len] int32, loss_mask [len] bool."""

    sample_id: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BadLine:
    """A line, or a row of a table, that gave no sample; ``file`` where there are several."""

    number: int
    reason: str
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.number}" if self.file else f"line {self.number}"
        return f"{where}: {self.reason}"


class Dataset(Protocol):
    """What batches, training and evaluation ask of a data set; sample_id is the index."""

    @property
    def path(self) -> str:
        """Where it lies."""

    @property
    def sha256(self) -> str:
        """The digest that the manifest pins."""

    @property
    def samples(self) -> Sequence[Sample]:
        """All samples; read when they are indexed, where they do not lie in memory."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Shapes: [samples]."""

    @property
    def num_bad(self) -> int:
        """How many lines gave no sample."""

    @property
    def bad_lines(self) -> tuple[BadLine, ...]:
        """Which ones, and why."""

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise DataError when the mask token occurs in a sample."""


@dataclass(frozen=True)
class ChatDataset:
    """All samples of one file, in memory."""

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
                raise mask_token_error(self.path, sample, mask_token_id)


def mask_token_error(path: str, sample: Sample, mask_token_id: int) -> DataError:
    """Return the error that says where the mask token occurs."""
    at = int(np.flatnonzero(sample.input_ids == mask_token_id)[0])
    return DataError(
        f"{path}: sample {sample.sample_id} holds draft.mask_token_id {mask_token_id} at token"
        f" {at}; choose an id that never occurs in data"
    )


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """Load the target's tokenizer; raises DataError when it is absent, slow or has no template."""
    # Imported here: it takes seconds and 200 MB, and a process that compares chats needs none.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except Exception as error:  # a damaged file: KeyError of transformers, Exception of tokenizers
        text = f"{type(error).__name__}: {error}"
        raise DataError(f"target.path {path}: no tokenizer can be loaded: {text}") from error
    if not tokenizer.is_fast:
        raise DataError(f"target.path {path}: its tokenizer reports no offsets (tokenizer.json)")
    if not tokenizer.chat_template:
        raise DataError(f"target.path {path}: its tokenizer has no chat template")
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a sha256 of what ids mean: the vocabulary, which ids are special, and a probe's ids.

    Not of tokenizer.json, whose text changes with the version that saved it.
    """
    special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    facts = [sorted(tokenizer.get_vocab().items()), special, probe]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str:
    """Return the sha256 of the chat template."""
    text = json.dumps(tokenizer.chat_template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_chats(
    path: str | Path, tokenizer: Any, max_length: int, *, key: str = "data.path"
) -> ChatDataset:
    """Read, render and tokenise a JSONL file of chats; ``key`` is the setting that names it.

    Bad lines are counted with their number and reason. Raises: DataError when the file is missing
    or no line is usable.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{key} {path}: {error.strerror or error}") from error
    encoder = ChatEncoder(tokenizer, max_length)
    samples: list[Sample] = []
    bad: list[BadLine] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            encoded = encoder.encode(parse_line(line))
        except BadRecordError as error:
            bad.append(BadLine(number, str(error)))
        else:
            samples.append(Sample(len(samples), encoded.input_ids, encoded.loss_mask))
    if not samples:
        told = "; ".join(str(b) for b in bad[:3]) or "the file is empty"
        raise DataError(f"{key} {path}: no usable chat ({told})")
    return ChatDataset(str(path), hashlib.sha256(data).hexdigest(), tuple(samples), tuple(bad))


def split_answer(sample: Sample) -> tuple[list[int], list[int]]:
    """Return (prompt, first answer) of a sample: what decoding starts from and should give."""
    trained = np.flatnonzero(sample.loss_mask)
    start = int(trained[0])
    gaps = np.flatnonzero(np.diff(trained) > 1)
    end = int(trained[gaps[0]] if len(gaps) else trained[-1]) + 1
    return sample.input_ids[:start].tolist(), sample.input_ids[start:end].tolist()
