"""launch, resume and stop on the local backend: real tmux, runner, signals; a stand-in trainer."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflashctl.remote.liveness import is_locked
from tests.dflashctl.act.conftest import Project, names, wait_until


def steps(project: Project, tag: str) -> list[int]:
    path = project.run_dir(tag) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event["step"] for event in map(json.loads, lines) if event["kind"] == "step"]


def test_launch_pins_everything_and_proves_the_run_alive(deployed: Project) -> None:
    document = deployed.document("launch", "--tag", "fresh7", "--set", "seed=5")
    assert document["rc"] == 0, document
    assert document["state"] == "running"
    assert document["event"]["kind"] in ("phase", "step")
    manifest = json.loads((deployed.run_dir("fresh7") / "manifest.json").read_text())
    assert manifest["seed"] == 5
    assert manifest["release"] in names(f"{deployed.workspace}/releases")
    assert manifest["packages"]["torch"].startswith("2.")
    assert manifest["target_revision"].startswith("sha256:")
    assert [gpu["role"] for gpu in manifest["gpus"]] == ["target", "drafter"]
    assert manifest["warmup"] == "none"
    recorded = json.loads((deployed.root / "runs/fresh7/manifest.json").read_text())
    assert recorded == manifest
    environment = deployed.run_dir("fresh7") / "environment.json"
    assert environment.stat().st_mode & 0o777 == 0o600
    assert names(deployed.root / "runs/fresh7") == ["manifest.json"]
    assert deployed.run("stop", "fresh7").returncode == 0


def test_the_same_tag_twice_exits_3_and_leaves_the_run_alone(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x").returncode == 0
    again = deployed.run("launch", "--tag", "x")
    assert again.returncode == 3
    assert "error[tag-exists]" in again.stderr
    assert "--resume x" in again.stderr
    before = len(steps(deployed, "x"))
    wait_until(lambda: len(steps(deployed, "x")) > before)
    # Without the laptop's record, the run directory itself refuses.
    (deployed.root / "runs/x/manifest.json").unlink()
    unrecorded = deployed.run("launch", "--tag", "x")
    assert unrecorded.returncode == 3
    assert "run directory is there (running)" in unrecorded.stderr
    assert deployed.run("-l", "here", "stop", "x").returncode == 0


def test_stop_gets_a_checkpoint_and_resume_goes_on_from_it(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x").returncode == 0
    stopped = deployed.document("stop", "x")
    assert (stopped["rc"], stopped["signal"], stopped["gone"]) == (0, "SIGINT", True)
    assert stopped["session_gone"] is True
    record = deployed.exit_record("x")
    assert (record["state"], record["rc"], record["signal"]) == ("stopped", 10, None)
    assert record["last_checkpoint"] == f"step_{record['last_step']:08d}"
    again = deployed.document("stop", "x")
    assert (again["rc"], again["ended_before"]) == (0, True)
    resumed = deployed.document("launch", "--resume", "x")
    assert (resumed["rc"], resumed["state"], resumed["resumed"]) == (0, "running", True)
    assert resumed["event"]["kind"] in ("phase", "step")
    wait_until(lambda: steps(deployed, "x")[-1] > record["last_step"])
    done = steps(deployed, "x")
    assert done == list(range(1, len(done) + 1)), "steps are neither lost nor repeated"
    refused = deployed.run("launch", "--resume", "x")
    assert refused.returncode == 3
    assert "error[running]" in refused.stderr
    assert deployed.run("stop", "x").returncode == 0
    assert (deployed.run_dir("x") / "exit_1.json").exists()


def test_resume_of_a_finished_run_says_so_and_changes_nothing(deployed: Project) -> None:
    deployed.run("launch", "--tag", "x", "--set", "optim.max_steps=3")
    run_dir = deployed.run_dir("x")
    wait_until((run_dir / "exit.json").exists)
    wait_until(lambda: not is_locked(run_dir / "run.lock"))
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    refused = deployed.run("launch", "--resume", "x")
    assert refused.returncode == 3
    assert "error[finished]: here/self: the run x has finished, at step 3;" in refused.stderr
    assert "hint: dflashctl pull x " in refused.stderr
    assert "starting" not in refused.stderr
    after = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    assert after == before
    (run_dir / "checkpoints" / "step_00000003" / "COMPLETE.json").unlink()
    assert deployed.run("launch", "--resume", "x").returncode == 0  # to make it again


def test_a_trainer_that_ignores_signals_is_killed_and_stop_says_so(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x", "--set", "seed=13").returncode == 0
    process = deployed.popen("stop", "x", "--grace", "1", "--json")
    out, err = process.communicate(timeout=100)
    document = json.loads(out)
    assert (process.returncode, document["signal"], document["gone"]) == (1, "SIGKILL", True)
    assert "SIGINT sent" in err
    assert "SIGTERM sent" in err
    assert deployed.exit_record("x")["signal"] == signal.SIGKILL


def test_kill_9_of_the_trainer_is_told_and_resume_uses_the_last_checkpoint(
    deployed: Project,
) -> None:
    assert deployed.run("launch", "--tag", "x").returncode == 0
    wait_until(lambda: len(steps(deployed, "x")) > 25)
    process = json.loads((deployed.run_dir("x") / "process.json").read_text())
    os.kill(process["trainer_pid"], signal.SIGKILL)
    wait_until((deployed.run_dir("x") / "exit.json").exists)
    record = deployed.exit_record("x")
    assert (record["state"], record["signal"]) == ("killed", 9)
    status = deployed.run("status", "x")
    assert status.returncode == 1
    assert "killed" in status.stdout
    resumed = deployed.document("launch", "--resume", "x")
    assert resumed["rc"] == 0
    events = (deployed.run_dir("x") / "metrics.jsonl").read_text().splitlines()
    phases = [event for event in map(json.loads, events) if event["kind"] == "phase"]
    assert f"step_{phases[-1]['resumed_at']:08d}" == record["last_checkpoint"]
    assert deployed.run("stop", "x").returncode == 0


def test_a_run_that_dies_at_once_is_reported_with_its_log(deployed: Project) -> None:
    failed = deployed.run("launch", "--tag", "x", "--set", "optim.lr=99")
    assert failed.returncode == 1
    assert "error[run-failed]" in failed.stderr
    assert "lr 99 explodes" in failed.stderr


def test_what_stands_against_a_launch_is_told_with_the_next_command(project: Project) -> None:
    missing = project.run("launch", "--tag", "x")
    assert missing.returncode == 3
    assert "error[release-missing]" in missing.stderr
    assert "dflashctl deploy" in missing.stderr
    assert project.run("deploy").returncode == 0
    for name in ("target/model.safetensors", "chats.jsonl"):
        (Path(project.workspace) / name).unlink()
    evaluation = ("evaluation.every_steps=5", "evaluation.prompts=/nowhere/heldout.jsonl")
    settings = [word for one in evaluation for word in ("--set", one)]
    refused = project.run("launch", "--tag", "x", *settings)
    assert refused.returncode == 3
    assert "evaluation.prompts.heldout /nowhere/heldout.jsonl is not in the" in refused.stderr
    assert "target: model.safetensors is missing" in refused.stderr
    assert "chats.jsonl is not in the container" in refused.stderr
    assert "dflashctl push" in refused.stderr
    assert not (project.root / "runs").exists(), "a refused launch leaves no record"
    assert not project.run_dir("x").exists()


def test_a_python_without_torch_is_refused_with_deploy_env(deployed: Project) -> None:
    hosts = (deployed.root / "hosts.yaml").read_text()
    python = next(line for line in hosts.splitlines() if "python:" in line)
    (deployed.root / "hosts.yaml").write_text(
        hosts.replace(python, "        python: /usr/bin/python3")
    )
    refused = deployed.run("launch", "--tag", "x")
    assert refused.returncode == 3
    assert "lacks torch" in refused.stderr
    assert "deploy --env" in refused.stderr


def test_a_release_changed_in_place_is_not_launched(deployed: Project) -> None:
    (release,) = Path(deployed.workspace, "releases").iterdir()
    with (release / "trainer/runner.py").open("a") as stream:
        stream.write("# changed\n")
    refused = deployed.run("launch", "--tag", "x")
    assert refused.returncode == 3
    assert "runner.py is not what was deployed" in refused.stderr


def test_resume_refuses_changed_data_with_exit_7(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x").returncode == 0
    assert deployed.run("stop", "x").returncode == 0
    with Path(deployed.workspace, "chats.jsonl").open("a") as stream:
        stream.write("{}\n")
    refused = deployed.run("launch", "--resume", "x")
    assert refused.returncode == 7
    assert "dataset_sha256" in refused.stderr


def test_without_a_tag_the_next_of_the_series_is_proposed(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "fresh6").returncode == 0
    assert deployed.run("stop", "fresh6").returncode == 0
    silent = deployed.run("launch")
    assert silent.returncode == 2
    assert "dflashctl launch --tag fresh7" in silent.stderr
    accepted = deployed.document("launch", "--yes")
    assert accepted["manifest"]["tag"] == "fresh7"
    assert deployed.run("stop", "fresh7").returncode == 0


def test_a_start_killed_before_its_runner_is_replaced_by_the_rerun(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x").returncode == 0
    assert deployed.run("stop", "x").returncode == 0
    # As a start leaves it that was killed between the rename and tmux: no process, no exit.
    directory = deployed.run_dir("x")
    for path in directory.iterdir():
        if path.name not in ("manifest.json", "environment.json"):
            subprocess.run(["rm", "-r", str(path)], check=True)
    record = deployed.root / "runs/x/manifest.json"
    record.rename(record.with_name("launching.json"))
    (directory.parent / ".starting-y").mkdir()
    done = deployed.document("launch", "--tag", "x")
    assert (done["rc"], done["state"], done["adopted"]) == (0, "running", False)
    assert not (directory.parent / ".starting-y").exists()
    assert names(deployed.root / "runs/x") == ["manifest.json"]
    assert deployed.run("stop", "x").returncode == 0


def test_a_launch_whose_client_died_after_the_start_is_completed_by_the_rerun(
    deployed: Project,
) -> None:
    first = deployed.document("launch", "--tag", "x")
    record = deployed.root / "runs/x/manifest.json"
    record.rename(record.with_name("launching.json"))
    other = deployed.run("launch", "--tag", "x", "--set", "seed=3")
    assert other.returncode == 3
    assert "another configuration" in other.stderr
    done = deployed.document("launch", "--tag", "x")
    assert (done["rc"], done["adopted"]) == (0, True)
    assert done["manifest"]["run_id"] == first["manifest"]["run_id"]
    assert done["process"]["trainer_pid"] == first["process"]["trainer_pid"]
    assert deployed.run("stop", "x").returncode == 0


def test_a_rerun_completes_the_launch_whose_start_ends_while_it_is_on_its_way(
    deployed: Project,
) -> None:
    first = deployed.document("launch", "--tag", "x")
    assert deployed.run("stop", "x").returncode == 0
    record = deployed.root / "runs/x/manifest.json"
    record.rename(record.with_name("launching.json"))
    directory, aside = deployed.run_dir("x"), deployed.root / "aside"
    directory.rename(aside)
    # As a start whose client was killed: it has the lock, and nothing is to be seen of it yet.
    lock = os.open(directory.parent / ".launch.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with deployed.popen("--json", "launch", "--tag", "x") as rerun:
        assert rerun.stderr is not None
        assert any(line.startswith("starting") for line in rerun.stderr)
        directory.mkdir()
        for name in ("manifest.json", "environment.json"):
            shutil.copy(aside / name, directory)
        argv = [sys.executable, "-m", "trainer.runner", "--run-dir", str(directory)]
        release = Path(deployed.workspace, "releases", first["manifest"]["release"])
        environment = os.environ | {"PYTHONPATH": str(release)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(argv, env=environment, cwd=directory, **quiet):
            wait_until((directory / "process.json").exists)
            os.close(lock)
            told, err = rerun.communicate()
            done = json.loads(told)
            assert (rerun.returncode, done.get("adopted")) == (0, True), (done, err)
            assert done["manifest"]["run_id"] == first["manifest"]["run_id"]
            assert names(deployed.root / "runs/x") == ["manifest.json"]
            assert deployed.run("stop", "x").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sigkill_of_launch_at_any_moment_leaves_before_or_after_and_a_rerun_completes(
    deployed: Project,
) -> None:
    begin = time.monotonic()
    assert deployed.run("launch", "--tag", "warm").returncode == 0
    whole_s = time.monotonic() - begin
    assert deployed.run("stop", "warm").returncode == 0
    chance = random.Random(4)
    for number in range(8):
        tag = f"k{number}"
        process = deployed.popen("launch", "--tag", tag)
        time.sleep(chance.uniform(0.3, 1.0) * whole_s)
        process.kill()
        process.communicate()
        done = deployed.document("launch", "--tag", tag)
        # After: the first command had recorded the run before it was killed.
        complete = done["rc"] == 0 or done["error"]["code"] == "tag-exists"
        assert complete, done
        wait_until(lambda tag=tag: len(steps(deployed, tag)) > 1)
        done_steps = steps(deployed, tag)
        assert done_steps == list(range(1, len(done_steps) + 1)), "one trainer, not two"
        assert (deployed.root / "runs" / tag / "manifest.json").exists()
        assert deployed.run("stop", tag).returncode == 0
    assert not list(Path(deployed.workspace, "runs").glob(".starting-*"))


def test_evaluate_brings_local_prompts_along_and_returns_the_document(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x", "--set", "optim.max_steps=2").returncode == 0
    (deployed.root / "held.jsonl").write_text("hello\n")
    arguments = ("evaluate", "x", "--prompts", "held.jsonl", "--num-prompts", "4")
    document = deployed.document(*arguments)
    assert document["rc"] == 0
    assert document["evaluation"]["seen"] == "hello\n"
    assert document["evaluation"]["num_prompts"] == 4
    nowhere = deployed.run("evaluate", "x", "--prompts", "nowhere.jsonl")
    assert nowhere.returncode == 2
    assert "nowhere.jsonl" in nowhere.stderr
    unknown = deployed.run("-l", "here", "evaluate", "nope", "--prompts", "held.jsonl")
    assert unknown.returncode == 2


def test_a_failing_trainer_command_exits_1_with_its_own_words(deployed: Project) -> None:
    assert deployed.run("launch", "--tag", "x", "--set", "optim.max_steps=2").returncode == 0
    failed = deployed.run("export", "x")
    assert failed.returncode == 1
    assert "export fails here on purpose" in failed.stderr


def test_warmup_reports_each_device_and_uses_the_cache_of_launch(deployed: Project) -> None:
    told = deployed.run("warmup").stderr.splitlines()
    assert told[-2:] == ["warming up", "cpu is warm after 0.5 s"]
    warm = deployed.document("warmup")
    assert warm["rc"] == 0
    assert warm["devices"] == [{"device": "cpu", "warmup_s": 0.5, "num_compiles": 3}]
    damaged = Path(deployed.workspace) / "cache/older/warmup.json"
    damaged.parent.mkdir()
    damaged.write_text("[1")
    launched = deployed.document("launch", "--tag", "x", "--set", "optim.max_steps=2")
    assert launched["manifest"]["cache_dir"] == warm["cache_dir"]
    assert launched["manifest"]["warmup"] == "fresh"
    environment = json.loads((deployed.run_dir("x") / "environment.json").read_text())
    assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith(warm["cache_dir"])


def test_caches_of_a_warm_up_are_kept_here_and_offered_to_the_next(
    deployed: Project, tmp_path: Path
) -> None:
    file = tmp_path / "caches.bin"
    done = deployed.run("warmup", "--save-artifacts", str(file))
    assert done.stdout.endswith(f"  its caches are in {file}\n")
    before = file.read_bytes()
    assert before.endswith(b"\nwhat was compiled")
    told = deployed.document(
        "warmup", "--load-artifacts", str(file), "--save-artifacts", str(tmp_path / "again.bin")
    )
    assert (told["rc"], told["loaded"]) == (0, str(file))
    assert (
        "loaded what was compiled" in deployed.run("warmup", "--load-artifacts", str(file)).stderr
    )
    assert (tmp_path / "again.bin").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*.bin*")) == ["again.bin", "caches.bin"]


@pytest.mark.parametrize(
    ("arguments", "content", "status", "words"),
    [
        (("--load-artifacts", "c.bin"), None, 2, "error[usage]: c.bin: No such file"),
        (("--load-artifacts", "c.bin"), b"PK", 7, "error[artifacts-damaged]: c.bin: c.bin is no"),
        (("--save-artifacts", "no/c.bin"), None, 2, "error[usage]: no/c.bin: no file can be"),
        (("--load-artifacts", "/dev/zero"), None, 2, "error[usage]: /dev/zero: Not a file"),
        (("--save-artifacts", "."), None, 2, "error[usage]: .: no file can be written there"),
        (("--save-artifacts", "/dev/null"), None, 2, "error[usage]: /dev/null: no file can be"),
        (("--save-artifacts", "n" * 300), None, 2, f"error[usage]: {'n' * 300}: no file can be"),
    ],
)
def test_files_of_caches_are_looked_at_before_anything_is_asked(
    project: Project, arguments: tuple[str, str], content: bytes | None, status: int, words: str
) -> None:
    if content is not None:
        (project.root / "c.bin").write_bytes(content)
    done = project.run("warmup", *arguments)  # nothing is deployed
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr


def test_the_receipts_say_what_was_pinned_proven_and_what_to_type_next(deployed: Project) -> None:
    receipt = deployed.run("launch", "--tag", "x", "--set", "seed=4").stdout
    assert receipt.startswith("here/self  x launched; a second look saw: its process lives")
    for line in (
        "  seed        4\n",
        "  target on   cpu, 1 thread\n",
        f"  log         {deployed.run_dir('x')}/train_stdout_x.log\n",
        "  dflashctl watch x\n",
        "  dflashctl stop x\n",
    ):
        assert line in receipt
    stopped = deployed.run("stop", "x")
    record = deployed.exit_record("x")
    assert stopped.stdout.startswith("x ended by SIGINT: stopped\n")
    assert f"  last checkpoint  {record['last_checkpoint']}\n" in stopped.stdout
    assert "SIGINT sent to pid" in stopped.stderr
    assert deployed.run("stop", "x").stdout.startswith("x had ended before: stopped\n")


def test_a_log_directory_of_its_own_is_used_and_its_old_log_refuses_the_tag(
    deployed: Project,
) -> None:
    logs = deployed.root / "logs"
    hosts = deployed.root / "hosts.yaml"
    hosts.write_text(f"{hosts.read_text()}        log_dir: {logs}\n")
    done = deployed.run("launch", "--tag", "x", "--set", "optim.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert "training from step 0" in (logs / "train_stdout_x.log").read_text()
    (logs / "train_stdout_y.log").write_text("old")
    refused = deployed.run("launch", "--tag", "y")
    assert refused.returncode == 3
    assert "the log of an earlier run is there" in refused.stderr
