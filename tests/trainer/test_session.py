"""Whole training runs on the CPU, in this process, on a tiny random target."""

import hashlib
import io
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaModel

from tests.trainer.conftest import events_of
from trainer import assembly, checkpoint
from trainer.contract.config import TrainConfig
from trainer.contract.errors import ConfigError, ManifestError
from trainer.contract.events import STEP_KEYS
from trainer.contract.exit_record import TrainerExit
from trainer.errors import CheckpointError, DataError, WorkerError
from trainer.export import load_export
from trainer.session import Session

MakeRun = Callable[..., Path]


def _train(run_dir: Path, *, resume: bool = False) -> TrainerExit:
    return Session(run_dir, resume=resume).train()


def _rewrite(run_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((run_dir / "manifest.json").read_text())
    change(manifest)
    (run_dir / "manifest.json").write_text(json.dumps(manifest))


def _masters(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    masters = checkpoint.load(run_dir / "checkpoints" / f"step_{step:08d}").masters
    return {name: tensor.clone() for name, tensor in masters.items()}  # not a map of the file


def test_run_trains_checkpoints_and_exports(make_run: MakeRun) -> None:
    run_dir = make_run()
    assert _train(run_dir) is TrainerExit.FINISHED
    steps = events_of(run_dir, "step")
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert all(key in steps[-1] for key in STEP_KEYS)
    assert "experiments" not in steps[-1]
    (started,) = events_of(run_dir, "started")
    assert (started["step"], started["num_compiles"]) == (1, 0)
    assert started["start_s"] > 0
    assert steps[-1]["eta_s"] == 0.0
    assert steps[-1]["tokens_total"] > steps[0]["tokens_total"] > 0
    assert [e["path"] for e in events_of(run_dir, "checkpoint")] == [
        "step_00000004",
        "step_00000008",
        "step_00000012",
    ]
    assert [e["phase"] for e in events_of(run_dir, "phase")] == ["data", "load", "train", "export"]
    assert [e["state"] for e in events_of(run_dir, "finished")] == ["finished"]
    exported = load_file(run_dir / "export" / "model.safetensors")
    assert torch.equal(exported["norm.weight"], _masters(run_dir, 12)["norm.weight"])


def test_draft_learns_chats_that_count_upwards(make_run: MakeRun) -> None:
    run_dir = make_run(optim={"max_steps": 150, "lr": 0.01}, run={"checkpoint_every_steps": 150})
    _train(run_dir)
    steps = events_of(run_dir, "step")
    accepted = [event["expected_accepted"] for event in steps]
    assert sum(accepted[:10]) / 10 < 0.3
    assert sum(accepted[-10:]) / 10 > 0.6
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_run_in_rows_of_declared_lengths_trains(make_run: MakeRun) -> None:
    run_dir = make_run(data={"row_lengths": [12, 32]})
    assert _train(run_dir) is TrainerExit.FINISHED
    assert events_of(run_dir, "step")[-1]["loss"] > 0


def test_packed_run_trains(make_run: MakeRun) -> None:
    run_dir = make_run(data={"packing": True, "max_anchors": 8})
    assert _train(run_dir) is TrainerExit.FINISHED


def test_bf16_run_with_muon_trains_and_shows_the_rate_of_each_group(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(draft={"dtype": "bfloat16"}, optim={"name": "muon", "lr": 0.005})
    assert _train(run_dir) is TrainerExit.FINISHED
    log = capsys.readouterr().out.splitlines()
    groups = [line for line in log if line.startswith(("Muon: ", "AdamW: "))]
    # One layer: seven matrices. AdamW has fc at a tenth of the rate, and six norms.
    assert [group.split(",")[0] for group in groups] == [
        "Muon: 7 tensors",
        "AdamW: 1 tensors",
        "AdamW: 6 tensors",
    ]
    assert ["lr 0.005," in groups[0], "lr 0.0005," in groups[1]] == [True, True]
    assert "schedule: 0 steps of warm-up, cosine to 0; step 0 of 12 takes 1.0000" in log
    assert load_export(run_dir / "export").fc.weight.dtype == torch.bfloat16
    assert _masters(run_dir, 12)["fc.weight"].dtype == torch.float32


def test_number_of_target_threads_changes_nothing(make_run: MakeRun) -> None:
    one, three = make_run("one", targets=1), make_run("three", targets=3)
    _train(one)
    _train(three)
    first, second = _masters(one, 12), _masters(three, 12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_feature_cache_changes_nothing(make_run: MakeRun) -> None:
    without, full = make_run("a"), make_run("b", target={"cache_bytes": 10_000_000})
    little = make_run("c", target={"cache_bytes": 20_000})
    for run_dir in (without, full, little):
        _train(run_dir)
    expected = [event["loss"] for event in events_of(without, "step")]
    for run_dir in (full, little):
        # A cached sample was once computed beside other rows, which rounds differently.
        assert [e["loss"] for e in events_of(run_dir, "step")] == pytest.approx(expected, rel=1e-4)


def test_two_drafters_keep_identical_replicas(make_run: MakeRun) -> None:
    session = Session(make_run(drafters=2, targets=2), resume=False)
    session.train()
    first, second = (replica.draft.state_dict() for replica in session.replicas)
    assert all(torch.equal(first[name], second[name]) for name in first)
    moments, others = (replica.optimizer.state() for replica in session.replicas)
    assert all(torch.equal(moments[name], others[name]) for name in moments)


def test_two_drafters_take_the_same_steps_as_one_that_accumulates_two_batches(
    make_run: MakeRun,
) -> None:
    two = make_run("two", drafters=2)
    one = make_run("one", drafters=1, optim={"grad_accumulation": 2})
    _train(two)
    _train(one)
    losses = [event["loss"] for event in events_of(one, "step")]
    assert [event["loss"] for event in events_of(two, "step")] == pytest.approx(losses, rel=1e-5)
    tokens = [event["tokens_total"] for event in events_of(one, "step")]
    assert [event["tokens_total"] for event in events_of(two, "step")] == tokens


def test_failing_target_thread_ends_the_run_with_its_name(
    make_run: MakeRun, tmp_path: Path
) -> None:
    # A token beyond the target's embedding: the target thread fails in its forward.
    chats = [
        {"messages": [{"role": r, "content": "w1 w2 w3"} for r in ("user", "assistant")]}
        for _ in range(8)
    ]
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join(json.dumps(chat) for chat in chats) + "\n")
    run_dir = make_run(data={"path": str(data)}, draft={"normalise_taps": False})
    tokenizer = json.loads((_target(run_dir) / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["w3"] = 5000
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in _target(run_dir).iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    _rewrite(run_dir, lambda m: m["config"]["target"].update(path=str(broken)))
    with pytest.raises(WorkerError, match="thread target-0: IndexError"):
        _train(run_dir)
    (finished,) = events_of(run_dir, "finished")
    assert finished["state"] == "failed"
    assert "target-0" in finished["error"]
    assert not [t for t in threading.enumerate() if t.name.startswith(("target-", "drafter-"))]


def test_run_that_loses_its_last_target_saves_its_last_step_and_resume_ends_the_same(
    make_run: MakeRun,
) -> None:
    straight = make_run("straight")
    _train(straight)
    run_dir = make_run("lost", run={"checkpoint_every_steps": 1000})
    forwards = itertools.count(1)

    def die_in_the_seventh(module: torch.nn.Module, _inputs: object) -> None:
        in_target = threading.current_thread().name == "target-0"
        if in_target and isinstance(module, LlamaModel) and next(forwards) == 7:
            raise RuntimeError("GPU is lost")

    hook = register_module_forward_pre_hook(die_in_the_seventh)
    try:
        with pytest.raises(WorkerError, match="thread target-0: RuntimeError: GPU is lost"):
            _train(run_dir)
    finally:
        hook.remove()
    (saved,) = events_of(run_dir, "checkpoint")
    # Six batches were made and two at most waited.
    assert 3 <= saved["step"] == events_of(run_dir, "step")[-1]["step"] < 12
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    first, second = _masters(straight, 12), _masters(run_dir, 12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _target(run_dir: Path) -> Path:
    return Path(json.loads((run_dir / "manifest.json").read_text())["config"]["target"]["path"])


class _StoppingLog(io.StringIO):
    """A log whose fifth step sends signals, and is written when each has been taken."""

    def __init__(self, signals: list[int]) -> None:
        super().__init__()
        self.signals = signals
        self.session: Session | None = None

    def write(self, text: str) -> int:
        if self.session is not None and text.startswith("step 5/"):
            stop = self.session._stop
            for number, taken in zip(self.signals, (stop.soft, stop.hard), strict=False):
                os.kill(os.getpid(), number)
                taken.wait()
        return super().write(text)


@pytest.fixture
def own_handler() -> Iterator[Callable[..., None]]:
    """A handler of SIGINT and SIGTERM that does nothing: a late signal must not end pytest."""

    def ignore(_number: int, _frame: object) -> None:
        return

    old = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    yield ignore
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_signals_stop_with_a_checkpoint_and_resume_ends_the_same(
    make_run: MakeRun,
    own_handler: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    signals: list[int],
) -> None:
    steps: dict[str, Any] = {"max_steps": 60, "epochs": 500.0}
    straight = make_run("straight", optim=steps, run={"checkpoint_every_steps": 60})
    _train(straight)
    run_dir = make_run("stopped", optim=steps, run={"checkpoint_every_steps": 1000})
    with monkeypatch.context() as patch:
        log = _StoppingLog(signals)
        patch.setattr(sys, "stdout", log)
        log.session = Session(run_dir, resume=False)
        assert log.session.train() is TrainerExit.STOPPED
    assert signal.getsignal(signal.SIGTERM) is own_handler
    assert signal.getsignal(signal.SIGINT) is own_handler
    (saved,) = events_of(run_dir, "checkpoint")
    assert 5 <= saved["step"] < 60
    assert events_of(run_dir, "finished")[-1]["state"] == "stopped"
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    first, second = _masters(straight, 60), _masters(run_dir, 60)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [e["step"] for e in events_of(run_dir, "step")] == list(range(1, 61))
    sums = [events_of(r, "step")[-1]["tokens_total"] for r in (straight, run_dir)]
    assert sums[0] == sums[1]


def test_sigterm_while_the_trainer_starts_is_a_stop_like_any_other(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    os.mkfifo(manifest)  # the trainer waits at its first step
    argv = [sys.executable, "-m", "trainer", "train", "--run-dir", str(tmp_path)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    with process, manifest.open("w"):  # it reads now
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert (process.returncode, told.splitlines()[-1]) == (10, "error: interrupted")


def test_started_run_with_checkpoints_is_not_started_over(make_run: MakeRun) -> None:
    run_dir = make_run()
    _train(run_dir)
    with pytest.raises(ConfigError, match=r"holds step_00000012; go on from it with --resume"):
        Session(run_dir, resume=False)
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("draft", {"mask_token_id": 44}, "mask_token_id was 43, now 44"),
        ("draft", {"target_layer_ids": [1, 2]}, r"target_layer_ids was \[1, 3\], now \[1, 2\]"),
        ("draft", {"block_size": 3}, "block_size was 4, now 3"),
        ("draft", {"causal": True}, "draft.causal was False, now True"),
        ("loss", {"position_decay": 4.0}, r"loss.position_decay was 3\.0, now 4\.0"),
        ("optim", {"grad_accumulation": 2}, "batches_per_step was 1, now 2"),
    ],
)
def test_resume_refuses_a_changed_draft(
    make_run: MakeRun, section: str, values: dict[str, Any], told: str
) -> None:
    run_dir = make_run()
    _train(run_dir)
    _rewrite(run_dir, lambda m: m["config"][section].update(values))
    with pytest.raises(CheckpointError, match=told):
        _train(run_dir, resume=True)


def test_resumed_run_may_change_what_neither_weights_nor_data_nor_schedule_depend_on() -> None:
    config = TrainConfig.from_dict(
        {"target": {"path": "t"}, "data": {"path": "d"}, "draft": {"mask_token_id": 1}}
    )
    free = {
        f"{section}.{key}"
        for section, values in config.to_dict().items()
        if isinstance(values, dict) and section not in ("run", "compile", "evaluation")
        for key in values
        if assembly.may_change(f"{section}.{key}")
    }
    assert free == {
        *("target.path", "target.cache_bytes", "target.compile", "data.path", "loss.chunk_rows"),
        *("optim.lr", "optim.adamw_lr", "optim.min_lr_frac"),
        *("optim.weight_decay", "optim.clip_norm", "optim.ema_decay"),
    }
    facts = ("target_revision", "dataset_sha256", "seed", "batches_per_step", "num_steps")
    assert not any(assembly.may_change(fact) for fact in facts)


def test_changed_data_file_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    other = tmp_path / "other.jsonl"
    config = json.loads((run_dir / "manifest.json").read_text())["config"]
    lines = Path(config["data"]["path"]).read_text().splitlines()
    other.write_text("\n".join(lines[:-1]) + "\n")
    _rewrite(run_dir, lambda m: m["config"]["data"].update(path=str(other)))
    with pytest.raises(DataError, match="has changed since the launch"):
        _train(run_dir)


def test_resume_refuses_other_data_even_when_the_manifest_says_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run_dir = make_run()
    _train(run_dir)
    other = tmp_path / "other.jsonl"
    config = json.loads((run_dir / "manifest.json").read_text())["config"]
    other.write_bytes(Path(config["data"]["path"]).read_bytes() + b"\n")
    digest = hashlib.sha256(other.read_bytes()).hexdigest()

    def change(manifest: dict[str, Any]) -> None:
        manifest["config"]["data"]["path"] = str(other)
        manifest["dataset_sha256"] = digest

    _rewrite(run_dir, change)
    with pytest.raises(CheckpointError, match="dataset_sha256 was"):
        _train(run_dir, resume=True)


def test_resume_refuses_another_revision_of_the_target(make_run: MakeRun) -> None:
    run_dir = make_run()
    _train(run_dir)
    _rewrite(run_dir, lambda m: m.update(target_revision="r2"))
    with pytest.raises(CheckpointError, match="target_revision was 'r1', now 'r2'; put the old"):
        _train(run_dir, resume=True)


def test_changed_rate_is_told_with_both_values_and_taken(make_run: MakeRun) -> None:
    run_dir = make_run()
    _train(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000012")
    _rewrite(run_dir, lambda m: m["config"]["optim"].update(lr=0.006))
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    warnings = [event["text"] for event in events_of(run_dir, "warning")]
    assert warnings == ["changed since the checkpoint: optim.lr was 0.003, now 0.006"]
    rates = [(event["step"], event["lr"]) for event in events_of(run_dir, "step")][8:]
    before, after = rates[:4], rates[4:]
    # The schedule stays where it was: each later step at twice the rate it had.
    assert after == [(step, pytest.approx(2 * lr)) for step, lr in before]


def _unseal(directory: Path) -> None:
    (directory / "COMPLETE.json").unlink()


def _flip_a_bit(directory: Path) -> None:
    data = bytearray((directory / "masters.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "masters.safetensors").write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_unseal, "no COMPLETE.json: the writer was stopped"),
        (_flip_a_bit, "masters.safetensors has another sha256 than COMPLETE.json says"),
    ],
)
def test_damaged_checkpoint_is_skipped_named_and_the_one_before_is_taken(
    make_run: MakeRun, damage: Callable[[Path], None], reason: str
) -> None:
    run_dir = make_run()
    _train(run_dir)
    expected = _masters(run_dir, 12)
    damage(run_dir / "checkpoints" / "step_00000012")
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    assert [event["text"] for event in events_of(run_dir, "warning")] == [
        f"checkpoint step_00000012 skipped: {reason}"
    ]
    resumed = [e["step"] for e in events_of(run_dir, "phase") if e["phase"] == "resume"]
    assert resumed == [8]
    again = _masters(run_dir, 12)
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_resume_refuses_to_start_over_when_every_checkpoint_is_damaged(make_run: MakeRun) -> None:
    run_dir = make_run()
    _train(run_dir)
    for directory in (run_dir / "checkpoints").iterdir():
        _unseal(directory)
    with pytest.raises(CheckpointError, match=r"step_00000012: no COMPLETE.json.*under a new tag"):
        _train(run_dir, resume=True)
    assert len(list((run_dir / "checkpoints").iterdir())) == 3


def test_resume_without_a_checkpoint_starts_over_and_says_so(make_run: MakeRun) -> None:
    run_dir = make_run()
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    texts = [event["text"] for event in events_of(run_dir, "warning")]
    assert texts == ["no complete checkpoint; starting from step 0"]


def test_cuda_that_is_not_there_is_an_error_and_never_the_cpu(make_run: MakeRun) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    run_dir = make_run(run={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"set run\.device to cpu"):
        Session(run_dir, resume=False)
    _rewrite(run_dir, lambda m: [g.update(uuid="GPU-1", index=0) for g in m["gpus"]])
    with pytest.raises(ConfigError, match="sees no usable GPU"):
        Session(run_dir, resume=False)


def test_gate_that_is_off_is_marked_in_the_events(make_run: MakeRun) -> None:
    run_dir = make_run(compile={"gate": "off"})
    assert _train(run_dir) is TrainerExit.FINISHED
    (warning,) = events_of(run_dir, "warning")
    assert warning["text"].startswith("compile.gate=off is an experiment: the run may crash")
    marked = [*events_of(run_dir, "step"), *events_of(run_dir, "finished")]
    assert {tuple(event["experiments"]) for event in marked} == {("compile.gate=off",)}


def test_role_without_a_device_is_refused(make_run: MakeRun) -> None:
    run_dir = make_run(drafters=0)
    with pytest.raises(ConfigError, match="no device in the role drafter"):
        Session(run_dir, resume=False)


def test_directory_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is this a run directory"):
        Session(tmp_path, resume=False)


def test_too_little_data_for_a_step_is_an_error(make_run: MakeRun) -> None:
    run_dir = make_run(optim={"grad_accumulation": 1000, "epochs": 1.0})
    with pytest.raises(DataError, match="less than one step of 1 drafters x 1000"):
        _train(run_dir)


def test_loss_that_is_not_finite_ends_the_run_and_names_the_thread(make_run: MakeRun) -> None:
    run_dir = make_run(optim={"lr": 1e30, "clip_norm": 1e30})
    with pytest.raises(WorkerError, match=r"thread drafter-0: NonFiniteError: step \d+"):
        _train(run_dir)


def test_full_disk_is_told_at_each_checkpoint_and_fails_the_last(make_run: MakeRun) -> None:
    run_dir = make_run()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # events fit, weights do not
    try:
        with pytest.raises(OSError, match=r"step_00000012\.partial"):
            _train(run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    warnings = [event["text"] for event in events_of(run_dir, "warning")]
    assert [text.partition(":")[0] for text in warnings] == [
        "no checkpoint at step 4",
        "no checkpoint at step 8",
        "no checkpoint at step 12",
    ]
    assert len(events_of(run_dir, "step")) == 12


def test_full_disk_for_events_and_samples_does_not_end_the_training(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(optim={"max_steps": 6}, run={"log_samples": True, "export_at_end": False})
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run_dir / name).write_bytes(b"\n" * 300_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # checkpoints fit, no event
    try:
        assert _train(run_dir) is TrainerExit.FINISHED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run_dir / "checkpoints" / "step_00000006").is_dir()
    log = capsys.readouterr().out
    assert log.count("warning: metrics.jsonl cannot be written, the run goes on") == 1
    assert log.count("warning: samples.jsonl lacks step ") == 6
