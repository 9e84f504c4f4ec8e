"""The observing verbs as a user types them, with real pipes, signals and a real terminal."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflashctl
from dflashctl.cli import main

REPOSITORY = Path(dflashctl.__file__).resolve().parents[1]
HOSTS = """\
version: 1
hosts:
  here:
    backend: local
    containers:
      self: {{workspace: {workspace}, gpus: {{target: [cpu], drafter: [cpu]}}}}
"""


class Laptop:
    """A directory with hosts.yaml, and dflashctl in it: as a process, or called for its output."""

    def __init__(self, root: Path, workspace: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capture = capture
        root.mkdir()
        (root / "hosts.yaml").write_text(HOSTS.format(workspace=workspace))
        self.environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "dflashctl", *arguments]
        return subprocess.Popen(
            argv, cwd=self.root, env=self.environment, **({"stdin": subprocess.DEVNULL} | streams)
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *self._capture.readouterr())


@pytest.fixture
def laptop(
    tmp_path: Path,
    run: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Laptop:
    made = Laptop(tmp_path / "laptop", run.workspace, capfd)
    monkeypatch.chdir(made.root)
    return made


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)  # the time limit of the test ends this


def test_watch_without_a_terminal_prints_lines_and_the_end_and_exits_0(
    laptop: Laptop, run: Any
) -> None:
    run.event("phase", phase="train")
    run.event("step", step=120, num_steps=200, loss=2.5, tokens_per_s=3400.0)
    run.start()
    run.end(0)
    done = laptop.run("watch", "fresh7")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line[10:].split("  ")[0] for line in lines[:2]] == ["phase train", "step 120/200"]
    assert "3.40 Ktok/s" in lines[1]
    assert lines[2].startswith("run fresh7 finished; step 120/200, loss 2.5000")
    assert done.stderr == ""


def test_watch_of_a_killed_run_says_failed_and_signal_9_and_exits_1(
    laptop: Laptop, run: Any
) -> None:
    run.start()
    run.end(None, 9)
    done = laptop.run("watch", "fresh7")
    assert done.returncode == 1
    assert done.stdout == (
        "run fresh7 failed: killed by signal 9 (SIGKILL); last checkpoint step_00000100\n"
    )


def test_watch_as_json_gives_one_document_a_line(laptop: Laptop, run: Any) -> None:
    run.log.write_bytes(b"a log line\n")
    for number in (1, 2):
        run.event("step", step=number)
    run.end(10)
    done = laptop.run("watch", "fresh7", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["event", "event", "ended"]
    assert [line["event"]["step"] for line in lines[:2]] == [1, 2]
    assert (lines[2]["state"], done.returncode) == ("stopped", 0)


def test_ctrl_c_leaves_the_run_alone_says_so_and_exits_130(laptop: Laptop, run: Any) -> None:
    run.start()
    run.event("phase", phase="train")
    process = laptop.start("watch", "fresh7", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert b"phase" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().startswith("the run fresh7 goes on without this view\n")
    assert "dflashctl watch fresh7" in err.decode()
    assert [child.poll() for child in run.children] == [None, None]
    until(lambda: run.follow_pids() == [])


def test_a_watch_that_is_killed_leaves_no_follow_program_behind(laptop: Laptop, run: Any) -> None:
    run.start()
    process = laptop.start("watch", "fresh7", stdout=subprocess.DEVNULL)
    until(run.follow_pids)
    process.kill()
    process.wait()
    until(lambda: run.follow_pids() == [])
    assert [child.poll() for child in run.children] == [None, None]


def on_a_terminal(laptop: Laptop, action: Callable[[subprocess.Popen[bytes]], object]) -> bytes:
    """Watch fresh7 on a terminal, act once the log is seen, and return all that was written."""
    ours, theirs = pty.openpty()
    process = laptop.start("watch", "fresh7", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen, acted = b"", False
    with contextlib.suppress(OSError):  # the terminal is closed: the process ended
        while True:
            ready, _, _ = select.select([ours], [], [], 60)
            assert ready
            seen += os.read(ours, 65536)
            if not acted and b"not markup" in seen:
                action(process)
                acted = True
    os.close(ours)
    process.wait(timeout=60)
    return seen


def test_watch_on_a_terminal_uses_the_alternate_screen_and_leaves_a_receipt(
    laptop: Laptop, run: Any
) -> None:
    run.start()
    run.event("step", step=50, num_steps=200, loss=2.5)
    run.log.write_bytes(b"[bold]not markup[/bold]\n")
    seen = on_a_terminal(laptop, lambda _: run.end(0))
    shown, _, after = seen.partition(b"\x1b[?1049l")
    assert shown.startswith(b"\x1b[?1049h")
    assert b"step 50/200" in shown
    assert b"[bold]not markup[/bold]" in shown
    assert b"run fresh7 finished; step 120/200, loss 2.5000" in after


def test_a_live_view_that_is_terminated_gives_the_terminal_back(laptop: Laptop, run: Any) -> None:
    run.start()
    run.log.write_bytes(b"not markup\n")
    seen = on_a_terminal(laptop, lambda process: process.terminate())
    assert seen.count(b"\x1b[?1049l") == 1
    assert b"\x1b[?25h" in seen


def test_watch_without_a_tag_takes_the_run_that_runs(laptop: Laptop, run: Any) -> None:
    run.start()
    process = laptop.start("watch", stdout=subprocess.PIPE)
    until(run.follow_pids)
    run.end(0)
    out, _ = process.communicate(timeout=60)
    assert out.startswith(b"run fresh7 finished")


def test_watch_without_a_tag_and_without_runs_says_what_is_missing(
    laptop: Laptop, run: Any
) -> None:
    run.end(0)
    done = laptop.run("watch")
    assert done.returncode == 2
    assert "a TAG is needed (running: none)" in done.stderr


def test_logs_gives_the_bytes_of_the_log(laptop: Laptop, run: Any) -> None:
    content = b"one\n\x1b[31mred\x1b[0m \xff\r50%\rlast line without end"
    run.log.write_bytes(content)
    process = laptop.start("logs", "fresh7", stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == content
    process = laptop.start("logs", "fresh7", "-n", "1", stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == content.split(b"\n")[1]


def test_logs_into_head_ends_quietly(laptop: Laptop, run: Any) -> None:
    run.log.write_bytes(b"a line of the log\n" * 1_000_000)
    process = laptop.start("logs", "fresh7", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"a line of the log\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    until(lambda: run.follow_pids() == [])


def test_logs_f_goes_on_over_lost_links_and_ends_with_the_run(laptop: Laptop, run: Any) -> None:
    run.start()
    run.log.write_bytes(b"before\n")
    process = laptop.start("logs", "fresh7", "-f", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"before\n"
    assert run.kill_followers() == 1
    with run.log.open("ab") as stream:
        stream.write(b"after\n")
    assert process.stdout.readline() == b"after\n"
    run.end(0)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"", 0)
    told = err.decode().splitlines()
    assert "trying again" in told[0]
    assert told[1].startswith("connected again")
    assert told[2] == "run fresh7 finished"


def test_logs_f_of_a_run_that_fails_exits_1(laptop: Laptop, run: Any) -> None:  # F51
    run.start()
    run.log.write_bytes(b"last words\n")
    run.end(3)
    done = laptop.run("logs", "fresh7", "-f")
    assert (done.returncode, done.stdout) == (1, "last words\n")
    assert "run fresh7 failed: exit status 3" in done.stderr
    assert laptop.run("logs", "fresh7").returncode == 0


def test_status_of_a_killed_run_says_so_and_exits_1_and_of_all_runs_exits_0(
    laptop: Laptop, run: Any
) -> None:
    run.start()
    run.event("step", step=120, num_steps=200, loss=2.5)
    run.end(None, 9)
    one, every = laptop.run("status", "fresh7"), laptop.run("status")
    assert (one.returncode, every.returncode) == (1, 0)
    assert "failed: killed by signal 9 (SIGKILL)" in one.stdout
    assert one.stdout.splitlines()[-1] == "next             dflashctl launch --resume fresh7"
    assert every.stdout.splitlines()[1].split()[:4] == ["here/self", "fresh7", "killed", "120/200"]


def test_status_as_json_is_one_document(laptop: Laptop, run: Any) -> None:
    run.start()
    done = laptop.run("status", "fresh7", "--json")
    document = json.loads(done.stdout)
    assert (document["schema"], document["ok"], done.returncode) == (1, True, 0)
    assert document["runs"][0]["state"] == "running"


@pytest.mark.parametrize("verb", ["watch", "logs", "status", "pull"])
def test_a_tag_that_is_not_there_is_exit_2_with_a_next_command(laptop: Laptop, verb: str) -> None:
    done = laptop.run(verb, "fresh8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "fresh8" in done.stderr
    assert "hint: dflashctl runs list" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["watch", "logs", "status", "pull"])
def test_a_tag_that_could_be_misread_is_exit_2(laptop: Laptop, verb: str) -> None:
    done = laptop.run(verb, "../../etc")
    assert done.returncode == 2
    assert "is not usable: a tag is a letter" in done.stderr


def test_pull_brings_the_run_beside_hosts_yaml_and_the_list_shows_it(
    laptop: Laptop, run: Any
) -> None:
    run.log.write_bytes(b"log\n")
    run.start()
    run.end(0)
    done = laptop.run("pull", "fresh7")
    assert done.returncode == 0
    assert "4 files" in done.stdout
    assert (laptop.root / "runs/fresh7/train_stdout_fresh7.log").read_bytes() == b"log\n"
    listed = laptop.run("runs", "list").stdout.splitlines()
    assert listed[1].split()[:3] == ["fresh7", "here/self", "finished"]
    assert listed[1].split()[-1] == "pulled"
    again = laptop.run("pull", "fresh7", "--json")
    assert json.loads(again.stdout)["received"] == []


def test_silence_of_every_container_is_not_told_as_no_run(laptop: Laptop) -> None:
    hosts = laptop.root / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace("backend: local", "address: root@a..b"))
    done = laptop.run("status")
    assert done.returncode == 4
    assert done.stdout == "no run was seen; not every container answered\n"
    assert "error[unreachable]: here/self: the name a..b cannot be resolved" in done.stderr
