"""The command line as a process: start-up, options, exit codes, errors, JSON."""

import importlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from dflashctl.cli import MODULES, app
from dflashctl.cli.verb import parse_duration
from tests.dflashctl.act.conftest import REPOSITORY, Project

HEAVY = ("torch", "transformers", "paramiko", "fabric", "numpy", "pydantic", "rich", "yaml")
REPORT = """
import sys
from dflashctl.cli import main
rc = main(sys.argv[1:])
loaded = sorted({name.split(".")[0] for name in sys.modules} & set(%r))
sys.stderr.write(f"loaded {loaded} rc {rc}")
"""
INTERRUPTED_AT = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # however the tests were started
moment = sys.argv.pop()
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
if moment == "exit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from dflashctl.__main__ import run
run()
"""


def verbs() -> list[list[str]]:
    group = typer.main.get_command(app)
    found: list[list[str]] = [[]]
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        found.append([name])
        found += [[name, inner] for inner in getattr(command, "commands", {})]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=lambda verb: " ".join(verb) or "dflashctl")
def test_help_of_every_verb_loads_nothing_heavy(verb: list[str]) -> None:
    argv = [sys.executable, "-c", REPORT % (HEAVY,), *verb, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")
    assert done.stderr == "loaded [] rc 0"


@pytest.mark.parametrize("moment", ["dflashctl.cli", "typer", "dflashctl.cli.site", "exit"])
def test_ctrl_c_at_the_start_or_the_end_of_a_command_shows_no_traceback(moment: str) -> None:
    argv = [sys.executable, "-c", INTERRUPTED_AT, "--help", moment]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr in ("interrupted\n", "")  # typer says nothing while it looks for a verb


def test_every_verb_is_registered_by_the_module_that_the_table_names() -> None:
    for module, names in MODULES.items():
        part = typer.Typer()
        importlib.import_module(f"dflashctl.cli.{module}").register(part)
        assert sorted(typer.main.get_group(part).commands) == sorted(names.split()), module


def test_a_verb_imports_the_modules_of_no_other() -> None:
    code = REPORT % (("dflashctl.cli.act", "dflashctl.cli.observe"),)
    code = code.replace('name.split(".")[0]', "name")
    argv = [sys.executable, "-c", code, "logs", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == "loaded ['dflashctl.cli.observe'] rc 0"


def test_help_costs_at_most_200_ms_of_cpu() -> None:
    argv = [sys.executable, "-m", "dflashctl", "--help"]
    subprocess.run(argv, capture_output=True, check=True)  # writes the bytecode
    costs = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(costs) <= 0.2


def test_completion_offers_the_verbs() -> None:
    environment = os.environ | {
        "_DFLASHCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": "dflashctl la",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from dflashctl.cli import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["launch", "lab"]


def test_global_options_work_before_and_after_the_verb(project: Project) -> None:
    other = project.root / "other.yaml"
    (project.root / "hosts.yaml").rename(other)
    for arguments in (
        ("--config", "other.yaml", "--json", "deploy", "--dry-run"),
        ("deploy", "--dry-run", "--json", "--config", "other.yaml"),
        ("--json", "deploy", "--config", "other.yaml", "--dry-run", "--host", "here"),
    ):
        done = project.run(*arguments)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["places"][0]["place"] == "here/self"
    missing = project.run("deploy")
    assert missing.returncode == 2
    assert "dflashctl init" in missing.stderr


def test_an_error_with_json_is_one_document_on_stdout(project: Project) -> None:
    done = project.run("launch", "--tag", "x", "--json", "--limit", "nowhere")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert (document["schema"], document["ok"]) == (1, False)
    error = document["error"]
    assert set(error) == {"code", "exit_code", "message", "hint", "place"}
    assert (error["code"], error["exit_code"]) == ("usage", 2)
    assert "nowhere" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lunch",), "launch"),
        (("launch", "--nonsense"), "--nonsense"),
        (("stop",), "TAG"),
        (("gpus", "--watch", "0"), "--watch"),
        (("launch", "--resume", "x", "--tag", "y"), "--resume"),
        (("launch", "--tag", "bad.tag"), "bad.tag"),
        (("stop", "../x"), "../x"),
    ],
)
def test_a_wrong_command_line_exits_2_without_a_traceback(
    project: Project, arguments: tuple[str, ...], words: str
) -> None:
    done = project.run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_a_verb_the_help_is_shown_and_the_status_is_2(project: Project) -> None:
    done = project.run()
    assert done.returncode == 2
    assert "Usage: dflashctl" in done.stderr


def test_version_is_printed(project: Project) -> None:
    assert project.run("--version").stdout == "dflashctl 0.1.0\n"


def test_an_unexpected_error_is_one_line_and_its_trace_a_file(project: Project) -> None:
    broken = project.root / "broken" / "yaml"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ZeroDivisionError('on purpose')\n")
    project.code = broken.parent
    project.environment["XDG_STATE_HOME"] = str(project.root / "state")
    done = project.run("launch", "--tag", "x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error[bug]: unexpected ZeroDivisionError: on purpose" in done.stderr
    (trace,) = (project.root / "state" / "dflashctl").iterdir()
    assert str(trace) in done.stderr
    assert "Traceback" in trace.read_text()
    assert "Traceback" in project.run("launch", "--tag", "x", "--debug").stderr


def test_a_file_in_the_way_is_named_without_a_traceback(project: Project) -> None:
    (project.root / "runs").write_text("")
    done = project.run("launch", "--tag", "x")
    assert done.returncode == 1
    assert done.stderr.endswith("/runs/x/manifest.json: Not a directory\n")


def test_ctrl_c_exits_130(project: Project) -> None:
    process = project.popen("gpus", "--watch", "30")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("HOST")
    process.send_signal(2)
    _out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "verb",
    [
        "--help",
        "launch --help",
        "gpus",
        "gpus --json",
        "runs list --local",
        "status",
        "nosuch --json",
    ],
)
def test_a_reader_that_left_before_the_first_line_is_met_quietly(
    project: Project, verb: str
) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)  # as `| head` does, only sooner
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-m", "dflashctl", *verb.split()],
        cwd=project.root,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=ours,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")


def test_init_writes_hosts_yaml_that_loads(tmp_path: Path, project: Project) -> None:
    (project.root / "hosts.yaml").unlink()
    done = project.run("init")
    assert (done.returncode, done.stdout.endswith("edit it, then: dflashctl doctor\n")) == (0, True)
    again = project.run("init")
    assert again.returncode == 3
    nowhere = project.run("init", "no/such")
    assert (nowhere.returncode, "mkdir -p no/such" in nowhere.stderr) == (2, True)
    loaded = project.run("--limit", "nowhere", "deploy", "--dry-run")
    assert "names no host" in loaded.stderr, "the starter parses; only the limit is wrong"
    assert tmp_path == project.root


def test_a_tag_without_a_record_is_named_where_several_containers_may_hold_it(
    project: Project,
) -> None:
    place = "workspace: /w, python: /p, gpus: {target: [0], drafter: [0]}"
    (project.root / "hosts.yaml").write_text(
        f"version: 1\nhosts:\n  a:\n    address: a\n    containers:\n"
        f"      200: {{{place}}}\n      201: {{{place}}}\n"
    )
    done = project.run("stop", "fresh8")
    assert done.returncode == 2
    assert done.stderr == (
        "error[usage]: no run fresh8 is recorded here, and 2 containers may hold it: a/200, a/201\n"
        "  hint: dflashctl runs list; then name its own: --limit a/200\n"
    )


def test_a_wait_is_written_in_seconds_or_with_units() -> None:
    words = {None: 0, "0": 0, "45": 45, "45s": 45, "10m": 600, "2h": 7200, "1d2h3m4s": 93784}
    assert {text: parse_duration(text) for text in words} == words
    for wrong in ("", "h", "2 h", "1.5h", "2h1d", "-1"):
        with pytest.raises(typer.BadParameter, match="no number of seconds"):
            parse_duration(wrong)
