"""What a run does when a number is not finite, and when a batch has nothing to train on."""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import assembly, checkpoint
from trainer.__main__ import main
from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import TrainConfig
from trainer.data.dataset import ChatDataset, Sample
from trainer.data.packing import BatchMaker, BatchPlan
from trainer.errors import (
    ChannelClosedError,
    DataError,
    NonFiniteError,
    TrainerError,
    WorkerError,
)
from trainer.learning_rate import Schedule
from trainer.model.attention import FlexAttention
from trainer.replay import SeenAttention
from trainer.session import Session
from trainer.sync import GradientSync
from trainer.workers.drafter import DrafterWorker, Replica, StepDone, StepRange
from trainer.workers.failed_batch import load_failed, save_failed
from trainer.workers.supervisor import Pulse, StopRequest
from trainer.workers.target import FeatureCache, Prepared, batch_features

MakeRun = Callable[..., Path]
RUINOUS: dict[str, Any] = {
    # Weights of 1e30 after the first steps: finite, and their products are not.
    "optim": {"lr": 1e30, "clip_norm": 1e30, "warmup_frac": 0.0},
    "run": {"checkpoint_every_steps": 1},
}


def _fails(run_dir: Path) -> str:
    with pytest.raises(WorkerError) as info:
        Session(run_dir, resume=False).train()
    return str(info.value)


def test_batch_that_is_not_finite_is_kept_and_the_checkpoint_before_it_is_whole(
    make_run: MakeRun,
) -> None:
    run_dir = make_run(**RUINOUS)
    told = _fails(run_dir)
    (path,) = run_dir.glob("failed_batch_*")
    failed = load_failed(path)
    assert path.name == f"failed_batch_{failed.step:08d}_rank0.safetensors"
    assert f"kept in {path.name}" in told
    assert f"python -m trainer replay --run-dir {run_dir} --batch {path}" in told
    newest = max((run_dir / "checkpoints").iterdir())
    state = checkpoint.load(newest)
    assert state.step == failed.step - 1
    # One drafter, one batch a step: batch n belongs to step n + 1.
    assert failed.prepared.batch.index == state.next_index == failed.step - 1
    kept = {name: failed.draft[name] for name in state.masters}
    assert all(torch.equal(kept[name], state.masters[name]) for name in kept)


def test_weights_that_are_not_finite_are_never_a_checkpoint(make_run: MakeRun) -> None:
    # A decay of lr x weight_decay = 1e41 takes the matrices out of fp32 in the first step.
    run_dir = make_run(
        optim={"lr": 1e38, "weight_decay": 1e3, "warmup_frac": 0.0},
        run={"checkpoint_every_steps": 1},
    )
    told = _fails(run_dir)
    assert (
        "thread drafter-0: NonFiniteError: step 1: the optimiser's step made weights that" in told
    )
    assert not (run_dir / "checkpoints").exists()


