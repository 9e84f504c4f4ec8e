"""Compiled layers give what the model's own give, in a fixed number of graphs, or do not run."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer import tiny_targets
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import TargetConfig
from trainer.errors import TargetError
from trainer.model import recurrent_kernels, row_scaled
from trainer.model.compiled_target import CompiledTarget, fill, forward_sizes
from trainer.model.settling import Settled, settle
from trainer.model.target import ROWS, Target

VOCAB = 64
TAPS = (0, 1, 3)
KINDS = ("llama", "qwen3", "hybrid-text", "hybrid")
# Functions of a layer: two a kind; a hybrid has two kinds, and without Triton its convolution.
GRAPHS = {"llama": 2, "qwen3": 2, "hybrid-text": 5, "hybrid": 5}
# Beyond a chunk of 64 of the delta rule, and within the reach of its convolution of four.
DOCUMENTS = [torch.arange(n) * 7 % VOCAB for n in (70, 1, 3, 30, 2)]


@pytest.fixture
def gate() -> Iterator[CompileGate]:
    """A gate that traces as for a GPU, and runs the graphs without code of its own."""
    made = CompileGate(GateSettings(backend="eager"))
    yield made
    made.close()
    torch._dynamo.reset()


def target(kind: str, **own: Any) -> Target:
    return Target(tiny_targets.KINDS[kind](vocab_size=VOCAB, **own), TAPS)


def settled(made: Target, gate: CompileGate, **config: Any) -> Settled:
    values = {"path": "none", "dtype": "float32"} | config
    return settle(made, TargetConfig(**values), gate, forward_tokens=256, compiles=True)


def features(made: Target, gate: CompileGate, documents: list[Tensor]) -> list[Tensor]:
    key = "target"
    return gate.run(key, lambda: made.document_features(documents), library=True)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_give_the_taps_of_the_model_in_few_graphs_a_size(
    kind: str, gate: CompileGate
):
    made = target(kind)
    finding = settled(made, gate, compile="on").compiled
    assert finding.passed
    assert max(finding.differences) < 1e-5
    assert finding.sizes == (128, 256)
    assert gate.stats.num_graphs == finding.num_graphs == 2 * GRAPHS[kind]
    found = features(made, gate, DOCUMENTS)
    for one, document in zip(found, DOCUMENTS, strict=True):
        (alone,) = made.document_features([document], ROWS)
        torch.testing.assert_close(one, alone, atol=2e-5, rtol=1e-5)
    changed = features(
        made, gate, [DOCUMENTS[0] + 1 - VOCAB * (DOCUMENTS[0] == 63), *DOCUMENTS[1:]]
    )
    assert not torch.equal(changed[0], found[0])
    assert all(torch.equal(a, b) for a, b in zip(changed[1:], found[1:], strict=True))
    gate.seal()  # other lengths need no other graph
    for lengths in ([200], [128], [5, 5], [64, 64, 64]):
        features(made, gate, [torch.arange(n) % VOCAB for n in lengths])
    assert gate.stats.num_graphs == 2 * GRAPHS[kind]


@pytest.mark.parametrize("kind", ["qwen3", "hybrid-text"])
def test_joined_weights_take_no_memory_beside_the_model(kind: str, gate: CompileGate):
    made = target(kind)
    (before,) = made.document_features(DOCUMENTS[:1], ROWS)
    compiled = CompiledTarget(made.decoder, TAPS, gate, forward_tokens=128)
    own = {part.untyped_storage().data_ptr() for part in made.model.parameters()}
    for layer in compiled.layers:
        for weight in [*layer.weights[0], *layer.weights[1]]:
            assert weight is None or weight.untyped_storage().data_ptr() in own
    (after,) = made.document_features(DOCUMENTS[:1], ROWS)
    torch.testing.assert_close(after, before)


def test_a_document_that_no_size_holds_goes_through_the_model_itself(gate: CompileGate):
    made = target("llama")
    settled(made, gate, compile="on")
    graphs = gate.stats.num_graphs
    long = torch.arange(300) % VOCAB
    (found,) = features(made, gate, [long])
    assert torch.equal(found, made.document_features([long], ROWS)[0])
    assert gate.stats.num_graphs == graphs


def test_layers_whose_self_test_fails_are_not_taken(gate: CompileGate):
    made = target("llama")
    # A hook that only the module runs: as any change to a layer that the functions do not know.
    layer: Any = made.layers[2]
    layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 1.5, *inputs[1:]))
    found = settled(made, gate)
    assert made.compiled is None
    assert len(found.warnings) == 1
    assert "as in transformers (the self-test failed; taps differ" in found.warnings[0]
    taps = found.compiled.differences
    assert max(taps[:2]) < 1e-5  # before the hook
    assert taps[2] > 0.05
    with pytest.raises(TargetError, match=r"self-test failed.*set target\.compile to off"):
        settled(made, gate, compile="on")


def test_a_kernel_that_cannot_run_leaves_the_layers_as_they_are(gate: CompileGate):
    def broken(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("out of resource:\nshared memory")

    made = target("hybrid-text")
    parts = [part for layer in made.layers for part in layer.children()]
    for part in parts:
        if hasattr(part, "in_proj_qkv"):
            part.chunk_gated_delta_rule = broken  # type: ignore[assignment]
    found = settled(made, gate)
    assert made.compiled is None
    assert "the self-test cannot run: out of resource: shared memory" in found.warnings[0]
    with pytest.raises(TargetError, match=r"cannot run: out of.*set target\.compile to off"):
        settled(made, gate, compile="on")


@pytest.mark.parametrize(
    ("kind", "own", "reason"),
    [
        ("moe", {}, "Qwen3MoeModel is none of LlamaModel"),
        ("llama", {"attention_bias": True}, "layer 0: it has a product with a bias"),
        ("llama", {"hidden_act": "gelu"}, "layer 0: it has an activation that is not SiLU"),
        ("hybrid", {}, "flash-linear-attention, whose delta rule they need, is not installed"),
    ],
)
def test_unknown_layers_stay_as_they_are_and_say_why(
    kind: str, own: dict[str, Any], reason: str, gate: CompileGate
):
    made = target(kind, **own)
    found = settled(made, gate)
    assert made.compiled is None
    assert found.warnings == []
    assert reason in str(found)
    assert gate.stats.num_graphs == 0
    if kind != "hybrid":  # insisting on it takes the fallback
        with pytest.raises(TargetError, match=rf"target\.compile: on cannot be had: {reason}"):
            settled(made, gate, compile="on")


def test_nothing_is_compiled_where_the_run_compiles_nothing(gate: CompileGate):
    made = target("llama")
    config = TargetConfig(path="none", dtype="float32")
    found = settle(made, config, gate, forward_tokens=256, compiles=False)
    assert made.compiled is None
    assert "as in transformers (nothing is compiled)" in str(found)


def test_fp8_is_refused_on_the_cpu(gate: CompileGate):
    with pytest.raises(TargetError, match=r"target\.fp8: rows cannot be had: .*an NVIDIA GPU"):
        settled(target("llama"), gate, fp8="rows")


def test_rows_of_a_quantised_weight_keep_three_bits_each_at_its_own_scale():
    weight = torch.randn(5, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0])[:, None]
    made = row_scaled.quantise(weight)
    assert made.values.dtype == torch.float8_e4m3fn
    again = made.values.float() * made.scales[0, :, None]
    # Normal numbers of e4m3 are within 1/16; smaller ones within half of the least step, 2**-10.
    # A scale is moved by less than 1/32, so that a row's product with itself is exact.
    limit = torch.maximum(weight.abs() / 16, made.scales[0, :, None] * 2**-10) + weight.abs() / 32
    assert bool(((again - weight).abs() <= limit).all())
    plain = weight[:4].abs().amax(1) / 448
    assert made.scales[0, :4].tolist() == pytest.approx(plain.tolist(), rel=1 / 32)
    torch.testing.assert_close((again * weight).sum(1), weight.square().sum(1))


def test_forwards_hold_every_document_once_in_the_sizes_that_cost_least():
    sizes = forward_sizes(1000)
    assert sizes == (128, 256, 512, 1024)
    lengths = [700, 300, 250, 90, 30]  # 1,370 tokens
    made = list(fill(lengths, sizes))
    assert sorted(i for _, group in made for i in group) == [0, 1, 2, 3, 4]
    assert all(sum(lengths[i] for i in group) <= size for size, group in made)
    assert [size for size, _ in made] == [1024, 256, 128]
    assert [size for size, _ in fill([1024], sizes)] == [1024]
    assert [size for size, _ in fill([100], sizes)] == [128]
    with pytest.raises(TargetError, match="a document of 1025 tokens; a forward takes 1024"):
        list(fill([1025], sizes))


def test_the_convolution_of_fla_is_offered_where_its_own_package_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: dict[str, Any] = {}

    def convolve(x: Tensor, weight: Tensor, bias: Any, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, shape=x.shape, weight=weight, bias=bias)
        return x * 2, None

    names = ("fla", "fla.modules", "fla.modules.causal_conv1d")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].causal_conv1d = convolve  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "causal_conv1d", raising=False)
    assert not recurrent_kernels.offer_convolution("llama")
    assert "causal_conv1d" not in sys.modules
    try:
        assert recurrent_kernels.offer_convolution("qwen3_5_text")
        assert recurrent_kernels.offer_convolution("qwen3_5_text")  # once more changes nothing
        offered: Any = sys.modules["causal_conv1d"]
        x, ends = torch.randn(1, 3, 5), torch.tensor([0, 2, 5])
        out = offered.causal_conv1d_fn(x, torch.ones(3, 4), activation="silu", cu_seq_lens_q=ends)
    finally:
        sys.modules.pop("causal_conv1d", None)
    assert torch.equal(out, x * 2)
    assert seen["shape"] == (1, 5, 3)
    assert (seen["activation"], seen["cu_seqlens"] is ends) == ("silu", True)
    assert recurrent_kernels.origin(offered.causal_conv1d_fn).startswith("flash-linear-attention")
