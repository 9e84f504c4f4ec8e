"""What a host says cannot drive the terminal of the laptop."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import DflashctlError
from dflashctl.event_stream import Notice, RunEvent
from dflashctl.render.failure import failure_text
from dflashctl.render.live import screen_lines
from dflashctl.run_view import RunView
from tests.dflashctl.act.conftest import Project
from tests.dflashctl.act.test_exec import Shell
from tests.dflashctl.observe.conftest import EXAMPLE_MANIFEST
from trainer.contract.exit_record import ExitRecord

HOSTILE = "\x1b]0;owned\x07a\x1b[2J\x9b31mb\x90x\x9c\u202ec\x7f\x08"


def test_error_shows_the_words_of_a_host_without_controls() -> None:  # F64
    error = DflashctlError(f"m {HOSTILE}", hint=f"h {HOSTILE}\nnext", place=f"p{HOSTILE}")
    assert failure_text(error) == "error[failed]: pabc: m abc\n  hint: h abc\n        next\n"


@pytest.mark.parametrize("backend", ["fabric", "openssh"])
def test_greeting_of_a_hostile_server_is_shown_without_controls(
    tmp_path: Path, backend: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        greet = threading.Thread(target=_greet, args=(server,), daemon=True)
        greet.start()
        (tmp_path / "known").touch()
        (tmp_path / "config").touch()
        (tmp_path / "hosts.yaml").write_text(
            f"version: 1\nhosts:\n  near:\n    address: root@127.0.0.1\n"
            f"    port: {server.getsockname()[1]}\n    backend: {backend}\n"
            f"    known_hosts: {tmp_path}/known\n    ssh_config: {tmp_path}/config\n"
            f"    containers: {{self: {{python: {sys.executable}}}}}\n"
        )
        done = Shell(tmp_path).run("--", "true")
    assert done.returncode in (4, 5)
    assert done.stderr.startswith(b"error[")
    shown = done.stderr.decode()
    assert controls_of(shown) == []


def controls_of(shown: str) -> list[str]:
    """Return what a terminal would not show but do."""
    return [char for char in shown if not (char.isprintable() or char == "\n")]


def show(project: Project, *arguments: str) -> str:
    """Return what a verb prints, which must be harmless and hold the words, cleaned: abc."""
    done = project.run(*arguments)
    shown = done.stdout + done.stderr
    assert controls_of(shown) == [], arguments
    assert "abc" in shown, (arguments, shown)
    assert "owned" not in shown, arguments
    return shown


@pytest.fixture
def hostile_run(project: Project) -> Project:
    """A run that ended, whose records hold what drives terminals, there and on the laptop."""
    run_dir = project.run_dir("x")
    run_dir.mkdir(parents=True)
    words: dict[str, Any] = {"run_id": HOSTILE, "release": HOSTILE, "tag": "x"}
    (run_dir / "manifest.json").write_text(json.dumps(EXAMPLE_MANIFEST | words))
    ended = ExitRecord(HOSTILE, "failed", 1, None, 0.0, 1.0, 5, HOSTILE, oom_kill=False)
    record = json.loads(ended.to_json()) | {"error": HOSTILE}
    (run_dir / "exit.json").write_text(json.dumps(record))
    (run_dir / "train_stdout_x.log").write_text("")
    event = {"v": 1, "seq": 0, "t_unix_s": 1.0, "run_id": "r", "kind": "warning", "text": HOSTILE}
    (run_dir / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    (run_dir / "export").mkdir()
    (run_dir / "export" / "\x9b31mabc\u202e").write_text("weights")
    return project


def test_records_of_a_run_are_shown_without_controls(hostile_run: Project) -> None:
    for arguments in (
        ("status", "x"),
        ("watch", "x"),
        ("logs", "x", "-f"),
        ("pull", "x"),
        ("stop", "x"),
    ):
        show(hostile_run, *arguments)
    path = hostile_run.root / "runs" / "x" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": HOSTILE}))
    show(hostile_run, "runs", "list")


def test_live_screen_shows_the_words_of_a_run_without_controls() -> None:
    view = RunView("x", "here/self")
    for event in ({"kind": "warning", "text": HOSTILE}, {"kind": "phase", "phase": HOSTILE}):
        view.update(RunEvent(event), 0.0)
    view.update(Notice("replaced", f"{HOSTILE}\nnext"), 0.0)
    lines = [text for text, _style in screen_lines(view, 0.0, 80, 24)]
    assert {"warning: abc", "abc next"} <= set(lines)
    assert all(text.isprintable() for text in lines)


def test_lines_of_the_trainer_are_shown_without_controls(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    (Path(project.workspace) / "words").write_text(HOSTILE)
    (project.root / "held.jsonl").write_text("{}\n")
    show(project, "check", "--fast")
    show(project, "warmup")
    show(project, "launch", "--tag", "x", "--set", "optim.max_steps=2")
    show(project, "evaluate", "x", "--prompts", "held.jsonl")


# A Python as far as `deploy --env` asks one: its version, an environment, and a pip that talks.
PIP = """#!/bin/sh
case "$*" in
    *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
    *"-m pip "*) cat {words}; echo;;
    *) echo cpython-311 3.11.2;;
esac
"""


def test_output_of_pip_is_shown_without_controls(project: Project) -> None:
    python, words = project.root / "python", project.root / "words"
    words.write_text(HOSTILE)
    python.write_text(PIP.format(words=words))
    python.chmod(0o755)
    hosts = project.root / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace(sys.executable, str(python)))
    assert "environment " in show(project, "deploy", "--env")


SMI = """#!/bin/sh
case "$*" in
    *query-gpu*) echo "0, GPU-a, X, 900, 9000, 0, 0, 0:1.0";;
    *compute-apps*) echo "GPU-a, {pid}, python, 800";;
esac
"""


def test_command_of_a_process_on_a_gpu_is_shown_without_controls(project: Project) -> None:
    tools = project.root / "bin"
    tools.mkdir()
    with subprocess.Popen(["sh", "-c", "read line", HOSTILE], stdin=subprocess.PIPE) as holder:
        try:
            (tools / "nvidia-smi").write_text(SMI.format(pid=holder.pid))
            (tools / "nvidia-smi").chmod(0o755)
            project.environment["PATH"] = f"{tools}:/usr/bin:/bin"
            assert "foreign" in show(project, "gpus")
        finally:
            holder.kill()


def _greet(server: socket.socket) -> None:
    """Greet every connection with escapes instead of a protocol version."""
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return
        with link:
            link.sendall(b"SSH-9.9-\x1b]0;owned\x07\x1b[2J\x9b31m\r\n")