def test_replay_names_the_first_tensor_that_is_not_finite(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(**RUINOUS)
    _fails(run_dir)
    (path,) = run_dir.glob("failed_batch_*")
    capsys.readouterr()
    assert main(["replay", "--run-dir", str(run_dir), "--batch", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step ")
    bad = [line for line in lines if line.startswith("not finite: ")]
    # The weights are finite; the first product of two of them is that of norm and projection.
    assert bad[0].startswith("not finite: output of layers.0.self_attn.q_proj [")
    assert lines[-1] == bad[0].replace("not finite: ", "first non-finite tensor: ", 1)


def test_replay_of_a_batch_that_is_finite_here_says_so(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(**RUINOUS)
    _fails(run_dir)
    (path,) = run_dir.glob("failed_batch_*")
    failed = load_failed(path)
    mild = {name: torch.full_like(tensor, 0.01) for name, tensor in failed.draft.items()}
    again = save_failed(run_dir, replace(failed, draft=mild))
    capsys.readouterr()
    assert main(["replay", "--run-dir", str(run_dir), "--batch", str(again)]) == 0
    assert "tensors are finite on cpu: not reproduced" in capsys.readouterr().out


def test_replay_of_a_draft_that_is_compiled_leaves_every_module_to_its_hook() -> None:
    gate = CompileGate(GateSettings(backend="eager"))
    try:
        attention = SeenAttention(FlexAttention(gate))
        assert attention.compiled(math.sqrt) is math.sqrt
        assert gate.stats.num_exclusive == 1  # flex attention itself
    finally:
        gate.close()


def test_file_that_is_no_kept_batch_is_refused_by_name(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    for content in (b"", b"not tensors at all"):
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.safetensors is no batch that a run kept"):
            load_failed(path)
        assert main(["replay", "--run-dir", str(run_dir), "--batch", str(path)]) == 2


def test_replay_sees_a_weight_that_was_bad_before_anything_was_computed(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(**RUINOUS)
    _fails(run_dir)
    (path,) = run_dir.glob("failed_batch_*")
    failed = load_failed(path)
    failed.draft["layers.0.mlp.up_proj.weight"][0, :2] = torch.tensor([torch.nan, torch.inf])
    save_failed(run_dir, failed)
    capsys.readouterr()
    assert main(["replay", "--run-dir", str(run_dir), "--batch", str(path)]) == 1
    # Width 32, feed-forward 64: 2048 numbers.
    assert capsys.readouterr().out.splitlines()[-1] == (
        "first non-finite tensor: weight layers.0.mlp.up_proj.weight [64, 32]: 1 NaN and 1"
        " infinite of 2048"
    )


def _barren(run_dir: Path, config: TrainConfig) -> tuple[assembly.Data, list[int]]:
    """The run's data, every second sample without two trained tokens in a row: no anchor."""
    manifest, _ = assembly.read_manifest(run_dir)
    data = assembly.Data.load(manifest, config)
    samples = []
    for sample in data.dataset.samples:
        mask = sample.loss_mask.copy()
        if sample.sample_id % 2:
            mask[:] = False
            mask[-1] = True
        samples.append(Sample(sample.sample_id, sample.input_ids, mask))
    dataset = ChatDataset("made", data.dataset.sha256, tuple(samples))
    plan = BatchPlan(dataset.lengths.tolist(), config.data, config.seed)
    maker = BatchMaker(dataset, plan, config)
    counts = [maker.make(index).num_anchors for index in range(plan.batches_in_epoch)]
    return assembly.Data(dataset, plan, maker), counts


class Ranks:
    """Three drafters over chosen batches of a run, stepped by real threads."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self.run_dir, self.config = run_dir, config
        self.gate = CompileGate(assembly.gate_settings(config, 3))
        cpu = torch.device("cpu")
        self.target = assembly.load_targets(config, [cpu])["cpu"]
        shape = assembly.draft_config(config, self.target)
        attention = assembly.attention_of(config, shape, self.gate)
        self.replicas = [
            assembly.build_replica(
                config, self.target, (rank, cpu), attention, Schedule(9, 0, 1.0), None
            )
            for rank in range(3)
        ]
        self.done: list[StepDone] = []

    def weights(self) -> list[dict[str, torch.Tensor]]:
        return [
            {name: value.clone() for name, value in replica.optimizer.masters().items()}
            for replica in self.replicas
        ]

    def prepared(self, data: assembly.Data, index: int) -> Prepared:
        batch = data.maker.make(index)
        return Prepared(batch, batch_features(self.target, batch, FeatureCache(0)))

    def step(self, batches: list[Prepared]) -> list[BaseException | None]:
        """Take steps of three batches each; returns what each rank raised."""
        channel: OrderedChannel[Prepared] = OrderedChannel(len(batches))
        for place, prepared in enumerate(batches):
            channel.put(place, prepared)
        sync, stop = GradientSync(3), StopRequest()
        raised: list[BaseException | None] = [None, None, None]

        def body(rank: int) -> None:
            worker = self._worker(self.replicas[rank], channel, sync, stop, len(batches))
            try:
                worker.run(Pulse())
            except TrainerError as error:
                raised[rank] = error
                sync.abort()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for another"
        return raised

    def _worker(
        self,
        replica: Replica,
        channel: OrderedChannel[Prepared],
        sync: GradientSync,
        stop: StopRequest,
        num_batches: int,
    ) -> DrafterWorker:
        return DrafterWorker(
            replica=replica,
            steps=StepRange(0, num_batches // 3, 3, 1),
            channel=channel,
            sync=sync,
            gate=self.gate,
            config=self.config,
            stop=stop,
            on_step=lambda done, _pulse: self.done.append(done),
            run_dir=self.run_dir,
        )


def _ranks(make_run: MakeRun, **sections: Any) -> tuple[Ranks, assembly.Data, list[int], list[int]]:
    """Three ranks; batches with anchors and without: rows of one sample each."""
    run_dir = make_run(data={"max_batch_size": 1}, **sections)
    _, config = assembly.read_manifest(run_dir)
    data, counts = _barren(run_dir, config)
    full = [index for index, count in enumerate(counts) if count]
    empty = [index for index, count in enumerate(counts) if not count]
    assert len(full) == len(empty) == 12
    return Ranks(run_dir, config), data, full, empty


def test_rank_without_anchors_steps_with_the_others(make_run: MakeRun) -> None:
    ranks, data, full, empty = _ranks(make_run)
    before = ranks.weights()[0]
    order = [full[0], empty[0], full[1], empty[1], full[2], empty[2]]
    assert ranks.step([ranks.prepared(data, index) for index in order]) == [None] * 3
    assert [done.num_done for done in ranks.done] == [1, 2]
    anchors = [data.maker.make(index).num_anchors for index in full[:3]]
    assert [done.sums.num_anchors for done in ranks.done] == [sum(anchors[:2]), anchors[2]]
    first, *others = ranks.weights()
    assert any(not torch.equal(first[name], before[name]) for name in first)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_step_without_any_anchor_changes_no_weight_and_does_not_hang(make_run: MakeRun) -> None:
    ranks, data, _full, empty = _ranks(make_run, optim={"ema_decay": 0.9})
    before = ranks.weights()
    assert ranks.step([ranks.prepared(data, index) for index in empty[:6]]) == [None] * 3
    assert [done.num_done for done in ranks.done] == [1, 2]
    assert [(done.sums.weight_sum, done.applied.grad_norm) for done in ranks.done] == [(0, 0)] * 2
    after = ranks.weights()
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    average = ranks.replicas[0].optimizer.average()
    assert all(torch.equal(average[name], before[0][name]) for name in average)


def test_loss_of_a_step_is_that_of_the_ranks_that_had_anchors(make_run: MakeRun) -> None:
    mixed, data, full, empty = _ranks(make_run)
    order = [empty[0], full[0], empty[1]]
    assert mixed.step([mixed.prepared(data, index) for index in order]) == [None] * 3
    (done,) = mixed.done
    assert done.sums.loss_sum > 0
    assert np.isfinite(done.applied.grad_norm)
    assert [len(batch.sample_ids) for batch in done.sums.batches] == [1, 1, 1]
    assert json.dumps(done.sums.batches)  # plain values, as samples.jsonl takes them


def test_batch_that_is_not_finite_in_one_rank_stops_all_before_any_weight_changes(
    make_run: MakeRun,
) -> None:
    ranks, data, full, _empty = _ranks(make_run)
    before = ranks.weights()
    batches = [ranks.prepared(data, index) for index in full[:3]]
    bad = batches[1].batch
    ruined = torch.full_like(batches[1].target_hidden, torch.inf)
    batches[1] = replace(batches[1], target_hidden=ruined)
    first, second, third = ranks.step(batches)
    assert isinstance(second, NonFiniteError)
    assert str(second).startswith(f"step 1: batch {bad.index} of drafter 1: loss sum nan, gradient")
    assert [type(first), type(third)] == [ChannelClosedError] * 2
    assert ranks.done == []
    (path,) = ranks.run_dir.glob("failed_batch_*")
    kept = load_failed(path)
    assert (kept.rank, kept.step, kept.prepared.batch.sample_ids) == (1, 1, bad.sample_ids)
    assert torch.equal(kept.prepared.target_hidden, ruined)
    assert torch.equal(kept.prepared.batch.anchor_positions, bad.anchor_positions)
    for old, new in zip(before, ranks.weights(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
