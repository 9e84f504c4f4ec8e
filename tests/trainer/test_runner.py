"""The runner and the trainer it starts, as real processes, down to how they ended."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.events import EventDecoder, encode
from trainer.contract.exit_record import ExitRecord
from trainer.contract.process_record import ProcessRecord

pytestmark = pytest.mark.timeout(120)  # each starts the trainer, some twice

MakeRun = Callable[..., Path]
_PATIENCE_S = 60.0  # of a test that fails; a start takes seconds, more on a busy machine
LONG = {"optim": {"max_steps": 100_000, "epochs": 3000.0}, "run": {"checkpoint_every_steps": 5}}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts the runner of a run directory; all are ended afterwards."""
    runners: list[tuple[subprocess.Popen[bytes], Path]] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def begin(run_dir: Path, *options: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "trainer.runner", "--run-dir", str(run_dir), *options]
        runner = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        runners.append((runner, run_dir))
        return runner

    yield begin
    for runner, run_dir in runners:
        if runner.poll() is None:
            process = run_dir / "process.json"
            if process.exists():
                os.killpg(ProcessRecord.from_json(process.read_text()).pgid, signal.SIGKILL)
            runner.kill()
        runner.communicate(timeout=_PATIENCE_S)


def _events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return list(EventDecoder().feed(path.read_bytes())) if path.exists() else []


def _wait_for(kind: str, run_dir: Path, count: int = 1, limit_s: float = _PATIENCE_S) -> None:
    end = time.monotonic() + limit_s
    while sum(e["kind"] == kind for e in _events(run_dir)) < count:
        log = next(run_dir.glob("*.log"), None)
        told = log.read_text() if log else "no log"
        assert time.monotonic() < end, f"no {kind} event within {limit_s} s: {told}"
        time.sleep(0.02)


def _exit(run_dir: Path) -> ExitRecord:
    return ExitRecord.from_json((run_dir / "exit.json").read_text())


def _process(run_dir: Path) -> ProcessRecord:
    return ProcessRecord.from_json((run_dir / "process.json").read_text())


