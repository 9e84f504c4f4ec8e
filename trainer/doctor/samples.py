"""The data itself: how much is trained, how long it is, what occurs in it, what is missing."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.doctor.findings import Finding, problem, warning

# Below this almost nothing is learnt from what the target reads; above, prompts are trained too.
LEAST_SUPERVISED_FRAC, MOST_SUPERVISED_FRAC = 0.02, 0.95
_MANY_CUT_FRAC = 0.2
_MANY_DUPLICATES_FRAC = 0.01
_RARE_FRAC = 0.01  # of a thinking mode
_LOOK_FOR_THINKING = 2000  # chats that are decoded for it
_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_QUANTILES = (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1.0))


@dataclass(frozen=True)
class MaskToken:
    """How many samples hold the mask token, and the first of them with the place in it."""

    num_samples: int
    sample_id: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class Thinking:
    """Chats that reason, that were told not to, and without any trace of either."""

    num_on: int
    num_off: int
    num_none: int
    template_knows: bool


@dataclass(frozen=True)
class DataFacts:
    """Counts over all samples. histogram: (up to so many tokens, samples), in rising order.

    num_at_max: samples of data.max_length tokens, so all that were cut there.
    """

    path: str
    num_samples: int
    num_bad: int
    bad_lines: tuple[str, ...]
    num_tokens: int
    num_supervised: int
    lengths: dict[str, int]
    histogram: tuple[tuple[int, int], ...]
    num_at_max: int
    num_duplicates: int
    mask_token: MaskToken
    thinking: Thinking
    largest_id: int

    @property
    def supervised_frac(self) -> float:
        """Share of tokens that are trained."""
        return self.num_supervised / max(self.num_tokens, 1)


def look_at_data(dataset: Dataset, tokenizer: Any, config: TrainConfig) -> DataFacts:
    """Read every sample once. Memory: about 100 bytes a sample, for the digests of duplicates."""
    mask_id = config.draft.mask_token_id
    seen: set[bytes] = set()
    num_supervised = num_masked = largest = 0
    first: tuple[int, int] | None = None
    for sample in dataset.samples:
        ids = sample.input_ids
        num_supervised += int(sample.loss_mask.sum())
        largest = max(largest, int(ids.max()))
        seen.add(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
        places = np.flatnonzero(ids == mask_id)
        if len(places):
            num_masked += 1
            first = first or (sample.sample_id, int(places[0]))
    lengths = dataset.lengths
    return DataFacts(
        path=dataset.path,
        num_samples=len(dataset.samples),
        num_bad=dataset.num_bad,
        bad_lines=tuple(str(bad) for bad in dataset.bad_lines[:3]),
        num_tokens=int(lengths.sum()),
        num_supervised=num_supervised,
        lengths={name: int(np.quantile(lengths, q, method="higher")) for name, q in _QUANTILES},
        histogram=histogram(lengths, config.data.max_length),
        num_at_max=int((lengths >= config.data.max_length).sum()),
        num_duplicates=len(dataset.samples) - len(seen),
        mask_token=MaskToken(num_masked, *first) if first else MaskToken(0),
        thinking=_thinking(dataset, tokenizer, config.seed),
        largest_id=largest,
    )


def histogram(lengths: npt.NDArray[np.int64], max_length: int) -> tuple[tuple[int, int], ...]:
    """Count samples in eight ranges of equal width up to ``max_length``; empty ones too."""
    edges = sorted({-(-max_length * part // 8) for part in range(1, 9)})
    places = np.searchsorted(edges, lengths, side="left").clip(max=len(edges) - 1)
    counts = np.bincount(places, minlength=len(edges))
    return tuple((edge, int(count)) for edge, count in zip(edges, counts, strict=True))


def _thinking(dataset: Dataset, tokenizer: Any, seed: int) -> Thinking:
    """Decode a random part of the chats and look for their reasoning."""
    total = len(dataset.samples)
    draw = np.random.default_rng(seed).permutation(total)[:_LOOK_FOR_THINKING]
    counts = {"on": 0, "off": 0, "none": 0}
    for number in sorted(draw.tolist()):
        counts[mode_of(tokenizer.decode(dataset.samples[number].input_ids.tolist()))] += 1
    template = str(tokenizer.chat_template)
    knows = "enable_thinking" in template or "</think>" in template
    return Thinking(counts["on"], counts["off"], counts["none"], knows)


def mode_of(text: str) -> str:
    """Return on, off (an empty thought) or none for the text of a chat."""
    thoughts = _THOUGHT.findall(text)
    if any(thought.strip() for thought in thoughts):
        return "on"
    return "off" if thoughts else "none"


def data_findings(facts: DataFacts, config: TrainConfig) -> list[Finding]:
    """Judge the data by itself."""
    where, found = facts.path, []
    if facts.mask_token.num_samples:
        found.append(_mask_token_finding(facts, config))
    found += _supervision_findings(facts)
    if facts.num_bad:
        text = f"{facts.num_bad} lines gave no sample: {'; '.join(facts.bad_lines)}"
        found.append(warning("bad-lines", text, where, "mend or remove these lines"))
    if facts.num_at_max > _MANY_CUT_FRAC * facts.num_samples:
        share = facts.num_at_max / facts.num_samples
        text = f"{share:.0%} of the samples are cut at data.max_length {config.data.max_length}"
        fix = "raise data.max_length: a cut answer teaches only its beginning"
        found.append(warning("cut", text, where, fix))
    if facts.num_duplicates > _MANY_DUPLICATES_FRAC * facts.num_samples:
        text = f"{facts.num_duplicates} of {facts.num_samples} samples occur a second time"
        fix = "remove them (trainer prepare does): they weigh double and hide overfitting"
        found.append(warning("duplicates", text, where, fix))
    return found + _thinking_findings(facts)


def _mask_token_finding(facts: DataFacts, config: TrainConfig) -> Finding:
    mask, mask_id = facts.mask_token, config.draft.mask_token_id
    return problem(
        "mask-token",
        f"{mask.num_samples} samples hold the mask token {mask_id}, first sample {mask.sample_id}"
        f" at token {mask.position}",
        facts.path,
        "set draft.mask_token_id to an id that never occurs in data",
    )


def _supervision_findings(facts: DataFacts) -> list[Finding]:
    share, where = facts.supervised_frac, facts.path
    if share < LEAST_SUPERVISED_FRAC:
        text = f"only {share:.2%} of the tokens are trained (expected 10 % to 90 %)"
        fix = "see that answers are there and not cut off by data.max_length, behind long prompts"
        return [problem("mask-fraction", text, where, fix)]
    if share > MOST_SUPERVISED_FRAC:
        text = f"{share:.1%} of the tokens are trained: hardly any prompt is left out"
        fix = "see that roles are right: user messages must not be answers"
        return [warning("mask-fraction", text, where, fix)]
    return []


def _thinking_findings(facts: DataFacts) -> list[Finding]:
    mix = facts.thinking
    looked_at = mix.num_on + mix.num_off + mix.num_none
    if not mix.template_knows or not looked_at:
        return []
    plain = mix.num_off + mix.num_none
    absent = [
        name
        for name, count in (("on", mix.num_on), ("off", plain))
        if count < _RARE_FRAC * looked_at
    ]
    fix = "add chats of that mode (trainer regenerate --thinking on|off), or serve the other alone"
    return [
        warning(
            "thinking-mix",
            f"the chat template knows thinking, but hardly any chat has it {name}: drafts collapse"
            " in a mode that they never saw",
            facts.path,
            fix,
        )
        for name in absent
    ]
