"""Rejected tokens leave no trace in the target's cache: full, hybrid, experts and windows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from tests.trainer import tiny_targets
from trainer.evaluate import Verifier
from trainer.model.target import Target

VOCAB = 64
PROMPT = torch.arange(3, 14)[None]
BLOCKS = [torch.arange(start, start + 4)[None] for start in (20, 30, 40)]
KEPT = (1, 3, 4)  # nothing drafted is right, two of three are, all are


def windowed() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCAB, **sizes, **heads)).eval()


KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_targets.llama(vocab_size=VOCAB),
    "moe": lambda: tiny_targets.moe(vocab_size=VOCAB),
    "hybrid": lambda: tiny_targets.hybrid(vocab_size=VOCAB),
    "hybrid-moe": lambda: tiny_targets.hybrid_moe(vocab_size=VOCAB),
    "windowed": windowed,
}


def states(cache: Any) -> list[Tensor]:
    """Every tensor of a cache: keys, values, recurrent states and those of convolutions."""
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            for one in value:
                collect(one)
        elif isinstance(value, dict):
            collect(list(value.values()))

    for layer in cache.layers:
        collect(vars(layer))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", BLOCKS[1:], ids=["one draft", "another"])
def test_the_cache_is_that_of_the_kept_tokens_whatever_was_drafted(kind: str, draft: Tensor):
    target = Target(KINDS[kind](), (1, 3))
    drafted, straight = Verifier(target), Verifier(target)
    drafted.run(PROMPT, 1)
    straight.run(PROMPT, 1)
    for block, kept in zip(BLOCKS, KEPT, strict=True):
        tried = torch.cat((block[:, :kept], draft[:, : 4 - kept]), 1)
        drafted.run(tried, 0)
        drafted.keep(tried, kept)
        straight.run(block[:, :kept], 0)  # never drafted: only what was kept
        pairs = list(zip(states(drafted.cache), states(straight.cache), strict=True))
        assert len(pairs) >= 2 * tiny_targets.NUM_LAYERS
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            if kind.startswith("hybrid"):
                assert torch.equal(found, wanted)
    after = torch.tensor([[5, 6]])
    logits, taps = drafted.run(after, 0)
    wanted_logits, wanted_taps = straight.run(after, 0)
    torch.testing.assert_close(logits, wanted_logits, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(taps, wanted_taps, atol=1e-4, rtol=1e-5)


def test_a_hybrid_that_only_cropped_would_keep_a_trace():
    """What the rollback is for: cropping leaves the recurrent state of the rejected tokens."""
    target = Target(KINDS["hybrid"](), (1, 3))
    drafted, straight = Verifier(target), Verifier(target)
    for verifier in (drafted, straight):
        verifier.run(PROMPT, 1)
    drafted.run(BLOCKS[0], 0)
    straight.run(BLOCKS[0][:, :1], 0)
    pairs = zip(states(drafted.cache), states(straight.cache), strict=True)
    same_shape = [(a, b) for a, b in pairs if a.shape == b.shape]
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in same_shape)
