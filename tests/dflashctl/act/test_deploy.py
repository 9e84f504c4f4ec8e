"""deploy and push on the local backend, through the real command line."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dflashctl.act.conftest import Project, names


def test_the_second_deploy_sends_nothing_in_one_round_trip(project: Project) -> None:
    first = project.document("deploy")["places"][0]
    assert first["num_sent"] == first["num_files"] > 5
    assert (first["round_trips"], first["sent_bytes"] > 0) == (2, True)
    second = project.document("deploy")["places"][0]
    assert (second["num_sent"], second["sent_bytes"], second["round_trips"]) == (0, 0, 1)
    assert names(f"{project.workspace}/releases") == [first["digest"]]
    shown = project.run("deploy", "-v")
    assert "0 files sent" in shown.stdout
    assert "1 round trip\n" in shown.stderr


def test_dry_run_names_the_changes_and_sends_nothing(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    (release,) = Path(project.workspace, "releases").iterdir()
    # Make of it another, older release: one file less, one more, one different.
    (release / "trainer/errors.py").unlink()
    (release / "trainer/gone.py").write_text("")
    (release / "trainer/runner.py").write_text("old")
    release.rename(release.with_name("0" * 64))
    shown = project.run("deploy", "--dry-run")
    assert "+1 ~1 -1 files" in shown.stdout
    for line in ("+ trainer/errors.py", "~ trainer/runner.py", "- trainer/gone.py"):
        assert line in shown.stdout
    assert names(f"{project.workspace}/releases") == ["0" * 64]


def test_a_damaged_release_is_repaired_and_said(project: Project) -> None:
    assert project.run("deploy").returncode == 0
    (release,) = Path(project.workspace, "releases").iterdir()
    (release / "trainer/runner.py").write_text("damaged")
    repaired = project.run("deploy")
    assert repaired.returncode == 0
    assert "replaced a damaged copy: trainer/runner.py" in repaired.stdout
    assert project.document("deploy")["places"][0]["num_sent"] == 0


def wheel(directory: Path) -> Path:
    """Make a wheel by hand: one module, no dependencies."""
    path = directory / "tiny_thing-1.0-py3-none-any.whl"
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_thing.py", "answer = 42\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/RECORD",
            f"tiny_thing.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )
    return path


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_env_makes_the_environment_once_and_launch_finds_it(project: Project) -> None:
    made_from = project.root / "requirements.txt"
    made_from.write_text(f"tiny-thing @ {wheel(project.root).as_uri()}\n")
    arguments = ("deploy", "--env", "--requirements", str(made_from))
    first = project.run(*arguments)
    assert first.returncode == 0, first.stderr
    assert "environment" in first.stdout
    assert "Successfully installed tiny-thing-1.0" in first.stderr
    environment = project.document(*arguments)["places"][0]["environment"]
    assert environment["built"] is False
    code = "import tiny_thing; print(tiny_thing.answer)"
    done = subprocess.run([environment["python"], "-c", code], capture_output=True, check=True)
    assert done.stdout == b"42\n"
    refused = project.run("launch", "--tag", "x")
    assert refused.returncode == 3
    assert f"{environment['python']} lacks torch" in refused.stderr
    # A kill in the middle leaves a directory without its mark: it is made anew.
    Path(project.workspace, "envs", environment["key"], "READY.json").unlink()
    assert project.document(*arguments)["places"][0]["environment"]["built"] is True


def test_env_that_cannot_be_made_fails_with_pips_words(project: Project) -> None:
    made_from = project.root / "requirements.txt"
    made_from.write_text("tiny-thing @ file:///nowhere/tiny_thing-1.0-py3-none-any.whl\n")
    failed = project.run("deploy", "--requirements", str(made_from))
    assert failed.returncode == 1
    assert "error[environment]" in failed.stderr
    assert "nowhere" in failed.stderr
    assert "pip_args" in failed.stderr


def test_push_sends_what_differs_and_keeps_directory_names(project: Project) -> None:
    source = project.root / "set"
    (source / "deep").mkdir(parents=True)
    (source / "a.jsonl").write_text("1\n")
    (source / "deep" / "b.bin").write_bytes(bytes(range(256)) * 3000)
    (source / "tool").write_text("#!/bin/sh\n")
    (source / "tool").chmod(0o755)
    remote = f"{project.workspace}/in"
    first = project.document("push", "set", "train.yaml", remote)
    assert sorted(first["sent"]) == ["set/a.jsonl", "set/deep/b.bin", "set/tool", "train.yaml"]
    assert Path(remote, "set/deep/b.bin").read_bytes() == (source / "deep/b.bin").read_bytes()
    assert Path(remote, "set/tool").stat().st_mode & 0o777 == 0o755
    (source / "a.jsonl").write_text("2\n")
    second = project.document("push", "set", "train.yaml", remote)
    assert (second["sent"], second["num_unchanged"]) == (["set/a.jsonl"], 3)
    third = project.document("push", "set", "train.yaml", remote)
    assert (third["sent"], third["round_trips"]) == ([], 1)


def test_push_refuses_what_it_cannot_mean(project: Project) -> None:
    for arguments, words in (
        (("push", "nowhere", "/x"), "nowhere: no such file"),
        (("push", "train.yaml", "relative"), "not an absolute path"),
        (("push", "train.yaml"), "one or more local paths"),
        (("push", "train.yaml", "./train.yaml", "/x"), "two sources give the name train.yaml"),
    ):
        refused = project.run(*arguments)
        assert refused.returncode == 2
        assert words in refused.stderr


def test_push_to_a_full_or_closed_directory_says_where(project: Project) -> None:
    Path(project.workspace, "file").write_text("")
    failed = project.run("push", "train.yaml", f"{project.workspace}/file")
    assert failed.returncode == 1
    assert "here/self" in failed.stderr
    assert sys.executable not in failed.stderr, "no program text in the message"
