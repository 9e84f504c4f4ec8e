"""Evaluation in training: held-out prompts decoded with the present draft and the live target.

It happens between two steps, in the thread of drafter 0, on the device of the first target that is
sound: the other drafters wait at their next exchange, the target threads fill their queue and then
wait as well. Nothing of the training is touched: the draft is copied, no random number is drawn,
and each prompt holds the gate's shared side as a forward of the target does.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compile_gate import CompileGate
from trainer.contract.config import EvaluationConfig, TrainConfig
from trainer.data.dataset import Sample, load_chats, split_answer
from trainer.evaluate import Acceptance, Decoded, decode_speculative
from trainer.model.draft import DraftModel
from trainer.model.target import FrozenHead, Target

# Called before each prompt with what comes next; False ends the evaluation.
KeepGoing = Callable[[str], bool]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set, as token ids."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


def load_prompt_sets(config: TrainConfig, tokenizer: Any) -> list[PromptSet]:
    """Read the prompts: what stands before the first answer of each chat.

    Raises: DataError naming a file that is missing or has no usable chat.
    """
    found = []
    for name, path in config.evaluation.prompts.items():
        key = f"evaluation.prompts.{name}"
        samples = load_chats(path, tokenizer, config.data.max_length, key=key).samples
        chosen = samples[: config.evaluation.num_prompts]
        prompts = tuple(tuple(split_answer(sample)[0]) for sample in chosen)
        found.append(PromptSet(name, prompts))
    return found


def num_in_training(sets: Sequence[PromptSet], samples: Sequence[Sample]) -> dict[str, int]:
    """Count the prompts of each set that are also the beginning of a training sample."""
    wanted = {prompt for one in sets for prompt in one.prompts}
    lengths = {len(prompt) for prompt in wanted}
    seen: set[tuple[int, ...]] = set()
    for sample in samples:
        start = int(sample.loss_mask.argmax())  # the first answer's first token
        if start in lengths:
            seen.add(tuple(sample.input_ids[:start].tolist()))
    return {one.name: sum(prompt in seen for prompt in one.prompts) for one in sets}


def draft_copy(
    draft: DraftModel, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> DraftModel:
    """Return a frozen copy of the draft on ``device``, with ``weights`` in place of its own.

    The tensors are handed to deepcopy ready made: none is held twice on the draft's device, and
    no constructor draws random numbers. Shapes: weights by parameter name, any float dtype.
    """
    memo: dict[int, Any] = {id(draft.attention): draft.attention}
    for name, param in draft.named_parameters():
        source = param.data if weights is None else weights[name]
        own = source.to(device, param.dtype, copy=True)
        memo[id(param)] = nn.Parameter(own, requires_grad=False)
    for buffer in draft.buffers():
        memo[id(buffer)] = buffer.to(device, copy=True)
    return copy.deepcopy(draft, memo).eval()


@dataclass(frozen=True)
class HeldOut:
    """Prompts, and the target that decodes them."""

    sets: Sequence[PromptSet]
    target: Target
    gate: CompileGate
    config: EvaluationConfig

    def measure(self, draft: DraftModel, keep_going: KeepGoing) -> dict[str, Any] | None:
        """Decode every prompt with ``draft``, which is on the target's device.

        Returns the acceptance over all prompts, and of each data set below ``datasets``; None when
        ``keep_going`` ended it.
        """
        head = self.target.head.to(self.target.device, draft.fc.weight.dtype)
        decoded: dict[str, list[Decoded]] = {}
        for one in self.sets:
            decoded[one.name] = []
            for number, prompt in enumerate(one.prompts):
                if not keep_going(f"decodes prompt {number + 1}/{len(one.prompts)} of {one.name}"):
                    return None
                decoded[one.name].append(self._decode(draft, head, prompt))
        size = draft.config.block_size
        everything = [answer for answers in decoded.values() for answer in answers]
        parts = {name: Acceptance.of(answers, size) for name, answers in decoded.items()}
        whole = Acceptance.of(everything, size).to_dict()
        return whole | {"datasets": {name: part.to_dict() for name, part in parts.items()}}

    def _decode(self, draft: DraftModel, head: FrozenHead, prompt: tuple[int, ...]) -> Decoded:
        def body() -> Decoded:
            longest = self.config.max_new_tokens
            return decode_speculative(self.target, draft, prompt, longest, head=head)

        device = self.target.device
        # The key of the target's own forwards, which the warm-up has seen.
        return self.gate.run(("target", str(device)), body, library=True)
