"""`runs gc` on workspaces made by hand, and on a real run: what is needed stays, whatever happens.

F28: a run, and its resume, find the release that it was started with.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflashctl import remote
from tests.dflashctl.act.conftest import Project, names, wait_until, write_stand_in
from trainer.contract.completion import COMPLETE, describe, step_directory

DAY_S = 86400.0
OLD, USED, OWN, NEWEST = "aa01", "bb02", "cc03", "dd04"


class Handmade:
    """A workspace made by hand, and the remote program as a process on it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, data: bytes = b"x", age_s: float = 2 * DAY_S) -> Path:
        """Write a file; it and the directories above it were last written ``age_s`` ago."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        when = time.time() - age_s
        for one in (path, *path.parents):
            if one == self.root:
                break
            os.utime(one, (when, when))
        return path

    def release(self, digest: str, age_s: float = 2 * DAY_S) -> None:
        self.write(f"releases/{digest}/trainer/__main__.py", b"code" * 10, age_s)

    def run(self, tag: str, release: str, *steps: int) -> Path:
        """Make a run that ended, with complete checkpoints of 4 bytes and COMPLETE.json each."""
        run = self.write(f"runs/{tag}/manifest.json", json.dumps({"release": release}).encode())
        self.write(f"runs/{tag}/run.lock", b"")
        self.write(f"runs/{tag}/exit.json", b"{}")
        for step in steps:
            directory = f"runs/{tag}/checkpoints/{step_directory(step)}"
            path = self.write(f"{directory}/state.json", b"%4d" % step)
            self.write(f"{directory}/{COMPLETE}", describe(path.parent, ["state.json"]).encode())
        return run.parent

    def arguments(self, action: str, keep: int | None) -> list[str]:
        asked = {"action": action, "workspace": str(self.root), "release": OWN, "keep": keep}
        program = remote.program("gc")
        return [sys.executable, "-I", "-S", "-c", program, json.dumps(asked)]

    def ask(self, action: str, keep: int | None, stdin: str = "") -> dict[str, Any]:
        argv = self.arguments(action, keep)
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.stderr == ""
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def plan(self, keep: int | None = None) -> dict[str, dict[str, Any]]:
        items = self.ask("plan", keep)["items"]
        return {item["path"]: item for item in items}

    def remove(self, planned: dict[str, dict[str, Any]], keep: int | None = None) -> dict[str, Any]:
        return self.ask("remove", keep, json.dumps(list(planned.values())))

    def files(self) -> list[str]:
        found = (path for path in self.root.rglob("*") if not path.is_dir())
        return sorted(path.relative_to(self.root).as_posix() for path in found)


@pytest.fixture
def site(tmp_path: Path) -> Handmade:
    """Four releases: one that nobody needs, a run's, this laptop's, the newest."""
    site = Handmade(tmp_path / "workspace")
    for days, digest in ((9, OLD), (8, USED), (7, OWN), (1, NEWEST)):
        site.release(digest, days * DAY_S)
    site.run("x", USED, 10, 20, 30)
    return site


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock as a living run does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def paths_left(answer: dict[str, Any]) -> dict[str, str]:
    return {one["path"]: one["why"] for one in answer["left"]}


def test_a_plan_tells_bytes_and_reason_of_each_path_and_changes_nothing(site: Handmade) -> None:
    site.write("check/k1/manifest.json", b'{"release": "aa01"}')
    site.write("releases/.partial-999999999-5/half", b"12345")
    site.write("runs/.starting-y/manifest.json", b'{"release": "bb02"}')
    site.write("runs/x/checkpoints/step_00000040.partial/state.json", b"123")
    site.write("runs/x/.export.partial/model.safetensors", b"1234567")
    site.write("data/.chats.jsonl.partial-999999999", b"12")
    before = site.files()
    planned = site.plan()
    assert {path: (item["kind"], item["num_bytes"]) for path, item in planned.items()} == {
        f"releases/{OLD}": ("release", 40),
        "check/k1": ("scratch", 19),
        "releases/.partial-999999999-5": ("staging", 5),
        "runs/.starting-y": ("staging", 19),
        "runs/x/checkpoints/step_00000040.partial": ("staging", 3),
        "runs/x/.export.partial": ("staging", 7),
        "data/.chats.jsonl.partial-999999999": ("staging", 2),
    }
    assert all(item["why"] for item in planned.values())
    assert site.files() == before
    answer = site.remove(planned)
    assert sorted(one["path"] for one in answer["removed"]) == sorted(planned)
    assert (answer["left"], answer["failed"]) == ([], [])
    assert names(site.root / "releases") == [USED, OWN, NEWEST]
    assert (site.plan(), names(site.root / "data"), names(site.root / "check")) == ({}, [], [])


def test_a_workspace_without_anything_has_nothing_to_remove(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        assert Handmade(root).plan() == {}
    assert list(tmp_path.iterdir()) == []


def test_what_is_younger_than_a_day_or_has_a_living_writer_stays(site: Handmade) -> None:
    site.write("data/.a.partial-999999999", age_s=3600.0)
    site.write(f"data/.b.partial-{os.getpid()}")
    site.write("data/.c.partial")  # another program's
    site.write("runs/.starting-y/manifest.json", b'{"release": "bb02"}', age_s=60.0)
    site.write("runs/x/.export.old/model.safetensors")  # the only export: a kill left it so
    assert list(site.plan()) == [f"releases/{OLD}"]
    site.write("runs/x/export/config.json")
    assert list(site.plan()) == ["runs/x/.export.old", f"releases/{OLD}"]


def test_a_living_run_keeps_its_release_and_everything_else(site: Handmade) -> None:  # F28
    site.write("runs/x/checkpoints/step_00000040.partial/state.json")
    with locked(site.root / "runs/x/run.lock"):
        assert list(site.plan(keep=1)) == [f"releases/{OLD}"]
        assert site.ask("plan", 1)["kept"] == [
            {"path": f"releases/{USED}", "why": "runs/x uses it"},
            {"path": f"releases/{OWN}", "why": "this laptop deploys it"},
            {"path": f"releases/{NEWEST}", "why": "the newest release"},
            {"path": "runs/x", "why": "the run lives"},
        ]
    assert len(site.plan(keep=1)) == 4


def test_a_run_that_was_resumed_since_the_plan_keeps_everything(site: Handmade) -> None:
    planned = site.plan(keep=1)
    with locked(site.root / "runs/x/run.lock"):
        answer = site.remove(planned, keep=1)
    steps = [f"runs/x/checkpoints/{step_directory(step)}" for step in (20, 10)]
    assert paths_left(answer) == dict.fromkeys(steps, "the run lives")
    assert [one["path"] for one in answer["removed"]] == [f"releases/{OLD}"]
    assert len(names(site.root / "runs/x/checkpoints")) == 3


def test_a_release_that_a_launch_named_since_the_plan_stays(site: Handmade) -> None:
    planned = site.plan()
    site.run("y", OLD)
    assert paths_left(site.remove(planned)) == {f"releases/{OLD}": "runs/y uses it"}
    assert OLD in names(site.root / "releases")


def test_a_path_that_changed_since_the_plan_is_left_and_told(site: Handmade) -> None:
    site.release("ee05")
    site.release("ff06")
    planned = site.plan()
    (site.root / f"releases/{OLD}/trainer/more.py").write_text("new")
    site.write("releases/ee05/trainer/__main__.py", b"edoc" * 10, age_s=0.0)
    (site.root / "releases/ff06").rename(site.root / "elsewhere")
    site.release(NEWEST, age_s=-60.0)  # ee05 is not the newest now
    assert paths_left(site.remove(planned)) == {
        f"releases/{OLD}": "it changed since the plan",
        "releases/ee05": "it changed since the plan",
        "releases/ff06": "it is gone",
    }
    assert (site.root / f"releases/{OLD}/trainer/more.py").read_text() == "new"


def test_a_process_that_runs_a_release_keeps_it(site: Handmade) -> None:
    environment = os.environ | {"PYTHONPATH": str(site.root / "releases" / OLD)}
    argv = [sys.executable, "-c", "print('up', flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert site.plan() == {}
        kept = {one["path"]: one["why"] for one in site.ask("plan", None)["kept"]}
        assert kept[f"releases/{OLD}"] == f"process {process.pid} uses it"
        process.communicate("\n")
    assert list(site.plan()) == [f"releases/{OLD}"]


def test_scratch_that_is_in_use_or_new_stays_with_its_release(site: Handmade) -> None:
    manifest = b'{"release": "aa01"}'
    site.write("warmup/k1/manifest.json", manifest)
    with locked(site.root / "cache/k1/warmup.lock"):
        assert site.plan() == {}
    assert list(site.plan()) == ["warmup/k1", f"releases/{OLD}"]
    site.write("check/k1/manifest.json", manifest, age_s=1.0)  # a launch has just checked
    assert list(site.plan()) == ["warmup/k1"]


def test_a_manifest_that_cannot_be_read_keeps_every_release(site: Handmade) -> None:
    site.write("runs/broken/manifest.json", b"{")
    assert site.plan() == {}


def test_complete_checkpoints_of_ended_runs_go_beyond_the_number_asked_for(site: Handmade) -> None:
    assert list(site.plan(keep=3)) == [f"releases/{OLD}"]
    planned = site.plan(keep=2)
    assert list(planned) == ["runs/x/checkpoints/step_00000010", f"releases/{OLD}"]
    site.remove(planned, keep=2)
    assert names(site.root / "runs/x/checkpoints") == ["step_00000020", "step_00000030"]


@pytest.mark.parametrize("damage", ["no COMPLETE.json", "too short", "another byte"])
def test_the_only_complete_checkpoint_stays(site: Handmade, damage: str) -> None:
    for step in (20, 30):
        state = site.root / "runs/x/checkpoints" / step_directory(step) / "state.json"
        if damage == "no COMPLETE.json":
            state.with_name(COMPLETE).unlink()
        else:
            state.write_bytes(b"1" if damage == "too short" else b"wxyz")
    planned = site.plan(keep=1)
    assert list(planned) == [f"releases/{OLD}"]
    site.remove(planned, keep=1)
    assert len(names(site.root / "runs/x/checkpoints")) == 3  # damaged ones are left to be seen


def test_no_checkpoint_goes_when_one_that_was_to_stay_has_gone(site: Handmade) -> None:
    (site.root / "runs/x/checkpoints/step_00000030/state.json").write_bytes(b"wxyz")
    planned = site.plan(keep=1)
    of_ten = "runs/x/checkpoints/step_00000010"
    assert list(planned) == [of_ten, f"releases/{OLD}"]
    (site.root / "runs/x/checkpoints/step_00000020").rename(site.root / "elsewhere")
    assert paths_left(site.remove(planned, keep=1)) == {of_ten: "it changed since the plan"}
    assert names(site.root / "runs/x/checkpoints") == ["step_00000010", "step_00000030"]


def test_the_best_checkpoint_stays(site: Handmade) -> None:
    site.write("runs/x/evaluations.json", b'{"v": 1, "best": {"step": 10}, "evaluations": []}')
    assert list(site.plan(keep=1)) == ["runs/x/checkpoints/step_00000020", f"releases/{OLD}"]
    site.write("runs/x/evaluations.json", b"{")  # nobody can say which is the best
    assert list(site.plan(keep=1)) == [f"releases/{OLD}"]


def test_nothing_is_removed_behind_a_symbolic_link(site: Handmade, tmp_path: Path) -> None:
    other = Handmade(tmp_path / "other")
    other.run("z", USED, 1, 2, 3)
    other.release("0123")
    other.write("data/.chats.partial-999999999")
    before = other.files()
    (site.root / "runs/z").symlink_to(other.root / "runs/z")
    run = site.run("w", USED)
    (run / "checkpoints").symlink_to(other.root / "runs/z/checkpoints")
    (site.root / "releases/0123").symlink_to(other.root / "releases/0123")
    (site.root / "data").symlink_to(other.root / "data")
    (site.root / "check").symlink_to(other.root / "runs")
    (site.root / f"releases/{OLD}/inside").symlink_to(other.root)
    site.write(f"releases/{OLD}/trainer/__main__.py", b"code" * 10, 9 * DAY_S)
    planned = site.plan(keep=1)
    of_x = [f"runs/x/checkpoints/{step_directory(step)}" for step in (20, 10)]
    assert list(planned) == [*of_x, f"releases/{OLD}"]
    forged = {"path": "releases/0123", "kind": "release", "state": "", "lock": None, "num_bytes": 0}
    site.remove(planned | {"releases/0123": forged}, keep=1)
    assert not (site.root / f"releases/{OLD}").exists()
    assert other.files() == before


def test_runs_that_lie_behind_a_link_keep_their_releases(site: Handmade, tmp_path: Path) -> None:
    (site.root / "runs").rename(tmp_path / "large-disk")
    (site.root / "runs").symlink_to(tmp_path / "large-disk")
    planned = site.plan(keep=1)
    assert list(planned) == [f"releases/{OLD}"]
    assert len(site.remove(planned, keep=1)["removed"]) == 1
    assert len(names(tmp_path / "large-disk/x/checkpoints")) == 3


def test_a_second_gc_is_refused_while_one_is_at_work(site: Handmade) -> None:
    planned = site.plan()
    handle = os.open(site.root, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    answer = site.remove(planned)
    os.close(handle)
    assert answer["error"]["code"] == "locked"
    assert OLD in names(site.root / "releases")


def test_kill_9_leaves_no_half_release_and_a_rerun_completes(site: Handmade) -> None:
    for number in range(2000):
        (site.root / f"releases/{OLD}/trainer/m{number}.py").write_text("x")
    site.release("ee05")
    planned = site.plan(keep=1)
    whole = site.files()
    argv = site.arguments("remove", 1)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(list(planned.values())).encode())
        process.stdin.close()
        while not list(site.root.glob("releases/.trash-*")) and process.poll() is None:
            pass
        process.kill()
    left = site.files()
    for path in planned:
        of_it = [name for name in left if name.startswith(f"{path}/")]
        assert of_it in ([], [name for name in whole if name.startswith(f"{path}/")])
    (site.root / "releases/.trash-1-ee05").mkdir()  # as a kill between rename and deletion leaves
    again = site.plan(keep=1)
    assert again["releases/.trash-1-ee05"]["kind"] == "trash"
    assert site.remove(again, keep=1)["left"] == []
    assert names(site.root / "releases") == [USED, OWN, NEWEST]
    assert names(site.root / "runs/x/checkpoints") == ["step_00000030"]
    assert site.plan(keep=1) == {}


def test_nothing_is_removed_without_a_yes_and_hosts_that_fail_are_told(project: Project) -> None:
    hosts = project.root / "hosts.yaml"
    hosts.write_text(
        f"{hosts.read_text()}  away:\n    address: root@127.0.0.1\n    port: 1\n"
        "    containers:\n      700:\n        workspace: /w\n        python: /usr/bin/python3\n"
        "        gpus: {target: [0], drafter: [1]}\n"
    )
    site = Handmade(Path(project.workspace))
    site.release(OLD)
    site.release(NEWEST, DAY_S)
    done = project.run("-l", "here", "runs", "gc")
    assert done.returncode == 3
    assert "error[not-confirmed]" in done.stderr
    assert f"here/self  40 B  release  releases/{OLD}  no run, check" in done.stdout
    document = project.document("runs", "gc", "--dry-run")
    assert (document["rc"], document["ok"], document["dry_run"]) == (6, False, True)
    assert [failure["place"] for failure in document["failures"]] == ["away/700"]
    assert names(site.root / "releases") == [OLD, NEWEST]
    document = project.document("runs", "gc", "--yes")
    assert document["rc"] == 6
    assert document["places"][0]["removed"] == [{"path": f"releases/{OLD}", "num_bytes": 40}]
    assert names(site.root / "releases") == [NEWEST]


def test_a_run_goes_on_and_resumes_after_a_newer_deploy_and_a_gc(
    project: Project, tmp_path: Path
) -> None:  # F28
    assert project.run("deploy").returncode == 0
    launched = project.run("launch", "--tag", "x")
    assert launched.returncode == 0, launched.stderr
    newer = tmp_path / "newer"
    newer.mkdir()
    with (write_stand_in(newer) / "trainer" / "errors.py").open("a") as code:
        code.write("# newer\n")
    project.code = newer
    assert project.run("deploy").returncode == 0
    site = Handmade(Path(project.workspace))
    releases = names(site.root / "releases")
    site.release(OLD, 9 * DAY_S)
    checkpoints = project.run_dir("x") / "checkpoints"
    wait_until(lambda: checkpoints.is_dir() and len(names(checkpoints)) > 3)
    while_it_runs = project.run("runs", "gc", "--keep", "1", "--yes")
    assert while_it_runs.returncode == 0, while_it_runs.stderr
    assert names(site.root / "releases") == releases
    assert len(names(checkpoints)) > 3
    assert project.run("stop", "x").returncode == 0
    newest = names(checkpoints)[-1]

    def collected() -> bool:  # not while the run's tmux is still on its way out
        assert project.run("runs", "gc", "--keep", "1", "--yes").returncode == 0
        return names(checkpoints) == [newest]

    wait_until(collected)
    assert project.run("launch", "--resume", "x").returncode == 0
    assert f"training from step {int(newest[5:])}" in project.run("logs", "x").stdout
    assert project.run("stop", "x").returncode == 0


def test_a_compile_cache_goes_with_its_release_and_not_before(site: Handmade) -> None:
    gone, going, used = "e" * 12, "f" * 12 + "0" * 52, "9" * 12 + "1" * 52
    site.release(going, 6 * DAY_S)
    site.release(used, 6 * DAY_S)
    site.run("y", used)
    for digest in (gone, going, used, "7" * 12):
        site.write(f"cache/{digest[:12]}-torch2.11.0-cpu/inductor/kernel.so", b"12345")
    site.write("cache/of-another-kind/kernel.so")
    busy = site.root / f"cache/{'7' * 12}-torch2.11.0-cpu/check.lock"
    with locked(busy):
        os.utime(busy, (1.0, 1.0))
        os.utime(busy.parent, (1.0, 1.0))
        planned = site.plan()
        assert {path for path, item in planned.items() if item["kind"] == "cache"} == {
            f"cache/{gone}-torch2.11.0-cpu",
            f"cache/{'f' * 12}-torch2.11.0-cpu",
        }
        kept = {one["path"]: one["why"] for one in site.ask("plan", None)["kept"]}
    assert kept[f"cache/{'9' * 12}-torch2.11.0-cpu"] == f"release {'9' * 12} stays"
    assert "at work" in kept[f"cache/{'7' * 12}-torch2.11.0-cpu"]
    site.run("late", going)  # launched since the plan: neither its release nor its cache goes
    answer = site.remove(planned)
    assert paths_left(answer)[f"cache/{'f' * 12}-torch2.11.0-cpu"] == f"release {'f' * 12} stays"
    left = names(site.root / "cache")
    assert left == [f"{d * 12}-torch2.11.0-cpu" for d in "79f"] + ["of-another-kind"]
