"""Measure a draft: greedy speculative decoding with the real target against plain decoding.

acceptance_length (tau) is the mean number of tokens emitted per verify call, accepted + 1, counted
while decoding. walk_acceptance_length is the cheap estimate: stored greedy answers are walked
block by block with teacher-forced drafts; it is expected, not measured.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DynamicCache

from trainer.data.dataset import Sample, split_answer
from trainer.errors import DataError, TargetError
from trainer.model.draft import DraftModel
from trainer.model.masks import FULL, BlockLayout
from trainer.model.target import FrozenHead, Target

# A gap between the two best logits below this many roundings of the larger is a near tie: a
# forward of one token and one of a block sum in another order and may then choose differently.
NEAR_TIE_ROUNDINGS = 4
NUM_RESAMPLES = 2000

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Decoded:
    """One answer. accepted: accepted tokens of each verify call; gaps: between best logits."""

    tokens: list[int]
    seconds: float
    emitted: list[int]
    accepted: list[int]
    gaps: list[float]
    tops: list[float]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over some answers; see Evaluation for the fields."""

    acceptance_length: float
    interval: tuple[float, float]
    by_position: list[float]
    num_prompts: int
    num_verify_calls: int

    @classmethod
    def of(cls, decoded: Sequence[Decoded], block_size: int) -> "Acceptance":
        """Sum up speculative answers."""
        emitted, calls = [sum(d.emitted) for d in decoded], [len(d.emitted) for d in decoded]
        accepted = [a for d in decoded for a in d.accepted]
        by_position = [
            _ratio([a >= k for a in accepted], [1] * len(accepted)) for k in range(1, block_size)
        ]
        interval = _bootstrap(emitted, calls)
        return cls(_ratio(emitted, calls), interval, by_position, len(decoded), sum(calls))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_length_interval": list(self.interval),
            "by_position": self.by_position,
            "num_prompts": self.num_prompts,
            "num_verify_calls": self.num_verify_calls,
        }


@dataclass(frozen=True)
class Difference:
    """Where a speculative answer first differs from the plain one. gap: of the plain logits."""

    prompt: int
    token: int
    gap: float
    near_tie: bool


@dataclass(frozen=True)
class PromptResult:
    """One prompt's decoding."""

    acceptance_length: float
    num_tokens: int
    num_verify_calls: int
    equal: bool


@dataclass(frozen=True)
class Evaluation:
    """Result of decoding every prompt both ways.

    by_position: share of verify calls that accepted slot k, k = 1..B-1. interval: 95 % bootstrap
    over prompts. lossless: True only with an fp32 target and every answer equal.
    """

    acceptance_length: float
    interval: tuple[float, float]
    by_position: list[float]
    prompts: list[PromptResult]
    differences: list[Difference]
    target_dtype: str
    block_size: int
    max_new_tokens: int
    num_tokens_speculative: int
    num_tokens_plain: int
    speculative_s: float
    plain_s: float

    @property
    def num_prompts(self) -> int:
        """Prompts decoded."""
        return len(self.prompts)

    @property
    def num_equal(self) -> int:
        """Prompts whose two answers are the same, token by token."""
        return sum(p.equal for p in self.prompts)

    @property
    def num_near_ties(self) -> int:
        """First differences at a near tie of the plain logits."""
        return sum(d.near_tie for d in self.differences)

    @property
    def lossless(self) -> bool:
        """Whether equality was exact and could be: lower precision never counts."""
        return self.target_dtype == "float32" and self.num_equal == self.num_prompts

    @property
    def speed_up(self) -> float | None:
        """Plain seconds / speculative seconds; None unless every answer is equal."""
        return self.plain_s / self.speculative_s if self.num_equal == self.num_prompts else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_length_interval": list(self.interval),
            "by_position": self.by_position,
            "num_prompts": self.num_prompts,
            "num_equal": self.num_equal,
            "equal_frac": self.num_equal / self.num_prompts,
            "num_near_ties": self.num_near_ties,
            "lossless": self.lossless,
            "target_dtype": self.target_dtype,
            "block_size": self.block_size,
            "max_new_tokens": self.max_new_tokens,
            "num_tokens_speculative": self.num_tokens_speculative,
            "num_tokens_plain": self.num_tokens_plain,
            "speculative_s": self.speculative_s,
            "plain_s": self.plain_s,
            "speed_up": self.speed_up,
            "prompts": [vars(p) for p in self.prompts],
            "differences": [vars(d) for d in self.differences],
        }


@dataclass(frozen=True)
class WalkEstimate:
    """Expected acceptance over stored answers; see ``walk``."""

    walk_acceptance_length: float
    interval: tuple[float, float]
    num_samples: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "walk_acceptance_length": self.walk_acceptance_length,
            "walk_acceptance_length_interval": list(self.interval),
            "num_walk_samples": self.num_samples,
        }


