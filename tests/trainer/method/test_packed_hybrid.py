"""A hybrid target is packed where its kernels keep documents apart, and nowhere else.

The kernels are stand-ins for `flash-linear-attention` and `causal-conv1d`, which need a GPU: plain
loops that obey the boundaries they are given, or, when told so, that do not. A process of its own
imports them, since transformers looks for kernels once.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DELTA_RULE = '''
"""The gated delta rule token by token; a document begins with an empty state."""
import torch

OBEYS = [True]

def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    begins = set() if cu_seqlens is None or not OBEYS[0] else set(cu_seqlens.tolist())
    empty = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    state, out = initial_state if initial_state is not None else empty, []
    for t in range(q.shape[1]):
        state = (empty if t in begins else state) * g[:, t].exp()[..., None, None]
        new = (v[:, t] - (state * k[:, t, :, :, None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1), state if output_final_state else None

def fused_recurrent_gated_delta_rule(*args, **kwargs):
    return chunk_gated_delta_rule(*args, **kwargs)
'''
CONVOLUTION = '''
"""A causal convolution that starts anew with each document."""
import torch
import torch.nn.functional as F

OBEYS = [True]

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    whole = seq_idx is None or not OBEYS[0]
    lengths = [x.shape[2]] if whole else seq_idx[0].bincount().tolist()
    weight, parts = weight[:, None], []
    for part in torch.split(x, lengths, 2):
        padded = F.pad(part, (weight.shape[2] - 1, 0))
        parts.append(F.conv1d(padded, weight, bias, groups=x.shape[1]))
    out = torch.cat(parts, 2)
    return F.silu(out) if activation else out

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise RuntimeError("no token is decoded here")
'''
SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:]
import causal_conv1d, fla.ops.gated_delta_rule as delta
import torch
torch.set_num_threads(1)
from tests.trainer import tiny_targets
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import TargetConfig
from trainer.errors import TargetError
from trainer.model.settling import settle
from trainer.model.batching import check_batching, settle_batching
from trainer.model.target import Target

target = Target(tiny_targets.hybrid(vocab_size=64), (1, 3))
documents = [torch.arange(9), torch.arange(20, 36), torch.arange(40, 43)]
told = {"auto": settle_batching(target, "auto").batching}
told["packed"] = settle_batching(target, "packed").to_dict() | {"settled": target.batching}
pairs = zip(target.document_features(documents), documents)
told["apart"] = max(
    float((found - target.document_features([one], "rows")[0]).abs().max()) for found, one in pairs
)
gate = CompileGate(GateSettings(backend="eager"))
config = TargetConfig(path="none", dtype="float32")
settled = settle(target, config, gate, forward_tokens=128, compiles=True)
told["compiled"] = settled.to_dict()["compiled"]
delta.OBEYS[0] = False
told["compiled leak"] = settle(target, config, gate, forward_tokens=128, compiles=True).warnings
delta.OBEYS[0] = True
for what, kernel in (("state", delta), ("convolution", causal_conv1d)):
    kernel.OBEYS[0] = False
    told[what] = check_batching(target, "packed").to_dict()
    try:
        settle_batching(target, "packed")
    except TargetError as error:
        told[what]["refused"] = str(error)
    kernel.OBEYS[0] = True
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trainer finds with the stand-ins installed."""
    site = tmp_path_factory.mktemp("site")
    kernels = {"fla/ops/gated_delta_rule": DELTA_RULE, "causal_conv1d": CONVOLUTION}
    for name, text in kernels.items():
        directory = site / name
        directory.mkdir(parents=True)
        (directory / "__init__.py").write_text(text)
    for name, version in (("flash_linear_attention", "9.1"), ("causal_conv1d", "9.2")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    argv = [sys.executable, "-c", SCRIPT, str(site), str(Path(__file__).parents[3])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


pytestmark = pytest.mark.timeout(120)  # the first of these tests starts a Python with torch


def test_packed_hybrid_is_taken_where_every_kernel_knows_the_boundaries(told: dict[str, Any]):
    assert (told["packed"]["passed"], told["packed"]["settled"]) == (True, "packed")
    assert told["packed"]["max_leak"] == 0.0
    assert told["apart"] < 2e-5
    assert told["packed"]["kernels"] == {
        "attention": "sdpa, by document",
        "delta rule": "flash-linear-attention 9.1",
        "convolution": "causal-conv1d 9.2",
    }


def test_auto_leaves_a_hybrid_in_rows_even_then(told: dict[str, Any]):
    assert told["auto"] == "rows"


@pytest.mark.parametrize("what", ["state", "convolution"])
def test_packed_hybrid_is_refused_where_one_kernel_runs_on(told: dict[str, Any], what: str):
    assert told[what]["passed"] is False
    assert told[what]["max_leak"] > 100 * told[what]["tolerance"]
    assert "set target.batching to rows" in told[what]["refused"]
    assert "flash-linear-attention 9.1" in told[what]["refused"]


def test_compiled_layers_hand_the_boundaries_to_the_delta_rule(told: dict[str, Any]):
    assert told["compiled"]["sizes"] == [128]
    assert max(told["compiled"]["differences"]) < 1e-5
    assert told["compiled"]["num_graphs"] == 5


def test_compiled_layers_are_not_taken_when_the_delta_rule_runs_on(told: dict[str, Any]):
    (warning,) = told["compiled leak"]
    assert "the self-test failed" in warning
