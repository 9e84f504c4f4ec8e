"""The on-policy score tells the target's own answers, regenerated, from foreign ones."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.trainer import tiny_targets
from tests.trainer.conftest import NUM_WORDS, SPECIALS
from tests.trainer.regenerate.conftest import Answer, ChatServer, chat_server, completion
from trainer import assembly
from trainer.data.dataset import Sample, load_chats, load_tokenizer
from trainer.doctor.policy import PolicyFacts, on_policy, policy_findings
from trainer.model.target import Target
from trainer.regenerate.options import Options, Sampling
from trainer.regenerate.run import regenerate

__all__ = ["chat_server"]  # a fixture
MakeRun = Callable[..., Path]
END_TOKEN_ID = NUM_WORDS + SPECIALS.index("<|end|>")


class GreedyModel:
    """Answers as an OpenAI-compatible server does, by plain greedy decoding of the real model.

    It ends at any special token, so that the text of an answer has the tokens that were decoded.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(str(directory))
        self._model = AutoModelForCausalLM.from_pretrained(directory)
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, body: dict[str, Any], _times: int) -> Answer:
        ids = self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answer: list[int] = []
        with self._lock:
            while len(answer) < body["max_tokens"]:
                token = int(self._model(torch.tensor([ids + answer])).logits[0, -1].argmax())
                if token in self._tokenizer.all_special_ids:
                    break
                answer.append(token)
        ended = len(answer) < body["max_tokens"] and token == self._tokenizer.eos_token_id
        text = self._tokenizer.decode(answer)
        return completion(text, finish="stop" if ended else "length", num_tokens=len(answer))


@pytest.fixture(scope="module")
def speaker(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama with opinions, whose answers are words and the end token."""
    path = tmp_path_factory.mktemp("speaker")
    load_tokenizer(str(tiny_target)).save_pretrained(path)
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=46,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            eos_token_id=END_TOKEN_ID,
        )
    )
    with torch.no_grad():
        for token in range(NUM_WORDS, 46):
            model.lm_head.weight[token] *= token == END_TOKEN_ID
    model.save_pretrained(path)
    return path


@pytest.fixture
def target(make_run: MakeRun, speaker: Path) -> Target:
    _, config = assembly.read_manifest(make_run(target={"path": str(speaker)}))
    return assembly.load_targets(config, [torch.device("cpu")])["cpu"]


def score(target: Target, path: Path, speaker: Path) -> PolicyFacts:
    samples = load_chats(path, load_tokenizer(str(speaker)), 32).samples
    return on_policy(target, samples, seed=0)


def test_regenerated_answers_score_one_and_foreign_ones_far_below(
    target: Target, speaker: Path, tiny_chats: Path, chat_server: ChatServer, tmp_path: Path
) -> None:
    chat_server.answer = GreedyModel(speaker)
    options = Options(
        input=tiny_chats,
        output=tmp_path / "own.jsonl",
        base_url=chat_server.base_url,
        sampling=Sampling(model="tiny", temperature=0.0, max_tokens=8),
    )
    regenerate(options)
    own = score(target, options.output, speaker)
    foreign = score(target, tiny_chats, speaker)
    assert own.num_tokens > 100
    assert own.agreement > 0.99
    assert own.surprise < 0
    assert foreign.agreement < 0.3
    assert policy_findings(own, "own.jsonl") == []
    (finding,) = policy_findings(foreign, "foreign.jsonl")
    assert (finding.level, finding.name) == ("warning", "on-policy")
    assert "python -m trainer regenerate" in finding.fix


@pytest.mark.parametrize("kind", tiny_targets.KINDS)
def test_score_is_that_of_a_plain_forward_for_every_kind_of_target(kind: str) -> None:
    torch.manual_seed(1)
    target = Target(tiny_targets.KINDS[kind](vocab_size=40), (1, 2))
    rng = np.random.default_rng(2)
    samples = [
        Sample(i, rng.integers(0, 40, length, np.int32), rng.random(length) < 0.5)
        for i, length in enumerate((9, 14))
    ]
    hits, log_probs, entropies = [], [], []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()
        with torch.no_grad():
            probs = target.model(input_ids=ids[None]).logits[0].double().softmax(-1)
        for place in range(1, len(ids)):
            if sample.loss_mask[place]:
                before = probs[place - 1]
                hits.append(bool(before.argmax() == ids[place]))
                log_probs.append(float(before[ids[place]].log()))
                entropies.append(float(-(before * before.log()).sum()))
    found = on_policy(target, samples, seed=0)
    assert found.num_tokens == len(hits)
    assert found.agreement == pytest.approx(sum(hits) / len(hits))
    assert found.mean_log_prob == pytest.approx(sum(log_probs) / len(hits), abs=1e-5)
    assert found.mean_entropy == pytest.approx(sum(entropies) / len(hits), abs=1e-5)


def test_drawn_answers_are_no_warning_and_surprise_beyond_chance_is() -> None:
    drawn = PolicyFacts(32, 3000, 0.72, -0.9, 0.88, 0.02)
    assert policy_findings(drawn, "x") == []
    assert len(policy_findings(replace(drawn, mean_entropy=0.7), "x")) == 1
    noisy = replace(drawn, mean_entropy=0.7, surprise_error=0.15)  # 0.2 is within two errors
    assert policy_findings(noisy, "x") == []
    assert len(policy_findings(replace(drawn, agreement=0.2), "x")) == 1