def evaluate(
    target: Target,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode every prompt plainly and speculatively, with the whole head.

    ``prompts`` are token ids. ``progress`` is called with (what, done, all). Raises: DataError
    without prompts or with an empty one.
    """
    if not prompts or not all(prompts):
        raise DataError("evaluation needs at least one prompt, and no empty one")
    head = target.head.to(target.device, draft.fc.weight.dtype)
    plain: list[Decoded] = []
    fast: list[Decoded] = []
    for number, prompt in enumerate(prompts):
        plain.append(decode_plain(target, prompt, max_new_tokens))
        fast.append(decode_speculative(target, draft, prompt, max_new_tokens, head=head))
        if progress is not None:
            progress("decoding", number + 1, len(prompts))
    roundings = NEAR_TIE_ROUNDINGS * torch.finfo(target.dtype).eps
    pairs = enumerate(zip(plain, fast, strict=True))
    found = [first_difference(i, p, f, roundings) for i, (p, f) in pairs]
    size = draft.config.block_size
    whole = Acceptance.of(fast, size)
    return Evaluation(
        acceptance_length=whole.acceptance_length,
        interval=whole.interval,
        by_position=whole.by_position,
        prompts=[
            PromptResult(
                _ratio([sum(f.emitted)], [len(f.emitted)]),
                len(f.tokens),
                len(f.emitted),
                different is None,
            )
            for f, different in zip(fast, found, strict=True)
        ],
        differences=[different for different in found if different is not None],
        target_dtype=str(target.dtype).removeprefix("torch."),
        block_size=size,
        max_new_tokens=max_new_tokens,
        num_tokens_speculative=sum(len(f.tokens) for f in fast),
        num_tokens_plain=sum(len(p.tokens) for p in plain),
        speculative_s=sum(f.seconds for f in fast),
        plain_s=sum(p.seconds for p in plain),
    )


@torch.no_grad()
def decode_plain(target: Target, prompt: Sequence[int], max_new_tokens: int) -> Decoded:
    """Greedy decoding, one token a forward, with a cache."""
    started = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    ids = torch.tensor([list(prompt)], device=target.device)
    tokens: list[int] = []
    gaps: list[float] = []
    tops: list[float] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in target.stop_ids):
        logits, _ = target.verify(ids, cache, keep_logits=1)
        best = logits[0, -1].topk(2).values
        tokens.append(int(logits[0, -1].argmax()))  # the same choice as in a block, ties included
        gaps.append(float(best[0] - best[1]))
        tops.append(float(best[0].abs()))
        ids = torch.tensor([tokens[-1:]], device=target.device)
    seconds = time.perf_counter() - started
    return Decoded(tokens, seconds, [], [], gaps, tops)


@torch.no_grad()
def decode_speculative(
    target: Target,
    draft: DraftModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    head: FrozenHead,
) -> Decoded:
    """Greedy decoding in blocks: the draft proposes, the target verifies a block in one forward.

    ``head`` is the target's in the draft's dtype. The tokens kept of a block are those the target
    chose itself, so the draft changes only how many come at a time.
    """
    started = time.perf_counter()
    verifier = Verifier(target)
    logits, taps = verifier.run(torch.tensor([list(prompt)], device=target.device), keep_logits=1)
    tokens = [int(logits[0, -1].argmax())]
    cache = draft.new_cache()
    draft.append(cache, taps)
    emitted: list[int] = []
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.stop_ids:
        block = _propose(draft, head, cache, tokens[-1])
        logits, taps = verifier.run(block, keep_logits=0)
        chosen = logits[0].argmax(-1)
        right = (block[0, 1:] == chosen[:-1]).int().cumprod(0)
        num_right = int(right.sum())
        verifier.keep(block, num_right + 1)
        draft.append(cache, taps[:, : num_right + 1])
        new = _until_stop(chosen[: num_right + 1].tolist(), target.stop_ids)
        new = new[: max_new_tokens - len(tokens)]
        tokens += new
        emitted.append(len(new))
        accepted.append(min(num_right, len(new)))
    return Decoded(tokens, time.perf_counter() - started, emitted, accepted, [], [])


def _propose(draft: DraftModel, head: FrozenHead, cache: Any, token: int) -> Tensor:
    """Return the block [token, drafted...]. Shapes: [1, B]."""
    size = draft.config.block_size
    block = torch.full((1, size), draft.config.mask_token_id, device=head.embedding.device)
    block[0, 0] = token
    hidden = draft.draft_block(cache, F.embedding(block, head.embedding), cache.length)
    block[:, 1:] = draft.choose(head, hidden, block[:, 0])
    return block


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens


class Verifier:
    """The target with its cache, and the way back from rejected tokens.

    A cache of full attention is cropped. Recurrent states and windows cannot be: the state before
    the block is kept and the accepted tokens run again (hybrid targets are wrong otherwise). After
    ``keep`` .cache is that of the kept tokens alone, bit for bit where it was replayed.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.cache = DynamicCache(config=target.model.config)
        self._croppable = target.layer_kinds == {FULL}
        self._before: Any = None

    def run(self, ids: Tensor, keep_logits: int) -> tuple[Tensor, Tensor]:
        """Run further tokens. Shapes: ids [1, T]; returns logits and taps as Target.verify."""
        if not self._croppable:
            self._before = copy.deepcopy(self.cache)
        return self._target.verify(ids, self.cache, keep_logits)

    def keep(self, ids: Tensor, count: int) -> None:
        """Forget all but the first ``count`` of the tokens ``ids`` [1, T] just run."""
        rejected = ids.shape[1] - count
        if rejected == 0:
            return
        if self._croppable:
            self.cache.crop(-rejected)  # a positive number of tokens is refused since 5.x
        else:
            self.cache = self._before
            self._target.verify(ids[:, :count], self.cache, 1)


def first_difference(
    number: int, plain: Decoded, fast: Decoded, roundings: float
) -> Difference | None:
    """Return where two answers first differ, None when they are equal.

    ``roundings``: relative gap of the two best plain logits up to which it is a near tie.
    """
    if plain.tokens == fast.tokens:
        return None
    shared = min(len(plain.tokens), len(fast.tokens))
    pairs = zip(plain.tokens, fast.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    if at >= len(plain.gaps):
        raise TargetError("speculative decoding went on after plain decoding had stopped")
    gap = plain.gaps[at]
    return Difference(number, at, gap, gap <= roundings * max(plain.tops[at], 1.0))


@torch.no_grad()
def walk(
    target: Target,
    draft: DraftModel,
    samples: Sequence[Sample],
    *,
    progress: Progress | None = None,
) -> WalkEstimate:
    """Estimate the acceptance length from stored greedy answers, without decoding.

    Every answer token is an anchor of one draft forward with the answer's own taps; the chain of
    blocks is then walked from the first token. Expected only: real decoding leaves the stored text
    at the first rounding difference, and does so sooner on memorised text.
    """
    head = target.head.to(target.device, draft.fc.weight.dtype)
    emitted: list[int] = []
    calls: list[int] = []
    for number, sample in enumerate(samples):
        prompt, answer = split_answer(sample)
        if len(answer) > 1:
            accepted = _accepted_everywhere(target, draft, head, prompt, answer)
            tokens, num_calls = walk_blocks(accepted, len(answer))
            emitted.append(tokens)
            calls.append(num_calls)
        if progress is not None:
            progress("walking", number + 1, len(samples))
    if not calls:
        raise DataError("no sample has an answer of 2 tokens to walk")
    return WalkEstimate(_ratio(emitted, calls), _bootstrap(emitted, calls), len(calls))


def walk_blocks(accepted: Sequence[int], length: int) -> tuple[int, int]:
    """Walk an answer of ``length`` tokens; accepted[i] belongs to the block whose anchor is i.

    The first token comes from the prompt's forward. Returns (tokens emitted, verify calls).
    """
    at, num_calls = 0, 0
    while at < length - 1:
        at = min(at + accepted[at] + 1, length - 1)
        num_calls += 1
    return length - 1, num_calls


def _accepted_everywhere(
    target: Target, draft: DraftModel, head: FrozenHead, prompt: list[int], answer: list[int]
) -> list[int]:
    """Return leading right guesses of a block at each answer token; the last has no successor."""
    device, size = target.device, draft.config.block_size
    ids = torch.tensor(prompt + answer, device=device)
    (features,) = target.document_features([ids])
    positions = torch.arange(len(ids), device=device)[None]
    anchors = torch.arange(len(prompt), len(ids) - 1, device=device)[None]
    slots = torch.arange(size, device=device)
    blocks = torch.full((anchors.shape[1], size), draft.config.mask_token_id, device=device)
    blocks[:, 0] = ids[anchors[0]]
    where = anchors[0][:, None] + slots
    layout = BlockLayout.of(
        anchors, torch.ones_like(anchors, dtype=torch.bool), torch.zeros_like(positions)
    )
    hidden = draft(
        F.embedding(blocks.view(1, -1), head.embedding),
        features[None],
        positions,
        where.view(1, -1),
        draft.attention.masks(layout, draft.config.rules),
    )
    guess = draft.choose(head, hidden.view(-1, size, hidden.shape[-1]), blocks[:, 0])
    truth = ids[where[:, 1:].clamp(max=len(ids) - 1)]
    right = (guess == truth) & (where[:, 1:] < len(ids))
    accepted: list[int] = right.int().cumprod(1).sum(1).tolist()
    return accepted


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Ratio of sums; 1.0 without any call (an answer that ended at its first token)."""
    return float(sum(above) / sum(below)) if sum(below) else 1.0


def _bootstrap(emitted: Sequence[int], calls: Sequence[int]) -> tuple[float, float]:
    """95 % interval of the ratio, prompts drawn with replacement, always with the same seed."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(calls), size=(NUM_RESAMPLES, len(calls)))
    above, below = np.asarray(emitted)[drawn].sum(1), np.asarray(calls)[drawn].sum(1)
    ratios = np.where(below > 0, above / np.maximum(below, 1), 1.0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
