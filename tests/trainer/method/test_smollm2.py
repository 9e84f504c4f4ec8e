"""The real SmolLM2-135M-Instruct, as `make model` prepares it."""

import json
from pathlib import Path

import pytest
import torch

from trainer.contract.config import DraftModelConfig, TargetConfig
from trainer.data.dataset import load_chats, load_tokenizer, split_answer
from trainer.evaluate import evaluate
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.target import Target, load_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
DRAFT = DraftModelConfig(
    num_draft_layers=1, block_size=4, mask_token_id=16, num_taps=5, dtype="float32"
)


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Target:
    return load_target(TargetConfig(path=str(smollm2), dtype="float32"), DRAFT, "cpu")


def test_taps_are_the_published_layers_and_hugging_faces_states(target: Target):
    assert target.target_layer_ids == (1, 8, 14, 20, 27)
    ids = torch.arange(100, 112)
    (features,) = target.document_features([ids])
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([states[number + 1][0] for number in target.target_layer_ids], -1)
    torch.testing.assert_close(features, wanted)


def test_template_without_generation_marker_trains_the_answer_alone(
    target: Target, smollm2: Path, tmp_path: Path
):
    tokenizer = load_tokenizer(str(smollm2))
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    dataset = load_chats(path, tokenizer, 192)
    dataset.check_mask_token(16)
    prompt, answer = split_answer(dataset.samples[0])
    assert tokenizer.decode(prompt).endswith(
        "What is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] in target.stop_ids


def test_speculative_answer_is_the_plain_one_and_names_paris(target: Target, smollm2: Path):
    tokenizer = load_tokenizer(str(smollm2))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    draft = DraftModel(DraftConfig.from_target(target.text_config, DRAFT, target.num_layers))
    assert draft.norm.weight[0].item() == pytest.approx(0.3)  # its embeddings are tied
    found = evaluate(target, draft, [prompt], 12)
    assert found.lossless
    assert found.num_tokens_plain > 3
