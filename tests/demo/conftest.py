"""A wheel like the published one, but with a model of two layers and 64 units."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import astuple
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from dflashctl.demo.smollm2 import Wheel

HIDDEN, HEADS, FEED_FORWARD, NUM_LAYERS, NUM_SPECIAL = 64, 2, 96, 2, 17
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONVERT = """
import sys
from pathlib import Path
from dflashctl.demo.smollm2 import Wheel, convert
wheel, out, *pin = sys.argv[1:]
sys.exit(0 if convert(Path(wheel), Path(out), Wheel(*pin)) else 50)
"""


def _convert_argv(wheel: Path, out: Path, pin: Wheel) -> list[str]:
    return [sys.executable, "-c", CONVERT, str(wheel), str(out), *astuple(pin)]


@pytest.fixture(scope="session")
def convert_argv():
    """A Python of its own that converts: exit 0 when it made `out`, 50 when it was there."""
    return _convert_argv


@pytest.fixture(scope="session")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Wheel]:
    return make_wheel(tmp_path_factory.mktemp("wheel"), TEMPLATE)


@pytest.fixture(scope="session")
def wheel_without_template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Wheel]:
    return make_wheel(tmp_path_factory.mktemp("wheel"), "{{ messages[0]['content'] }}")


@pytest.fixture(scope="session")
def tiny_model(tiny_wheel: tuple[Path, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheel, pin = tiny_wheel
    out = tmp_path_factory.mktemp("model") / "tiny"
    done = subprocess.run(_convert_argv(wheel, out, pin), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return out


def make_wheel(directory: Path, template: str) -> tuple[Path, Wheel]:
    """A wheel that pip accepts, with a GGUF inside, and its pin."""
    gguf = directory / "tiny.gguf"
    write_tiny_gguf(gguf, template)
    path = directory / "llm_tiny-0.1-py3-none-any.whl"
    info = "llm_tiny-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_tiny/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path, Wheel("llm-tiny", "0.1", path.name, digest, "llm_tiny/tiny.gguf")


def write_tiny_gguf(path: Path, template: str) -> None:
    """A llama GGUF with byte-level tokens; matrices in Q4_1, as the published one has them."""
    tokens = _tokens()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * NUM_SPECIAL + [1] * (len(tokens) - NUM_SPECIAL))
    writer.add_token_merges(["h e", "t he"])
    for name, number in {"bos": 1, "eos": 2, "unk": 0, "pad": 2}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(template)
    generator = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = generator.normal(0, 0.3, shape).astype(np.float32)
        if name == "blk.0.ffn_down.weight":
            values[0, :32] = exact_q4_1_block()
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def exact_q4_1_block() -> npt.NDArray[np.float32]:
    """32 values that Q4_1 keeps exactly: minimum -1, scale 1/512, codes 0 to 15 twice.

    -1 + 13/512 = -499/512 needs nine significant bits, so bf16 (eight) would round it.
    """
    return np.array([-1 + (column % 16) / 512 for column in range(32)], np.float32)


def _tokens() -> list[str]:
    named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special = named + [f"<reserved_{n}>" for n in range(NUM_SPECIAL - len(named))]
    # GPT-2's printable stand-ins for bytes: those that print stand for themselves, the others
    # follow from 256 upwards.
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [256 + n for n in range(256 - len(printing))]
    return special + [chr(code) for code in printing + hidden] + ["he", "the"]


def _shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (num_tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (HIDDEN // HEADS, HIDDEN),
            f"blk.{layer}.attn_v.weight": (HIDDEN // HEADS, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    return shapes
