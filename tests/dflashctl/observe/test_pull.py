"""Pulling files of a run: digests checked, names checked, nothing half done."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import DflashctlError, MismatchError, RefusedError, UsageError
from dflashctl.inventory import Place
from dflashctl.operations.pull import PullRequest, PullResult, pull
from dflashctl.received import MANIFEST, Fact, Received, problems, unpack
from dflashctl.transport import connect

DEFAULT = ("logs", "metrics", "export")


@pytest.fixture
def full_run(run: Any) -> Any:
    """A finished run with everything a run can have, and secrets that must stay."""
    run.log.write_bytes(b"log line\n" * 1000)
    run.event("step", step=1)
    run.start()
    run.end(0)
    (run.root / "environment.json").write_text('{"HF_TOKEN": "secret"}')
    (run.root / "exit_1.json").write_text("{}")
    (run.root / "runner_stderr.log").write_text("a warning\n")
    for name, files in {
        "export": ("config.json", "model.safetensors"),
        "checkpoints/step_00000100": ("COMPLETE.json", "state.bin"),
        "checkpoints/step_00000200.partial": ("COMPLETE.json",),
        "checkpoints/step_00000300": ("state.bin",),
    }.items():
        (run.root / name).mkdir(parents=True)
        for file in files:
            (run.root / name / file).write_bytes(f"{name}/{file}".encode() * 5000)
    return run


def bring(place: Place, directory: Path, *what: str, **limits: Any) -> PullResult:
    return pull(PullRequest(place, "fresh7", what or DEFAULT, directory, **limits), connect)


def names_below(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def test_logs_metrics_export_and_records_come_byte_for_byte_and_secrets_stay(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    target = tmp_path / "fresh7"
    result = bring(here, target)
    assert names_below(target) == [
        "exit.json",
        "exit_1.json",
        "export/config.json",
        "export/model.safetensors",
        "manifest.json",
        "metrics.jsonl",
        "process.json",
        "runner_stderr.log",
        "train_stdout_fresh7.log",
    ]
    assert list(result.received) == names_below(target)
    for name in names_below(target):
        assert (target / name).read_bytes() == (full_run.root / name).read_bytes()
    assert "environment.json" not in names_below(target)


def test_only_complete_checkpoints_come(full_run: Any, here: Place, tmp_path: Path) -> None:
    assert full_run.root.is_dir()
    target = tmp_path / "fresh7"
    bring(here, target, "checkpoints")
    checkpoints = [n for n in names_below(target) if n.startswith("checkpoints/")]
    assert checkpoints == [
        "checkpoints/step_00000100/COMPLETE.json",
        "checkpoints/step_00000100/state.bin",
    ]


def test_a_second_pull_brings_only_what_changed(full_run: Any, here: Place, tmp_path: Path) -> None:
    target = tmp_path / "fresh7"
    first = bring(here, target)
    assert bring(here, target).received == ()
    with full_run.log.open("ab") as stream:
        stream.write(b"one more\n")
    third = bring(here, target)
    assert third.received == ("train_stdout_fresh7.log",)
    assert len(third.unchanged) == len(first.received) - 1
    assert (target / full_run.log.name).read_bytes() == full_run.log.read_bytes()


def test_a_damaged_local_file_is_brought_again(full_run: Any, here: Place, tmp_path: Path) -> None:
    target = tmp_path / "fresh7"
    bring(here, target)
    (target / "export" / "config.json").write_bytes(b"rotten")
    assert bring(here, target).received == ("export/config.json",)
    expected = (full_run.root / "export" / "config.json").read_bytes()
    assert (target / "export" / "config.json").read_bytes() == expected


def test_files_that_an_interrupted_pull_had_received_are_not_sent_again(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    target = tmp_path / "fresh7"
    staged = target / ".pull" / "export" / "config.json"
    staged.parent.mkdir(parents=True)
    staged.write_bytes((full_run.root / "export" / "config.json").read_bytes())
    (target / ".pull" / full_run.log.name).write_bytes(b"half of")
    result = bring(here, target)
    assert "export/config.json" in result.unchanged
    assert full_run.log.name in result.received
    assert names_below(target / "export") == ["config.json", "model.safetensors"]
    assert not (target / ".pull").exists()


def test_a_second_pull_of_a_run_is_refused_while_one_is_at_work_here(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    told: list[str] = []

    def second(_num_bytes: int) -> None:
        with pytest.raises(RefusedError) as caught:
            bring(here, tmp_path / "fresh7")
        told.append(caught.value.code)

    pull(PullRequest(here, "fresh7", DEFAULT, tmp_path / "fresh7"), connect, second)
    assert set(told) == {"locked"}
    log = tmp_path / "fresh7" / full_run.log.name
    assert log.read_bytes() == full_run.log.read_bytes()
    assert not (tmp_path / "fresh7/.pull").exists()


def test_another_run_of_the_same_tag_is_not_mixed_in(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    target = tmp_path / "fresh7"
    target.mkdir()
    record = json.dumps(full_run.manifest | {"run_id": "the one before"})
    (target / "manifest.json").write_text(record)
    with pytest.raises(RefusedError, match="another run of this tag"):
        bring(here, target)
    assert names_below(target)[-1] == "manifest.json"
    assert (target / "manifest.json").read_text() == record


def test_more_than_the_limit_is_refused(full_run: Any, here: Place, tmp_path: Path) -> None:
    assert full_run.root.is_dir()
    with pytest.raises(RefusedError, match="the limit is 20000"):
        bring(here, tmp_path / "fresh7", max_bytes=20_000)


def test_a_run_that_is_not_there_leaves_no_directory(here: Place, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run fresh7"):
        bring(here, tmp_path / "fresh7")
    assert not (tmp_path / "fresh7").exists()


def test_an_unknown_kind_is_refused_before_anything_is_asked(here: Place, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose some of logs, metrics, export, checkpoints"):
        bring(here, tmp_path / "fresh7", "everything")


def test_a_log_that_grows_while_it_is_pulled_gives_a_prefix_with_its_own_digest(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    code = (
        "import sys\nlog = open(sys.argv[1], 'ab', buffering=0)\nwhile True: log.write(b'more\\n')"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(full_run.log)])
    try:
        while full_run.log.stat().st_size == 9000:
            time.sleep(0.005)  # it is being written
        bring(here, tmp_path / "fresh7")
    finally:
        writer.kill()
        writer.wait()
    pulled = (tmp_path / "fresh7" / full_run.log.name).read_bytes()
    assert len(pulled) > 9000
    assert full_run.log.read_bytes().startswith(pulled)


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> io.BytesIO:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    raw.seek(0)
    return raw


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "name",
    [
        "/etc/cron.d/x",
        "../../.ssh/authorized_keys",
        "export/../../../x",
        "export//x",
        "export/./x",
        "export/a\\b",
        "export/\x1b[2J",
        "export",
        "environment.json",
        ".bashrc",
        "checkpoints/latest/x",
        "manifest.json\n",
        "export/" + "x" * 300,
    ],
)
def test_a_member_with_a_name_that_no_run_has_is_refused(name: str, tmp_path: Path) -> None:
    staging = tmp_path / "a" / "b" / "staging"
    staging.mkdir(parents=True)
    with pytest.raises(MismatchError):
        unpack(tar_of([(tarfile.TarInfo(name), b"x")]), staging, 1 << 20, lambda _: None)
    assert names_below(tmp_path) == []


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="not a regular file"):
        unpack(tar_of([(link("export/x", kind, "/etc"), b"")]), tmp_path, 1 << 20, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_staged_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim, staging = tmp_path / "victim", tmp_path / "staging"
    victim.write_text("precious")
    staging.mkdir()
    (staging / "metrics.jsonl").symlink_to(victim)
    unpack(tar_of([(tarfile.TarInfo("metrics.jsonl"), b"x")]), staging, 99, lambda _: None)
    assert victim.read_text() == "precious"
    assert not (staging / "metrics.jsonl").is_symlink()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("a file where a directory is needed")
    with pytest.raises(DflashctlError, match=r"cannot write .*/export/x: "):
        unpack(tar_of([(tarfile.TarInfo("export/x"), b"x")]), tmp_path, 99, lambda _: None)


def test_blocks_are_counted_as_they_come(tmp_path: Path) -> None:
    sizes: list[int] = []
    content = b"x" * ((1 << 20) + 5)
    unpack(tar_of([(tarfile.TarInfo("export/x"), content)]), tmp_path, 1 << 30, sizes.append)
    assert sizes == [1 << 20, 5]


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    twice = [(tarfile.TarInfo("metrics.jsonl"), b"a"), (tarfile.TarInfo("metrics.jsonl"), b"b")]
    with pytest.raises(MismatchError, match="came twice"):
        unpack(tar_of(twice), tmp_path, 1 << 20, lambda _: None)


@pytest.mark.parametrize(
    "manifest",
    [
        b"no json",
        b"[]",
        b'{"v": 1}',
        b'{"v": 1, "files": {"metrics.jsonl": {"size_bytes": 1}}}',
        b'{"v": 1, "files": {"../x": {"size_bytes": 1, "sha256": "a", "sent": true}}}',
        b'{"v": 2, "files": {}}',
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(manifest: bytes, tmp_path: Path) -> None:
    with pytest.raises(MismatchError):
        unpack(tar_of([(tarfile.TarInfo(MANIFEST), manifest)]), tmp_path, 99, lambda _: None)


@pytest.mark.parametrize("length", [0, 300, 512, 700, 2000])
def test_an_archive_that_ends_early_is_never_taken_for_whole(length: int, tmp_path: Path) -> None:
    whole = tar_of([(tarfile.TarInfo("metrics.jsonl"), b"x" * 1500)]).getvalue()
    with pytest.raises(MismatchError):
        problems(unpack(io.BytesIO(whole[:length]), tmp_path, 9999, lambda _: None), {})


def told(content: bytes, **more: Any) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"size_bytes": len(content), "sha256": digest, "sent": True, "problem": ""} | more


def fact(content: bytes) -> Fact:
    return Fact(len(content), hashlib.sha256(content).hexdigest())


def test_every_way_to_differ_from_the_manifest_is_found() -> None:
    received = Received(
        files={"metrics.jsonl": fact(b"a"), "exit.json": fact(b"b"), "export/more": fact(b"c")},
        manifest={
            "metrics.jsonl": told(b"a"),
            "exit.json": told(b"other"),
            "manifest.json": told(b"d"),
            "export/had": told(b"e", sent=False),
            "export/short": told(b"f", sent=False, problem="it vanished while it was read"),
        },
    )
    found = problems(received, {"export/had": fact(b"e")})
    assert sorted(found) == ["exit.json", "export/more", "export/short", "manifest.json"]
    assert "did not come" in found["manifest.json"]
    assert "not in the manifest" in found["export/more"]
    assert problems(received, {})["export/had"]


def test_a_wrong_digest_is_exit_7_and_the_good_files_are_kept(
    full_run: Any, here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real container whose python sends one wrong byte: an interpreter that edits the stream.
    fake = tmp_path / "python3"
    fake.write_text(f"#!/bin/sh\n{sys.executable} \"$@\" | sed 's/log line/lag line/'\n")
    fake.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(MismatchError, match=r"train_stdout_fresh7\.log: sha256") as caught:
            bring(here, tmp_path / "fresh7")
    assert caught.value.exit_code == 7
    kept = names_below(tmp_path / "fresh7")
    assert full_run.log.name not in kept
    assert "export/model.safetensors" in kept
    assert bring(here, tmp_path / "fresh7").received == (full_run.log.name,)


def test_a_pull_killed_in_the_middle_leaves_no_half_file_in_place_and_the_next_completes(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    weights = full_run.root / "export" / "model.safetensors"
    weights.write_bytes(os.urandom(1 << 20) * 20)
    target = tmp_path / "fresh7"
    code = f"""
import os, signal
from pathlib import Path
from dflashctl.inventory import Container, Host, Place
from dflashctl.operations.pull import PullRequest, pull
from dflashctl.transport import connect
container = Container("here", None, workspace={here.container.workspace!r})
place = Place(Host("here", "", backend="local", containers=(container,)), container)
request = PullRequest(place, "fresh7", ("logs", "metrics", "export"), Path({str(target)!r}))
came = 0
def die_in_the_middle(size):
    global came
    came += size
    if came > 5 << 20:
        os.kill(os.getpid(), signal.SIGKILL)
pull(request, connect, die_in_the_middle)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (target / ".pull" / "export" / "model.safetensors").exists()
    assert not (target / "export" / "model.safetensors").exists()
    bring(here, target)
    assert (target / "export" / "model.safetensors").read_bytes() == weights.read_bytes()


def test_a_collect_program_that_breaks_is_an_error_with_its_words(
    full_run: Any, here: Place, tmp_path: Path
) -> None:
    (full_run.root / "manifest.json").write_text('{"log_path": 5}')
    with pytest.raises(DflashctlError, match="collecting the files failed") as caught:
        bring(here, tmp_path / "fresh7")
    assert "TypeError" in caught.value.hint
