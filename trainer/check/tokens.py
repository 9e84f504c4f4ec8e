"""Checks of the mask token and of the run's data: what the draft reads must be what it means."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.check.findings import FaultFoundError
from trainer.check.subject import Subject

_SCAN_BYTES = 1 << 30  # of the data file that are looked at for the mask token's own text
_NUM_CANDIDATES = 3
_ROLES = ("system", "user", "assistant")


def draft_shape(subject: Subject) -> str:
    """The draft's settings fit the target: taps, heads, mask token, layers."""
    shape = subject.draft_config
    kinds = ", ".join(dict.fromkeys(shape.layer_types))
    return (
        f"{subject.config.draft.variant}: {shape.num_draft_layers} layers ({kinds}), width"
        f" {shape.hidden_size}, block {shape.block_size}, taps"
        f" {', '.join(map(str, shape.target_layer_ids))} of {shape.num_target_layers} layers"
    )


def mask_token(subject: Subject) -> str:
    """The mask token has an embedding row and means nothing to the chat template or the data."""
    number = subject.config.draft.mask_token_id
    rows = int(subject.known.get_text_config().vocab_size)
    if not 0 <= number < rows:
        raise _refused(subject, f"{number} has no embedding row (rows are 0..{rows - 1})")
    if number in stop_ids(subject):
        raise _refused(subject, f"{number} ends an answer")
    used = template_ids(subject)
    if number in used:
        raise _refused(subject, f"{number} is written by the chat template")
    text = _text_of(subject, number)
    seen = _occurrence(subject, number)
    if seen is not None:
        raise _refused(subject, f"{number} ({text!r}) occurs in the data: {seen}")
    looked = f"{len(subject.data.samples)} samples"
    if subject.fast:
        looked = f"the first {looked}"
        if _is_added(subject, number):
            looked += f" and as text in {_scan(subject, text)} of data"
    kind = f"{text!r}, {'reserved' if _is_added(subject, number) else 'an ordinary token'}"
    kind = kind if text else "a row without a token"
    return f"{number} ({kind}) is row {number} of {rows}, absent from {looked}"


def _refused(subject: Subject, what: str) -> FaultFoundError:
    found = candidates(subject)
    fix = (
        f"set draft.mask_token_id to an id that never occurs, such as {', '.join(found)}"
        if found
        else "set draft.mask_token_id to an embedding row that never occurs in the data"
    )
    return FaultFoundError(
        f"draft.mask_token_id {what}", where="train.yaml: draft.mask_token_id", fix=fix
    )


def candidates(subject: Subject) -> list[str]:
    """Return ids that would do: reserved tokens that nothing uses, then rows without a token."""
    rows = int(subject.known.get_text_config().vocab_size)
    forbidden = stop_ids(subject) | template_ids(subject) | _named_ids(subject.tokenizer)
    for sample in subject.data.samples[:256]:
        forbidden |= set(np.unique(sample.input_ids).tolist())
    added = subject.tokenizer.added_tokens_decoder
    reserved = [i for i in sorted(added, reverse=True) if i < rows and added[i].special]
    unused = range(len(subject.tokenizer), rows)
    free = [i for i in (*reserved, *unused) if i not in forbidden][:_NUM_CANDIDATES]
    return [
        f"{i} ({added[i].content})" if i in added else f"{i} (a row without a token)" for i in free
    ]


def _named_ids(tokenizer: Any) -> set[int]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    return {i for i in (getattr(tokenizer, name, None) for name in names) if i is not None}


def stop_ids(subject: Subject) -> set[int]:
    """Return the ids that end an answer, from every file of the target that names some."""
    held: list[Any] = [
        subject.tokenizer.eos_token_id,
        getattr(subject.known.get_text_config(), "eos_token_id", None),
        getattr(subject.known, "eos_token_id", None),
    ]
    path = Path(subject.config.target.path) / "generation_config.json"
    if path.is_file():
        held.append(json.loads(path.read_text()).get("eos_token_id"))
    found: set[int] = set()
    for ids in held:
        found |= set(ids) if isinstance(ids, list | tuple) else {ids} - {None}
    return found


def template_ids(subject: Subject) -> set[int]:
    """Return every id of chats that the template renders, its own markers among them."""
    found: set[int] = set()
    for text in _rendered(subject.tokenizer):
        found |= set(subject.tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def _rendered(tokenizer: Any) -> Iterator[str]:
    """Yield chats with and without the prompt of an answer, as far as the template takes them."""
    system, user, answer = ({"role": role, "content": "a"} for role in _ROLES)
    for messages in ([user], [user, answer], [system, user], [system, user, answer, user]):
        for prompt in (False, True):
            for extra in ({}, {"enable_thinking": False}):
                try:
                    yield str(
                        tokenizer.apply_chat_template(
                            messages, tokenize=False, add_generation_prompt=prompt, **extra
                        )
                    )
                except Exception:  # noqa: BLE001, S112 - a template refuses as it likes
                    continue


def _text_of(subject: Subject, number: int) -> str:
    return str(subject.tokenizer.decode([number])) if number < len(subject.tokenizer) else ""


def _is_added(subject: Subject, number: int) -> bool:
    return number in subject.tokenizer.added_tokens_decoder


def _occurrence(subject: Subject, number: int) -> str | None:
    """Return where the token occurs in the samples looked at, or its text in the data file."""
    for sample in subject.data.samples:
        places = np.flatnonzero(np.asarray(sample.input_ids) == number)
        if len(places):
            return f"token {int(places[0])} of sample {sample.sample_id}"
    if not subject.fast or not _is_added(subject, number):
        return None
    path = Path(subject.config.data.path)
    text = _text_of(subject, number).encode()
    if not path.is_file() or not text or path.stat().st_size == 0:
        return None
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(text, 0, _SCAN_BYTES)
        if at < 0:
            return None
        return f"line {data[:at].count(bytes([10])) + 1} of {path}"


def _scan(subject: Subject, text: str) -> str:
    path = Path(subject.config.data.path)
    if not path.is_file() or not text:
        return "no text"
    size = path.stat().st_size
    return "all" if size <= _SCAN_BYTES else f"the first {_SCAN_BYTES >> 20} MiB"


def answers(subject: Subject) -> str:
    """The loss mask covers answers and nothing else would be learnt: neither all nor nothing."""
    pinned = subject.manifest.dataset_sha256
    if not subject.fast and subject.data.sha256 != pinned:
        raise FaultFoundError(
            f"the data has sha256 {subject.data.sha256[:12]}, the manifest {pinned[:12]}",
            where=subject.config.data.path,
            fix="put the data of the launch back, or launch a new tag",
        )
    total = sum(len(sample.input_ids) for sample in subject.data.samples)
    trained = sum(int(np.asarray(sample.loss_mask).sum()) for sample in subject.data.samples)
    opening = [s.sample_id for s in subject.data.samples if bool(np.asarray(s.loss_mask)[0])]
    if opening:
        raise FaultFoundError(
            f"sample {opening[0]} is trained from its first token: no prompt stands before it",
            where=subject.config.data.path,
            fix="look at the chat template and the data: an answer must follow a prompt",
        )
    bad = getattr(subject.data, "num_bad", 0)
    return (
        f"{trained} of {total} tokens ({trained / total:.0%}) are trained in"
        f" {len(subject.data.samples)} samples; {bad} lines gave none"
    )
