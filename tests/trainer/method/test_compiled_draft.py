"""The draft's layers through the compile gate: the same loss and gradients."""

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import TrainConfig
from trainer.data.packing import Batch
from trainer.loss import draft_loss
from trainer.model.attention import SdpaAttention
from trainer.model.draft import DraftConfig, DraftModel
from trainer.model.target import FrozenHead

P = ParamSpec("P")
R = TypeVar("R")


class CompiledAroundSdpa(SdpaAttention):
    """As flex attention on a GPU, whose kernel has no backward on a CPU."""

    def __init__(self, gate: CompileGate) -> None:
        self._gate = gate

    def compiled(self, fn: Callable[P, R]) -> Callable[P, R]:
        return self._gate.wrap(fn)


@pytest.fixture
def gate() -> Iterator[CompileGate]:
    torch._dynamo.reset()
    gate = CompileGate(GateSettings(backend="aot_eager"))
    yield gate
    gate.close()
    torch._dynamo.reset()


def _batch(num_tokens: int) -> Batch:
    places = torch.arange(num_tokens)[None]
    anchors = torch.tensor([[1, 5, 6, 11]])
    return Batch(
        index=0,
        epoch=0,
        input_ids=torch.randint(100, (1, num_tokens)),
        loss_mask=torch.ones(1, num_tokens, dtype=torch.bool),
        document_ids=torch.zeros(1, num_tokens, dtype=torch.int32),
        position_ids=places,
        anchor_positions=anchors,
        anchor_keep=torch.ones_like(anchors, dtype=torch.bool),
        documents=(),
        num_tokens=num_tokens,
        num_anchors=4,
    )


@pytest.mark.parametrize(
    ("variant", "loss"),
    [("dflash", "decay"), ("dflash", "dpace"), ("dflash2", "decay"), ("domino", "dpace")],
)
def test_compiled_pieces_give_the_loss_and_gradients_of_the_plain_ones(
    gate: CompileGate,
    draft_config: Callable[..., DraftConfig],
    train_config: Callable[..., TrainConfig],
    variant: str,
    loss: str,
):
    torch.manual_seed(0)
    shape = draft_config(vocab_size=140, mask_token_id=139, num_draft_layers=3, variant=variant)
    plain = DraftModel(shape, seed=1)
    with torch.no_grad():  # fresh convolutions would do nothing
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    compiled = DraftModel(shape, attention=CompiledAroundSdpa(gate))
    compiled.load_state_dict(plain.state_dict())
    head = FrozenHead(torch.randn(140, 32), torch.randn(140, 32))
    config = train_config(loss={"name": loss, "position_decay": 3.0})
    batch, taps = _batch(18), torch.randn(1, 18, 64)

    def run(draft: DraftModel) -> tuple[Any, ...]:
        sums = draft_loss(draft, head, batch, taps, config, 0.2)
        return sums.loss_sum, *torch.autograd.grad(sums.loss_sum, list(draft.parameters()))

    wanted = run(plain)
    found = gate.run("first", lambda: run(compiled))
    graphs = gate.stats.num_graphs
    assert 0 < graphs <= 8  # layers share their graphs, but for the first, whose input is a leaf
    again = gate.run("first", lambda: run(compiled))
    assert gate.stats.num_graphs == graphs
    assert gate.stats.num_unexpected == 0
    for one in (found, again):
        for ours, theirs in zip(one, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5)
