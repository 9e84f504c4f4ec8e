"""The mix of thinking modes, read from the text of the samples."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.trainer.method.conftest import byte_tokenizer, train_config
from trainer.data.dataset import ChatDataset, Sample
from trainer.doctor.samples import data_findings, look_at_data, mode_of

__all__ = ["byte_tokenizer", "train_config"]  # fixtures
ON = "<think>\nsix times seven\n</think>\n\n42"
OFF = "<think>\n\n</think>\n\n42"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (ON, "on"),
        (OFF, "off"),
        ("42", "none"),
        ("<think>cut off in the middle", "on"),
        (f"{OFF} then {ON}", "on"),
    ],
)
def test_mode_is_that_of_the_thoughts(text: str, mode: str) -> None:
    assert mode_of(text) == mode


def _data(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> ChatDataset:
    encoded = [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]
    samples = [Sample(i, ids, np.arange(len(ids)) > 4) for i, ids in enumerate(encoded)]
    return ChatDataset("chats.jsonl", "0" * 64, tuple(samples))


@pytest.mark.parametrize(
    ("texts", "absent"),
    [
        ([ON, OFF], []),
        ([ON, "42 is it, no doubt"], []),
        ([ON], ["on-off: off"]),
        ([OFF, "42 is it, no doubt"], ["on-off: on"]),
    ],
)
def test_mode_that_is_absent_is_warned_about_where_the_template_knows_thinking(
    byte_tokenizer: PreTrainedTokenizerFast, train_config: Any, texts: list[str], absent: list[str]
) -> None:
    byte_tokenizer.chat_template += "{% if enable_thinking %}{% endif %}"
    data = _data(byte_tokenizer, texts)
    facts = look_at_data(data, byte_tokenizer, train_config())
    mix = facts.thinking
    assert mix.num_on == sum("seven" in text for text in texts)
    assert (mix.num_on + mix.num_off + mix.num_none, mix.template_knows) == (len(texts), True)
    told = [f.what for f in data_findings(facts, train_config()) if f.name == "thinking-mix"]
    assert [f"on-off: {what.split(' has it ')[1].split(':')[0]}" for what in told] == absent


def test_template_without_thinking_needs_no_mix(
    byte_tokenizer: PreTrainedTokenizerFast, train_config: Any
) -> None:
    facts = look_at_data(_data(byte_tokenizer, ["plain answer"]), byte_tokenizer, train_config())
    assert facts.thinking.template_knows is False
    assert data_findings(facts, train_config()) == []
