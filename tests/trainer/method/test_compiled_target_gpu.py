"""Compiled layers of every known target on an NVIDIA GPU, with the kernels that training uses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.model import target_layers

SCRIPT = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(500, exit=True)  # what hangs is told by its stacks
import torch
from trainer.model import recurrent_kernels
recurrent_kernels.offer_convolution("qwen3_5_text")
from tests.trainer import tiny_targets
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import TargetConfig
from trainer.model.batching import settle_batching
from trainer.model.settling import settle
from trainer.model.target import ROWS, Target

DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
gate, told = CompileGate(GateSettings()), {}
def run(name, kind, config, **own):
    torch._dynamo.reset()  # kinds whose layers are alike share graphs in a process
    made = tiny_targets.KINDS[kind](**SIZES | own).to("cuda", torch.bfloat16)
    target = Target(made, (0, 1, 3))
    told[name] = {"batching": None}
    settled = settle(target, TargetConfig(path="none", **config), gate, forward_tokens=256,
                     compiles=True)
    told[name] = settled.to_dict() | {"text": str(settled)}
    graphs = gate.stats.num_graphs
    documents = [torch.arange(n) % 512 for n in (120, 70, 3, 50, 1)]
    key = ("target", "cuda:0")
    found = gate.run(key, lambda: target.document_features(documents), library=True)
    alone = [target.document_features([one], ROWS)[0] for one in documents]
    told[name]["difference"] = max(
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, alone)
    )
    told[name]["more_graphs"] = gate.stats.num_graphs - graphs
if sys.argv[1] == "dense":
    for kind in ("llama", "qwen3"):
        run(kind, kind, {})
    run("fp8", "qwen3", {"fp8": "rows"})
else:
    run("hybrid", "hybrid-text", {"batching": "packed"}, **DELTA)
gate.close()
print(json.dumps(told))
"""

pytestmark = [
    pytest.mark.gpu,
    # The first compile of a process takes most of a minute, and fla tries some sixty kernels.
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HAS_FLA = importlib.util.find_spec("fla") is not None


def told_by_a_process(kinds: str) -> dict[str, Any]:
    """What a process of its own finds: transformers looks for kernels once."""
    argv = [sys.executable, "-c", SCRIPT, kinds]
    root = Path(__file__).parents[3]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=520, cwd=root)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return told_by_a_process("dense")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_convolution_kernel_equals_its_plain_form(dtype: torch.dtype):
    from trainer.model import delta_kernels  # noqa: PLC0415 - Triton is there for CUDA alone

    norm = target_layers.Norm(1e-6)
    sizes = target_layers.DeltaSizes(2, 6, 64, 64, norm, norm)
    assert delta_kernels.fits(sizes)
    whole = torch.randn(37, 2 * 2 * 64 + 6 * 64 + 5, device="cuda", dtype=dtype)
    x, kernel = whole[:, :-5], torch.randn(x_width(sizes), 4, device="cuda", dtype=dtype)
    position = torch.cat([torch.arange(n) for n in (20, 1, 2, 14)]).int().cuda()
    found = delta_kernels.convolve_heads(x, position, kernel, sizes)
    wanted = target_layers.convolve_heads(sizes)(x, position, kernel)
    limit = 2e-6 if dtype == torch.float32 else 1e-2
    for one, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, plain, atol=limit, rtol=limit)


def x_width(sizes: target_layers.DeltaSizes) -> int:
    return 2 * sizes.num_key_heads * sizes.key_dim + sizes.num_value_heads * sizes.value_dim


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_dense_layers_compile_and_give_the_taps_of_the_model(told: dict[str, Any], kind: str):
    assert told[kind]["compiled"]["sizes"] == [128, 256]
    assert told[kind]["compiled"]["num_graphs"] == 4
    assert told[kind]["difference"] < 0.03
    assert told[kind]["more_graphs"] == 0


def test_fp8_rows_move_the_taps_little(told: dict[str, Any]):
    assert "products in FP8 rows" in told["fp8"]["text"]
    assert 1e-3 < told["fp8"]["difference"] < 0.3
    assert told["fp8"]["more_graphs"] == 0


@pytest.mark.skipif(not HAS_FLA, reason="needs flash-linear-attention (fla-core)")
def test_hybrid_is_packed_with_the_kernels_of_fla_and_compiled_around_them():
    told = told_by_a_process("hybrid")
    batching = told["hybrid"]["batching"]
    assert batching["passed"]
    assert batching["batching"] == "packed"
    assert "(the fallback of transformers)" not in str(batching["kernels"])
    assert told["hybrid"]["compiled"]["num_graphs"] == 8
    assert told["hybrid"]["difference"] < 0.05
    assert told["hybrid"]["more_graphs"] == 0
