"""Checkpoints on a real disk: complete or named as skipped, rotated, refused."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import CheckpointState, Trained
from trainer.contract.completion import COMPLETE, describe, latest_complete
from trainer.errors import CheckpointError


def _state(step: int = 5, **identity: object) -> CheckpointState:
    flat = torch.arange(6, dtype=torch.float32) + step
    return CheckpointState(
        step=step,
        next_index=step * 2,
        trained=Trained(tokens=100, anchors=10, samples=2, samples_hash=7),
        identity=identity or {"mask_token_id": 16},
        masters={"a": flat[:4].view(2, 2), "b": flat[4:]},  # views of one storage, as in training
        optimizer={"a/exp_avg": torch.ones(2, 2), "a/step": torch.tensor(5.0)},
        extras={"rng": torch.get_rng_state()},
    )


def test_loaded_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(), keep=3)
    loaded = checkpoint.load(path)
    assert path.name == "step_00000005"
    assert (loaded.step, loaded.next_index) == (5, 10)
    assert loaded.trained == Trained(100, 10, 2, 7)
    assert loaded.average == {}
    assert loaded.identity == {"mask_token_id": 16}
    assert loaded.masters["a"].tolist() == [[5.0, 6.0], [7.0, 8.0]]
    assert loaded.masters["b"].tolist() == [9.0, 10.0]
    assert loaded.optimizer["a/step"].item() == 5.0
    assert torch.equal(loaded.extras["rng"], torch.get_rng_state())


def test_half_written_checkpoint_is_skipped_and_named(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, _state(5), keep=9)
    cut = checkpoint.save(tmp_path, _state(6), keep=9)
    unsealed = checkpoint.save(tmp_path, _state(7), keep=9)
    partial = tmp_path / "step_00000008.partial"
    partial.mkdir()
    size = (cut / "masters.safetensors").stat().st_size
    with (cut / "masters.safetensors").open("r+b") as stream:
        stream.truncate(10)
    (unsealed / COMPLETE).unlink()
    path, skipped = latest_complete(tmp_path)
    assert path == good
    assert [(s.path.name, s.reason) for s in skipped] == [
        ("step_00000008.partial", "half written: the writer was stopped"),
        ("step_00000007", "no COMPLETE.json: the writer was stopped"),
        ("step_00000006", f"masters.safetensors has 10 bytes, not {size}"),
    ]


def test_no_checkpoint_directory_means_none_and_nothing_skipped(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "absent") == (None, [])


def test_rotation_keeps_the_newest_and_never_the_damaged_instead(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, _state(step), keep=9)
    (tmp_path / "step_00000003" / COMPLETE).unlink()
    checkpoint.save(tmp_path, _state(4), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000002",
        "step_00000003",  # damaged: not counted, left to be seen
        "step_00000004",
    ]


def test_rotation_keeps_the_best_beside_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, _state(step), keep=2, best=1)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "3", "4"]
    checkpoint.save(tmp_path, _state(5), keep=2, best=4)  # the first is the best no longer
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["4", "5"]


def test_average_is_saved_where_one_is_kept_and_asked_for_by_name(tmp_path: Path) -> None:
    state = _state(5)
    state.average = {"a": torch.ones(2, 2), "b": torch.zeros(2)}
    loaded = checkpoint.load(checkpoint.save(tmp_path, state, keep=1))
    assert loaded.weights("ema")["a"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert loaded.weights("raw")["b"].tolist() == [9.0, 10.0]
    with pytest.raises(CheckpointError, match=r"step 5 has no average; set optim\.ema_decay"):
        _state(5).weights("ema")


def test_checkpoint_of_an_older_trainer_is_named_with_its_version(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(), keep=1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"v": 1}))
    names = [p.name for p in path.iterdir() if p.name != COMPLETE]
    (path / COMPLETE).write_text(describe(path, names))
    with pytest.raises(CheckpointError, match="version 1, this trainer reads 2"):
        checkpoint.load(path)


def test_totals_do_not_depend_on_the_order_of_the_samples() -> None:
    one = Trained().after(10, 2, [(0, 5), (0, 7)]).after(20, 3, [(1, 5)])
    other = Trained().after(20, 3, [(1, 5), (0, 7)]).after(10, 2, [(0, 5)])
    assert one == other
    assert (one.tokens, one.anchors, one.samples) == (30, 5, 3)
    for visits in ([(0, 5), (0, 7), (0, 5)], [(0, 5), (1, 7), (1, 5)], [(5, 0), (0, 7), (1, 5)]):
        assert Trained().after(30, 5, visits) != one
    assert 0 <= one.samples_hash < 2**64


def test_keep_of_zero_still_leaves_the_only_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(1), keep=0)
    assert latest_complete(tmp_path)[0] == tmp_path / "step_00000001"


def test_save_of_the_same_step_keeps_what_is_there(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(1), keep=3)
    before = (path / "state.json").stat().st_mtime_ns
    assert checkpoint.save(tmp_path, _state(1), keep=3) == path
    assert (path / "state.json").stat().st_mtime_ns == before


def test_save_replaces_a_damaged_directory_of_its_step_and_old_leftovers(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(1), keep=3)
    (path / "masters.safetensors").unlink()
    (tmp_path / "step_00000099.partial").mkdir()
    checkpoint.save(tmp_path, _state(1), keep=3)
    assert latest_complete(tmp_path, digests=True) == (path, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_one_flipped_byte_is_found_by_load(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(), keep=3)
    data = bytearray((path / "masters.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "masters.safetensors").write_bytes(bytes(data))
    assert latest_complete(tmp_path)[0] == path  # sizes alone cannot tell
    with pytest.raises(CheckpointError, match=r"masters\.safetensors has another sha256"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not readable"),
        ('{"v": 1, "files": []}', "not readable"),
        ('{"v": 2, "files": {}}', "version 2, this reader knows 1"),
        ('{"v": 1, "files": {"x": {"size_bytes": 0, "sha256": ""}}}', "x is missing"),
    ],
)
def test_bad_complete_file_is_an_error_that_says_why(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = checkpoint.save(tmp_path, _state(), keep=3)
    (path / COMPLETE).write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(path)


def test_changed_identity_is_refused_with_every_difference() -> None:
    state = _state(5, mask_token_id=16, block_size=4, seed=0)
    state.check_identity({"mask_token_id": 16, "block_size": 4, "seed": 0})
    with pytest.raises(
        CheckpointError, match="block_size was 4, now 8; mask_token_id was 16, now 17"
    ):
        state.check_identity({"mask_token_id": 17, "block_size": 8, "seed": 0})


def test_change_that_is_allowed_is_told_and_a_new_fact_is_not(tmp_path: Path) -> None:
    state = checkpoint.load(checkpoint.save(tmp_path, _state(5, lr=0.1, ids=(1, 2)), keep=1))
    own: dict[str, object] = {"lr": 0.2, "ids": (1, 2)}
    assert state.check_identity(own, lambda name: name == "lr") == ["lr was 0.1, now 0.2"]
    with pytest.raises(CheckpointError, match="causal was absent, now True; put the old value"):
        state.check_identity(own | {"causal": True}, lambda name: name == "lr")


def test_fact_that_is_younger_than_the_checkpoint_had_its_default() -> None:
    state, defaults = _state(5, lr=0.1), {"lr": 0.3, "head_fp8": "off"}
    assert state.check_identity({"lr": 0.1, "head_fp8": "off"}, defaults=defaults) == []
    with pytest.raises(CheckpointError, match="configuration: head_fp8 was 'off', now 'both';"):
        state.check_identity({"lr": 0.1, "head_fp8": "both"}, defaults=defaults)


def test_full_disk_leaves_what_was_complete_and_no_half_checkpoint(tmp_path: Path) -> None:
    kept = checkpoint.save(tmp_path, _state(1), keep=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step_00000002\.partial: .*File too large"):
            checkpoint.save(tmp_path, _state(2), keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert checkpoint.load(kept).step == 1


_WRITER = """
import sys, torch
from pathlib import Path
from trainer import checkpoint
step = 0
while True:
    step += 1
    weights = {"w": torch.full((300_000,), float(step))}
    state = checkpoint.CheckpointState(step, step, {}, weights, weights)
    checkpoint.save(Path(sys.argv[1]), state, keep=2)
    print(step, flush=True)
"""


def test_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.003, 0.009):
        root = tmp_path / str(delay_s)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(3):
            announced = int(writer.stdout.readline())
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        path, _skipped = latest_complete(root, digests=True)
        assert path is not None
        state = checkpoint.load(path)
        assert state.step >= announced
        assert state.masters["w"].tolist()[:2] == [float(state.step)] * 2