def test_finished_run_leaves_exit_record_log_and_export(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run("fresh7")
    runner = start(run_dir)
    stdout, stderr = runner.communicate(timeout=_PATIENCE_S)
    assert runner.returncode == 0
    record = _exit(run_dir)
    assert (record.state, record.rc, record.signal) == ("finished", 0, None)
    assert (record.last_step, record.last_checkpoint) == (12, "step_00000012")
    assert record.run_id == "fresh7-0001"
    assert record.error is None
    assert not record.oom_kill
    assert record.ended_unix_s > record.started_unix_s
    log = (run_dir / "train_stdout_fresh7.log").read_bytes()
    assert b"step 12/12" in log
    assert stdout == log  # what `attach` shows is the log
    assert stderr == b""
    assert (run_dir / "export" / "model.safetensors").exists()
    assert not _process(run_dir).alive()
    assert not (run_dir / "exit.json.reserved").exists()


def test_kill_9_of_the_trainer_is_told_with_its_last_checkpoint(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(**LONG)
    runner = start(run_dir)
    _wait_for("checkpoint", run_dir, 2)
    process = _process(run_dir)
    assert process.alive()
    assert process.runner_pid == runner.pid
    assert os.getpgid(process.trainer_pid) == process.pgid == process.trainer_pid
    os.kill(process.trainer_pid, signal.SIGKILL)
    runner.communicate(timeout=_PATIENCE_S)
    assert runner.returncode == 128 + 9
    record = _exit(run_dir)
    assert (record.state, record.rc, record.signal) == ("killed", None, 9)
    assert not record.oom_kill
    last = [e for e in _events(run_dir) if e["kind"] == "checkpoint"][-1]
    assert record.last_checkpoint is not None
    # A kill between the rename and the event leaves one checkpoint more than was told.
    assert record.last_checkpoint >= last["path"]
    assert record.last_step is not None
    assert record.last_step >= last["step"]
    assert not _process(run_dir).alive()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of 170 MB, less than it takes to import torch and a model."""
    root = Path("/sys/fs/cgroup/memory")
    if not os.access(root, os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs root and a writable memory controller (cgroup v1)")
    group = root / f"dflash-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("170M")
    yield group
    while (group / "tasks").read_text():
        time.sleep(0.01)  # what was killed is on its way out
    group.rmdir()


def test_kill_for_memory_is_told_as_such(make_run: MakeRun, small_memory: Path) -> None:
    run_dir = make_run()
    enter = f'echo $$ > {small_memory}/tasks; exec "$@"'
    argv = [sys.executable, "-m", "trainer.runner", "--run-dir", str(run_dir)]
    done = subprocess.run(["sh", "-c", enter, "sh", *argv], check=False, timeout=_PATIENCE_S)
    assert done.returncode == 128 + 9
    record = _exit(run_dir)
    assert (record.state, record.signal, record.oom_kill) == ("killed", 9, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_writes_a_checkpoint_and_ends_with_10(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]], number: int
) -> None:
    run_dir = make_run(optim=LONG["optim"], run={"checkpoint_every_steps": 100_000})
    runner = start(run_dir)
    _wait_for("step", run_dir, 3)
    runner.send_signal(number)  # as Ctrl-C in `attach` does; the runner hands it on
    runner.communicate(timeout=_PATIENCE_S)
    assert runner.returncode == 10
    record = _exit(run_dir)
    assert (record.state, record.rc, record.signal) == ("stopped", 10, None)
    assert record.last_step is not None
    assert record.last_checkpoint == f"step_{record.last_step:08d}"
    assert [e["state"] for e in _events(run_dir) if e["kind"] == "finished"] == ["stopped"]
    assert record.error is None


def test_last_step_is_that_of_the_checkpoint_where_no_step_event_tells_it(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    quiet = {"checkpoint_every_steps": 5, "log_every_steps": 100_000}
    run_dir = make_run(optim=LONG["optim"], run=quiet)
    runner = start(run_dir)
    _wait_for("checkpoint", run_dir)
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=_PATIENCE_S)
    record = _exit(run_dir)
    assert [e for e in _events(run_dir) if e["kind"] == "step"] == []
    assert record.last_checkpoint == f"step_{record.last_step:08d}"
    with (run_dir / "metrics.jsonl").open("ab") as stream:  # an earlier start had come further
        stream.write(encode(_events(run_dir)[-1] | {"kind": "step", "step": 90_000, "seq": 900}))
    resumed = start(run_dir, "--resume")
    _wait_for("checkpoint", run_dir, 3)
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=_PATIENCE_S)
    assert _exit(run_dir).last_checkpoint == f"step_{_exit(run_dir).last_step:08d}"
    assert json.loads((run_dir / "exit_1.json").read_text())["state"] == "stopped"
    assert (run_dir / "train_stdout_tiny.log").read_text().count("--- resumed at ") == 1


def test_hangup_does_not_end_the_run(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(**LONG)
    runner = start(run_dir)
    _wait_for("step", run_dir)
    runner.send_signal(signal.SIGHUP)
    os.kill(_process(run_dir).trainer_pid, signal.SIGHUP)
    before = len(_events(run_dir))
    _wait_for("step", run_dir, before + 20)
    assert runner.poll() is None


def test_runner_that_dies_leaves_the_trainer_and_the_lock(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(**LONG)
    runner = start(run_dir)
    _wait_for("step", run_dir)
    runner.kill()
    runner.communicate(timeout=_PATIENCE_S)
    process = _process(run_dir)
    assert process.alive()
    before = len(_events(run_dir))
    _wait_for("step", run_dir, before + 20)
    second = start(run_dir, "--resume")
    _, stderr = second.communicate(timeout=_PATIENCE_S)
    assert second.returncode == 2
    assert b"already running" in stderr
    os.kill(process.trainer_pid, signal.SIGKILL)


def test_failed_run_tells_the_error_line_of_the_log(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run_dir = make_run(target={"path": str(tmp_path / "nowhere")})
    runner = start(run_dir)
    runner.communicate(timeout=_PATIENCE_S)
    record = _exit(run_dir)
    assert runner.returncode == 2
    assert (record.state, record.rc) == ("failed", 2)
    assert record.error is not None
    assert record.error.startswith("error: target.path")
    assert "nowhere" in record.error
    assert b"Traceback" not in (run_dir / "train_stdout_tiny.log").read_bytes()


def test_run_that_has_finished_is_started_no_more_and_keeps_its_exit_record(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run()
    start(run_dir).communicate(timeout=_PATIENCE_S)
    again = start(run_dir)
    _, stderr = again.communicate(timeout=_PATIENCE_S)
    assert again.returncode == 2
    assert b"resume it with --resume" in stderr
    before, log = _exit(run_dir), (run_dir / "train_stdout_tiny.log").read_bytes()
    resumed = start(run_dir, "--resume")
    _, stderr = resumed.communicate(timeout=_PATIENCE_S)
    assert resumed.returncode == 2
    assert b"it has finished, at step 12; pull or evaluate it" in stderr
    assert _exit(run_dir) == before
    assert not (run_dir / "exit_1.json").exists()
    assert (run_dir / "train_stdout_tiny.log").read_bytes() == log


def test_finished_run_without_its_last_checkpoint_goes_on_from_the_one_before(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(run={"checkpoint_every_steps": 4})
    start(run_dir).communicate(timeout=_PATIENCE_S)
    last = run_dir / "checkpoints" / f"step_{_exit(run_dir).last_step:08d}"
    (last / "COMPLETE.json").unlink()
    resumed = start(run_dir, "--resume")
    resumed.communicate(timeout=_PATIENCE_S)
    assert resumed.returncode == 0
    assert (last / "COMPLETE.json").exists()
    assert json.loads((run_dir / "exit_1.json").read_text())["state"] == "finished"


def test_environment_file_reaches_the_trainer_and_must_be_text(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(**LONG)
    (run_dir / "environment.json").write_text(json.dumps({"DFLASH_TEST_MARK": "a b=c\n"}))
    start(run_dir)
    _wait_for("phase", run_dir)
    pid = _process(run_dir).trainer_pid
    assert b"\0DFLASH_TEST_MARK=a b=c\n\0" in Path(f"/proc/{pid}/environ").read_bytes()
    other = make_run("other")
    (other / "environment.json").write_text('{"A": 1}')
    runner = start(other)
    _, stderr = runner.communicate(timeout=_PATIENCE_S)
    assert runner.returncode == 2
    assert b"environment.json must map names to text" in stderr


def test_trainer_that_cannot_be_recorded_is_ended(
    make_run: MakeRun, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run_dir = make_run(**LONG)
    (run_dir / "process.json").mkdir()  # what a full disk does to the file, done by other means
    runner = start(run_dir)
    runner.communicate(timeout=_PATIENCE_S)
    (run_dir / "process.json").rmdir()
    assert runner.returncode == 1
    assert "cannot start the trainer" in (_exit(run_dir).error or "")
    with (run_dir / "run.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it: the trainer is gone


def test_directory_without_a_manifest_is_refused_in_one_line(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    runner = start(tmp_path)
    _, stderr = runner.communicate(timeout=_PATIENCE_S)
    assert runner.returncode == 2
    assert stderr.startswith(b"error: cannot start the run in ")
    assert stderr.count(b"\n") == 1


def test_runner_imports_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import trainer.runner;"
        "names = {n.partition('.')[0] for n in set(sys.modules) - before} - {'trainer'};"
        "print(sorted(n for n in names if n not in sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
