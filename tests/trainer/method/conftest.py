"""Fixtures for model, data, loss, evaluation and export: tiny real models, a byte tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch, Document
from trainer.model.draft import DraftConfig, DraftModel

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END, MASK = 256, 257, 258  # ids after the 256 bytes
VOCAB = 260


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Tests share the machine; more threads than cores make tiny products slower, not faster."""
    torch.set_num_threads(1)


def stirred(config: DraftConfig) -> DraftModel:
    """A draft whose weights are large enough that every path matters."""
    draft, generator = DraftModel(config, seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return draft


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, <|im_start|> 256, <|im_end|> 257, <|mask|> 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """See ``make_byte_tokenizer``."""
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """A random but fixed fp32 Llama of six layers over the byte tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=START,
        eos_token_id=END,
        initializer_range=0.1,  # makes a random model's answers differ from token to token
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_target_directory(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, byte_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """The random Llama and its tokenizer as a local directory, in several shards."""
    directory = tmp_path / "target"
    tiny_llama.save_pretrained(directory, max_shard_size="300KB")
    byte_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def train_config() -> Callable[..., TrainConfig]:
    """Make a configuration for the tiny target; sections are merged over the values here."""

    def make(**sections: dict[str, Any]) -> TrainConfig:
        base: dict[str, dict[str, Any]] = {
            "target": {"path": "unused", "dtype": "float32"},
            "data": {
                "path": "unused",
                "max_length": 64,
                "token_budget": 256,
                "max_batch_size": 4,
                "max_anchors": 16,
                "packing": False,
            },
            "draft": {
                "num_draft_layers": 1,
                "block_size": 4,
                "mask_token_id": MASK,
                "num_taps": 3,
                "dtype": "float32",
            },
            "loss": {"position_decay": 3.0},
            "run": {"device": "cpu"},
        }
        for name, values in sections.items():
            base[name] = base.get(name, {}) | values
        return TrainConfig.from_dict(base)

    return make


@pytest.fixture
def draft_config() -> Callable[..., DraftConfig]:
    """Make a draft configuration of width 32 with two taps."""

    def make(**changes: Any) -> DraftConfig:
        layers = changes.pop("num_draft_layers", 2)
        values: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_draft_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "vocab_size": 40,
            "block_size": 4,
            "mask_token_id": 39,
            "target_layer_ids": (1, 3),
            "num_target_layers": 6,
            "layer_types": ("full_attention",) * layers,
            "dtype": "float32",
        }
        return DraftConfig(**values | changes)

    return make


@pytest.fixture
def two_documents() -> Batch:
    """A row of documents of 9 and 7 tokens of 0..38, three blocks and a padded one.

    With blocks of 5 the trained slots are 1 . 1 1 behind anchor 1 (another speaker's token),
    1 1 1 1 behind 4 and 1 1 1 . behind 12 (the document's end).
    """
    mask = "0" + "11011111" + "1111111" + "00"
    return Batch(
        index=0,
        epoch=0,
        input_ids=torch.randint(0, 39, (1, 18), generator=torch.Generator().manual_seed(3)),
        loss_mask=torch.tensor([[c == "1" for c in mask]]),
        document_ids=torch.tensor([[0] * 9 + [1] * 7 + [-1] * 2], dtype=torch.int32),
        position_ids=torch.tensor([[*range(9), *range(7), 0, 0]]),
        anchor_positions=torch.tensor([[1, 4, 12, 0]]),
        anchor_keep=torch.tensor([[True, True, True, False]]),
        documents=(Document(0, 0, 0, 9), Document(1, 0, 9, 7)),
        num_tokens=16,
        num_anchors=3,
    )
