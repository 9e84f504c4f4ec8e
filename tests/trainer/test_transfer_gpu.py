"""Hidden states on their way between GPUs, and the memory of a run on one; one GPU is enough."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.contract.events import EventDecoder
from trainer.contract.exit_record import TrainerExit
from trainer.data.packing import Batch
from trainer.session import Session
from trainer.workers.feature_memory import FeatureMemory
from trainer.workers.target import Prepared
from trainer.workers.transfer import Transfer, through_host

MakeRun = Callable[..., Path]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # the first compile of a process takes most of a minute
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_HIDDEN_BYTES = 48 << 20
_BUSY_CYCLES = 50_000_000  # some 30 ms: what comes too early is seen


def _stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream
    return make(device)


def _busy(value: float, device: torch.device) -> Tensor:
    """Return a tensor that holds ``value`` only after the stream's long work."""
    made = torch.zeros(1 << 22, device=device)
    torch.cuda._sleep(_BUSY_CYCLES)
    return made.fill_(value)


def _batch() -> Batch:
    one = torch.ones(1, 4, dtype=torch.int64)
    flags = torch.ones(1, 4, dtype=torch.bool)
    return Batch(0, 0, one, flags, one.int(), one, one, flags, (), 4, 4)


def _routes() -> Iterator[tuple[int, int, bool]]:
    """From card, to card, and whether through the host."""
    yield 0, 0, False
    if torch.cuda.device_count() > 1:
        yield from ((0, 1, False), (0, 1, True), (1, 0, False))


@pytest.mark.parametrize("route", list(_routes()))
def test_what_arrives_is_what_was_made_though_memory_is_used_again(
    route: tuple[int, int, bool],
) -> None:
    """Every round frees its tensors at once: a late copy or use would find another's numbers."""
    source, destination = (torch.device("cuda", number) for number in route[:2])
    transfer = Transfer([source, destination], through_host=route[2])
    makes, uses = _stream(source), _stream(destination)
    sums = []
    for number in range(20):
        with torch.cuda.stream(makes):
            hidden = _busy(float(number), source)
            made = makes.record_event()
        prepared = Prepared(*transfer.send(_batch(), hidden, destination, made))
        del hidden
        with torch.cuda.stream(makes):
            torch.full((1 << 22,), -1.0, device=source)  # takes the freed memory if it may
        with torch.cuda.stream(uses):
            here = prepared.received()
            torch.cuda._sleep(_BUSY_CYCLES)
            sums.append(here.target_hidden.double().mean() + here.batch.input_ids.sum())
        del prepared, here
    uses.synchronize()  # reading does not wait for a stream of one's own
    assert [float(value) for value in sums] == [number + 4.0 for number in range(20)]


def test_through_the_host_a_tensor_of_many_pieces_stays_what_it_was() -> None:
    card = torch.device("cuda", 0)
    source = torch.arange((200 << 20) // 4, device=card, dtype=torch.int32)
    there = torch.empty_like(source)
    torch.cuda.synchronize()
    into = _stream(card)
    through_host(source, there, _stream(card), into)
    into.synchronize()
    assert torch.equal(source, there)


def test_hidden_states_that_end_late_cost_the_forwards_no_memory() -> None:
    """Three at once after one at once: in the pool of the forwards they would take a large block's
    place, and the next forward another from the card."""
    card = torch.device("cuda", 0)
    memory = FeatureMemory([card])
    assert memory.make_room(card, _HIDDEN_BYTES, 6)

    def grown(take: Callable[[], Tensor]) -> int:
        stream = _stream(card)  # and so a pool of its own
        reserved, held = [], deque[Tensor]()
        for at_once in (*[1] * 5, *[3] * 5):
            with torch.cuda.stream(stream):
                held.append(take())
                forward = torch.empty(2 * _HIDDEN_BYTES, dtype=torch.uint8, device=card)
                del forward
            while len(held) > at_once:
                held.popleft()
            stream.synchronize()
            reserved.append(torch.cuda.memory_reserved(card))
        return reserved[-1] - reserved[4]

    assert grown(lambda: torch.empty(_HIDDEN_BYTES, dtype=torch.uint8, device=card)) > 0
    assert grown(lambda: memory.empty((_HIDDEN_BYTES,), torch.uint8, card)) == 0


def test_room_that_a_card_has_not_is_told_and_nothing_is_kept() -> None:
    card = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(card)
    _, whole = torch.cuda.mem_get_info(card)
    assert not FeatureMemory([card]).make_room(card, whole // 2, 3)
    assert torch.cuda.memory_allocated(card) == before
    torch.cuda.empty_cache()


def test_memory_of_a_steady_run_is_flat(make_run: MakeRun) -> None:
    """Both roles on one card: what the allocator has taken swings by less than 1 %."""
    run_dir = make_run(
        run={"device": "cuda", "checkpoint_every_steps": 1000, "export_at_end": False},
        data={"packing": True, "token_budget": 256, "max_anchors": 32},
        draft={"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
        optim={"max_steps": 130},
    )
    manifest = json.loads((run_dir / "manifest.json").read_text())
    for gpu in manifest["gpus"]:
        gpu.update(uuid="GPU-0", index=0)
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    torch._dynamo.reset()  # another test's graphs would be taken for a step that compiles nothing
    assert Session(run_dir, resume=False).train() is TrainerExit.FINISHED
    events = list(EventDecoder().feed((run_dir / "metrics.jsonl").read_bytes()))
    steady = [event for event in events if event["kind"] == "step"][30:]
    assert len(steady) == 100
    reserved = [next(iter(event["reserved_bytes"].values())) for event in steady]
    assert max(reserved) - min(reserved) < 0.01 * max(reserved)
    peak = [next(iter(event["peak_memory_bytes"].values())) for event in steady]
    assert peak[-1] < 1.01 * peak[0]
