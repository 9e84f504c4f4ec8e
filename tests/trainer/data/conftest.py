"""A byte tokenizer in a directory, as a target has it, and files of chats."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.data.prepare_options import PrepareOptions

# Like Qwen's: thinking off closes an empty block in the prompt, thinking on opens one, and of
# earlier answers the reasoning is left out.
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<e>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n<think>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}"
    "{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_tokenizer(template: str = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, <s> 256, <e> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<e>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tokenizer with the plain template."""
    path = tmp_path_factory.mktemp("target")
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def thinking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tokenizer with a template that thinks."""
    path = tmp_path_factory.mktemp("thinking")
    make_tokenizer(TEMPLATE).save_pretrained(path)
    return path


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A record of one question and one answer; ``more`` goes to the answer."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, **more},
    ]
    return {"messages": messages}


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Write records as JSON Lines; text stands for itself."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def options(tmp_path: Path, target: Path) -> Callable[..., PrepareOptions]:
    """Make options for one process and small shards: options(*inputs, **changes)."""

    def make(*inputs: Path, **changes: Any) -> PrepareOptions:
        values: dict[str, Any] = {
            "output": tmp_path / "out",
            "target": str(target),
            "max_length": 200,
            "shard_samples": 4,
            "num_workers": 1,
        }
        return PrepareOptions(inputs=inputs, **values | changes)

    return make
