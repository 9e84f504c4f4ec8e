"""What every kind of draft must hold: tensors, export, drafting as trained, a gain by training."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.trainer.method.conftest import stirred
from trainer.contract.config import VARIANTS as NAMES
from trainer.contract.config import TrainConfig
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import Batch, BatchMaker, BatchPlan, place_features
from trainer.errors import CheckpointError
from trainer.evaluate import decode_plain, evaluate, walk
from trainer.export import export_draft, load_export
from trainer.export.zlab import tensor_shapes
from trainer.loss import draft_loss
from trainer.model.draft import DraftConfig, DraftModel, measured_tap_scale
from trainer.model.target import FrozenHead, Target, default_target_layer_ids
from trainer.model.variants import VARIANTS

MakeConfig = Callable[..., DraftConfig]
MakeTrainConfig = Callable[..., TrainConfig]
SMALL = {
    "conv_group_size": 8,
    "selector_rank": 6,
    "selector_top_k": 4,
    "gru_hidden_dim": 10,
    "emb_dim": 6,
}
SUCCESSORS = ("dflash2", "domino")
KEYS = {
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 4,
    },
    "domino": {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": False,
        "gru_hidden_dim": 10,
        "emb_dim": 6,
    },
}
ARCHITECTURES = {"dflash2": "DFlash2DraftModel", "domino": "DFlashDraftModel"}


def test_every_name_of_the_configuration_is_a_kind():
    assert tuple(VARIANTS) == NAMES


@pytest.mark.parametrize(
    ("variant", "num_tensors"), [("dflash", 25), ("dflash2", 25 + 3 + 4 * 2), ("domino", 25 + 4)]
)
def test_tensors_are_those_of_the_table(draft_config: MakeConfig, variant: str, num_tensors: int):
    config = draft_config(variant=variant, **SMALL)
    found = {name: tuple(t.shape) for name, t in DraftModel(config).named_parameters()}
    assert found == tensor_shapes(config)
    assert len(found) == num_tensors


def test_dflash2_for_qwen3_8_27b_has_as_many_weights_as_the_published_one(draft_config: MakeConfig):
    config = draft_config(
        variant="dflash2",
        num_draft_layers=5,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        target_layer_ids=(5, 19, 33, 47, 61),
        num_target_layers=64,
    )
    total = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    assert total == pytest.approx(1.92e9, rel=0.005)  # "1.92B"; plain DFlash has 1.73


@pytest.mark.parametrize("variant", SUCCESSORS)
def test_export_is_read_back_as_the_same_draft(
    draft_config: MakeConfig, tmp_path: Path, variant: str
):
    own = {name: value for name, value in SMALL.items() if name in KEYS[variant]}
    draft = stirred(draft_config(variant=variant, block_size=5, **own))
    export_draft(draft, tmp_path / "export")
    loaded = load_export(tmp_path / "export")
    assert loaded.config == draft.config
    for name, tensor in draft.named_parameters():
        assert torch.equal(tensor, loaded.get_parameter(name))


@pytest.mark.parametrize("variant", SUCCESSORS)
def test_configuration_of_the_export_tells_engines_what_it_is(
    draft_config: MakeConfig, tmp_path: Path, variant: str
):
    export_draft(DraftModel(draft_config(variant=variant, **SMALL)), tmp_path / "export")
    read = json.loads((tmp_path / "export" / "config.json").read_text())
    assert read["architectures"] == [ARCHITECTURES[variant]]
    assert KEYS[variant].items() <= read["dflash_config"].items()


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [("dflash2", "conv_kernel_size", 4), ("domino", "shift_label", True)],
)
def test_checkpoint_of_another_meaning_is_refused_by_its_key(
    draft_config: MakeConfig, tmp_path: Path, variant: str, key: str, value: object
):
    export_draft(DraftModel(draft_config(variant=variant, **SMALL)), tmp_path / "export")
    path = tmp_path / "export" / "config.json"
    read = json.loads(path.read_text())
    read["dflash_config"][key] = value
    path.write_text(json.dumps(read))
    with pytest.raises(CheckpointError, match=f"{key} {value}: only"):
        load_export(tmp_path / "export")


def anchored(batch: Batch, ids: Tensor) -> Batch:
    """The batch with other tokens, every one of them trained."""
    return replace(batch, input_ids=ids, loss_mask=torch.ones_like(batch.loss_mask))


@pytest.mark.parametrize("variant", NAMES)
def test_training_finds_every_slot_right_of_what_decoding_drafts(
    draft_config: MakeConfig, train_config: MakeTrainConfig, two_documents: Batch, variant: str
):
    torch.manual_seed(0)
    draft = stirred(draft_config(variant=variant, block_size=5, **SMALL))
    head = FrozenHead(torch.randn(40, 32), torch.randn(40, 32) * 0.3)
    taps, anchor = torch.randn(1, 18, 64), 3
    cache, ids = draft.new_cache(), two_documents.input_ids.clone()
    draft.append(cache, taps[:, :anchor])
    block = torch.full((1, 5), 39)
    block[0, 0] = ids[0, anchor]
    hidden = draft.draft_block(cache, head.embedding[block], anchor)
    ids[0, anchor + 1 : anchor + 5] = draft.choose(head, hidden, block[:, 0])[0]
    batch = replace(
        anchored(two_documents, ids),
        anchor_positions=torch.tensor([[anchor, 0]]),
        anchor_keep=torch.tensor([[True, False]]),
    )
    sums = draft_loss(draft, head, batch, taps, train_config())
    assert sums.hits.tolist() == [1, 1, 1, 1]
    assert int(sums.accepted_sum) == 4
    if variant != "dflash":  # and it is not what the head alone would draft
        alone = VARIANTS["dflash"].choose(draft, head, hidden, block[:, 0])[0]
        assert not torch.equal(alone, ids[0, anchor + 1 : anchor + 5])


@pytest.mark.parametrize("variant", NAMES)
def test_blocks_drafted_together_are_those_drafted_alone(draft_config: MakeConfig, variant: str):
    draft = stirred(draft_config(variant=variant, block_size=5, **SMALL))
    torch.manual_seed(1)
    head = FrozenHead(torch.randn(40, 32), torch.randn(40, 32) * 0.3)
    hidden, first = torch.randn(600, 5, 32), torch.randint(0, 40, (600,))  # several chunks
    together = draft.choose(head, hidden, first)
    assert together.shape == (600, 4)
    for i in (0, 255, 256, 599):
        alone = draft.choose(head, hidden[i : i + 1], first[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("name", ["decay", "dpace"])
def test_loss_and_gradients_on_a_gpu_are_those_of_the_cpu(
    draft_config: MakeConfig,
    train_config: MakeTrainConfig,
    two_documents: Batch,
    variant: str,
    name: str,
):
    """On a GPU every slot goes through the head, on a CPU those that are trained."""
    torch.manual_seed(0)
    config = train_config(loss={"name": name, "chunk_rows": 6})
    embedding, lm_head, taps = (
        torch.randn(40, 32),
        torch.randn(40, 32) * 0.3,
        torch.randn(1, 18, 64),
    )
    results = []
    for device in ("cpu", "cuda"):
        draft = stirred(draft_config(variant=variant, block_size=5, **SMALL)).to(device)
        head = FrozenHead(embedding.to(device), lm_head.to(device))
        batch = two_documents.to(torch.device(device))
        sums = draft_loss(draft, head, batch, taps.to(device), config, 0.2)
        grads = torch.autograd.grad(sums.loss_sum, list(draft.parameters()))
        parts = (sums.loss_sum, sums.weight_sum, sums.hits, *sums.figures.values(), *grads)
        results.append([part.detach().cpu() for part in parts])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class World:
    """The tiny target and six of its greedy answers."""

    target: Target
    prompts: list[list[int]]
    samples: tuple[Sample, ...]
    unused: int


@pytest.fixture(scope="module")
def world(tiny_llama: LlamaForCausalLM) -> World:
    target = Target(tiny_llama, default_target_layer_ids(6, 3))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, 8).tolist() for _ in range(6)]
    samples = []
    for i, prompt in enumerate(prompts):
        ids = np.array(prompt + decode_plain(target, prompt, 20).tokens, np.int32)
        samples.append(Sample(i, ids, np.arange(len(ids)) >= len(prompt)))
    used = {int(t) for s in samples for t in s.input_ids}
    return World(target, prompts, tuple(samples), min(set(range(260)) - used))


@pytest.mark.parametrize("variant", SUCCESSORS)
def test_overfitting_raises_the_measured_acceptance_and_output_stays_the_targets(
    world: World, train_config: MakeTrainConfig, variant: str
):
    sizes = {"mask_token_id": world.unused, "normalise_taps": True, "variant": variant} | SMALL
    config = train_config(draft=sizes, loss={"name": "dpace"})
    dataset = ChatDataset("made", "0" * 64, world.samples)
    maker = BatchMaker(dataset, BatchPlan(dataset.lengths, config.data, 0), config)
    draft = DraftModel(DraftConfig.from_target(world.target.text_config, config.draft, 6))
    taps = world.target.document_features([torch.tensor(p) for p in world.prompts])
    draft.tap_scale.copy_(measured_tap_scale(taps, 3))
    fresh = evaluate(world.target, draft, world.prompts, 20)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for step in range(80):
        batch = maker.make(step)
        taps = place_features(world.target.document_features(batch.document_tokens()), batch)
        sums = draft_loss(draft, world.target.head, batch, taps, config, step / 80)
        (sums.loss_sum / sums.weight_sum).backward()
        optimiser.step()
        optimiser.zero_grad()
    found = evaluate(world.target, draft, world.prompts, 20)
    assert fresh.acceptance_length < 1.3
    assert found.acceptance_length > fresh.acceptance_length + 0.5
    assert (fresh.lossless, found.lossless) == (True, True)
    walked = walk(world.target, draft, world.samples)
    # a tie between two drafts may fall either way in another batch; nothing else may differ
    assert walked.walk_acceptance_length == pytest.approx(found.acceptance_length, rel=0.05)
