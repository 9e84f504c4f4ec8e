"""Rules that look at the target beside the export: mask token, sizes, rope, embedding and head."""

from collections.abc import Iterator
from typing import Any

import torch
from jinja2 import TemplateError

from trainer.export import speculators
from trainer.export.files import CONFIG
from trainer.export.findings import FAIL, OK, WARN, Finding
from trainer.export.rules import Rule, Subject
from trainer.export.target_files import TargetFiles


def mask_token_rule(subject: Subject) -> Iterator[Finding]:
    """The mask token is an embedding row that is no stop, template or ordinary token."""
    draft, target = subject.draft, subject.target
    mask = draft.mask_token_id
    where = f"{CONFIG}: {'dflash_config.' if subject.is_zlab else ''}mask_token_id"
    rows = draft.vocab_size if target is None else target.embedding.shape[0]
    if not 0 <= mask < min(rows, draft.vocab_size):
        told = f"{mask}: embedding rows are 0..{min(rows, draft.vocab_size) - 1}"
        yield Finding(FAIL, "mask token", told, where, "use the id of training", (38,))
        return
    if target is None:
        told = f"{mask} of {draft.vocab_size} rows; its meaning needs --target"
        yield Finding(OK, "mask token", told)
        return
    bad = mask_misuse(target, mask)
    if bad:
        fix = "train with a reserved or unused id"
        yield Finding(FAIL, "mask token", f"{mask} {bad}", where, fix, (38,))
    else:
        told = f"{mask} of {rows} rows: no stop token, not in the chat template, no ordinary token"
        yield Finding(OK, "mask token", told)


def mask_misuse(target: TargetFiles, mask: int) -> str | None:
    """Return why an id cannot be the mask token of this target; None when it can."""
    if mask in target.stop_ids:
        return "is a stop token of the target"
    tokenizer = target.tokenizer
    if mask >= len(tokenizer):
        return None  # a padded row: no text becomes this token
    text = str(tokenizer.convert_ids_to_tokens(mask))
    special = mask in tokenizer.added_tokens_decoder or mask in tokenizer.all_special_ids
    if not special:
        return f"({text!r}) is an ordinary token and occurs in text"
    if text in str(tokenizer.chat_template or "") or mask in _rendered(tokenizer):
        return f"({text!r}) is part of the chat template"
    return None


def _rendered(tokenizer: Any) -> list[int]:
    """Return the tokens of a small chat; none where the target has no template for it."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    if not tokenizer.chat_template:
        return []
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, ValueError):  # the template's own refusal
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def target_rule(subject: Subject) -> Iterator[Finding]:
    """The target has the sizes that the draft was made for."""
    target, draft = subject.target, subject.draft
    if target is None:
        told = "sizes, rope, mask token and tokenizer were not compared with a target"
        fix = "name the target's directory with --target"
        yield Finding(WARN, "target", told, "--target", fix)
        return
    text = target.text_config
    theta = target.rope_theta
    pairs = [
        ("hidden_size", draft.hidden_size, int(text.hidden_size), (42,)),
        ("num_target_layers", draft.num_target_layers, target.num_layers, (22,)),
        ("vocab_size", draft.vocab_size, int(text.vocab_size), (44,)),
        ("rope_theta", draft.rope_theta, draft.rope_theta if theta is None else theta, (25,)),
    ]
    fix = "use the target that the draft was trained for"
    for key, mine, its, faults in pairs:
        if mine != its:
            told = f"{mine}, the target has {its}"
            yield Finding(FAIL, "target", told, f"{CONFIG}: {key}", fix, faults)
    rows = {target.embedding.shape[0], target.head.shape[0], draft.vocab_size}
    if len(rows) > 1:
        told = (
            f"embedding {target.embedding.shape[0]} rows, head {target.head.shape[0]}, vocab_size"
            f" {draft.vocab_size}: engines then do not share the head and nothing is accepted"
        )
        fix = "pad the target's vocabulary to one size, in its weights and its config.json"
        yield Finding(FAIL, "head", told, f"{target.directory.name}/config.json", fix, (44,))
    elif all(mine == its for _, mine, its, _ in pairs):
        yield Finding(OK, "target", f"sizes, rope and {draft.vocab_size} rows are the target's")


def own_head_rule(subject: Subject) -> Iterator[Finding]:
    """Embedding, head and vocabulary maps of the speculators layout are the target's."""
    if subject.is_zlab:
        return
    files, infos = subject.files, subject.files.infos
    mapped = [name for name in (speculators.TO_DRAFT, speculators.TO_TARGET) if name in infos]
    reduced = speculators.reduces_vocabulary(subject.raw)
    if reduced and len(mapped) < 2:
        told = f"draft_vocab_size {subject.raw['draft_vocab_size']} without t2d and d2t"
        fix = "copy the directory again; drafted ids cannot be told without the maps"
        yield Finding(FAIL, "vocabulary", told, f"{CONFIG}: draft_vocab_size", fix, (44,))
        return
    if reduced:
        yield from _map_findings(subject)
    chosen = files.read(speculators.TO_DRAFT).bool() if reduced else None
    if subject.target is None:
        return
    its = {speculators.EMBEDDING: subject.target.embedding_name}
    its[speculators.HEAD] = subject.target.head_name
    for name, wanted in its.items():
        if name not in infos:
            continue
        mine, theirs = files.read(name), subject.target.read(wanted)
        if name == speculators.HEAD and chosen is not None:
            theirs = theirs[chosen] if len(theirs) == len(chosen) else theirs
        same = mine.shape == theirs.shape and torch.equal(mine, theirs.to(mine.dtype))
        fix = "convert again with the target that will serve"
        told = "is not the target's: drafts are then told by another head"
        yield (
            Finding(OK, "own head", f"{name} is the target's {wanted}")
            if same
            else Finding(FAIL, "own head", told, f"{infos[name].file}: {name}", fix, (1, 44))
        )


def _map_findings(subject: Subject) -> Iterator[Finding]:
    files = subject.files
    to_draft = files.read(speculators.TO_DRAFT).bool()
    to_target = files.read(speculators.TO_TARGET).long()
    rows = int(subject.raw["draft_vocab_size"])
    there = torch.arange(len(to_target)) + to_target
    agree = int(to_draft.sum()) == rows and torch.equal(there, to_draft.nonzero().flatten())
    fix = "copy t2d and d2t of one training run"
    told = f"t2d chooses {int(to_draft.sum())} tokens and d2t moves {rows}, not the same ones"
    yield (
        Finding(OK, "vocabulary", f"{rows} of {len(to_draft)} tokens, t2d and d2t agree")
        if agree
        else Finding(FAIL, "vocabulary", told, speculators.TO_TARGET, fix, (44,))
    )


RULES: tuple[Rule, ...] = (mask_token_rule, target_rule, own_head_rule)
