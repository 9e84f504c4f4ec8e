"""Locks, waits and the truth about GPUs through real ssh, pct and containers of the lab."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import Project, held_gpu, write_model, write_project
from tests.dflashctl.act.test_lab import END_RUNS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]

WORKSPACE = "/workspace/gpu-lab"
ON = ("-l", "kpro7/200")


@pytest.fixture(scope="module")
def laptop(
    tmp_path_factory: pytest.TempPathFactory, stand_in: Path, lab_site: Lab
) -> Iterator[Project]:
    """A project for kpro7 (two GPUs), deployed once for all tests here; each uses its own tag."""
    root = tmp_path_factory.mktemp("laptop")
    hosts = lab_site.hosts_yaml(python=sys.executable, env={"PVE_LAB_GPU_MIB": "9000"})
    hosts = hosts.replace("workspace: /workspace\n", f"workspace: {WORKSPACE}\n")
    write_project(root, WORKSPACE, hosts)
    write_model(root / "target")
    (root / "chats.jsonl").write_text("{}\n")
    project = Project(root, WORKSPACE, stand_in, place="kpro7/200")
    assert project.run(*ON, "deploy").returncode == 0
    assert project.run(*ON, "push", "target", "chats.jsonl", WORKSPACE).returncode == 0
    yield project
    lab_site.in_container("kpro7", 200, END_RUNS % (WORKSPACE, WORKSPACE))


def another(laptop: Project, root: Path) -> Project:
    """Another laptop with the same hosts.yaml, and no records."""
    for name in ("hosts.yaml", "train.yaml"):
        shutil.copy(laptop.root / name, root)
    return Project(root, laptop.workspace, laptop.code, laptop.place)


def foreign(lab: Lab, gpu: int) -> None:
    """Put a process that is no run on a GPU."""
    lab.in_container("kpro7", 200, held_gpu(gpu))


def set_gpus(lab: Lab, *gpus: dict[str, object]) -> None:
    """Replace what nvidia-smi of kpro7 says; the lab restores it after the test."""
    path = lab.state / "kpro7/shared/gpu.json"
    temporary = path.with_name("gpu.json.new")
    temporary.write_text(json.dumps({"state": "ok", "gpus": gpus}))
    temporary.rename(path)


def test_two_laptops_that_launch_at_once_have_one_winner_and_the_loser_names_it(  # F41
    laptop: Project, tmp_path: Path
) -> None:
    laptops = {"one": laptop, "two": another(laptop, tmp_path)}
    both = {tag: one.popen(*ON, "launch", "--tag", tag) for tag, one in laptops.items()}
    ends = {tag: (process.communicate(timeout=100)[1], process) for tag, process in both.items()}
    codes = {tag: process.returncode for tag, (_, process) in ends.items()}
    assert sorted(codes.values()) == [0, 3], ends
    winner, loser = sorted(codes, key=lambda tag: codes[tag])
    told = ends[loser][0]
    assert "error[gpu-busy]: kpro7/200: GPU 0 (GPU-5eed0000-" in told
    assert re.search(rf"locked by run {winner} of \S+@\S+ \(kpro7/200\), since 20\d\d-", told)
    assert not (laptops[loser].root / "runs" / loser).exists()
    locks = laptop.document("-l", "kpro7", "locks", "list")["locks"]
    assert [(one["tag"], one["vmid"], one["state"]) for one in locks] == [(winner, 200, "live")] * 2
    assert all(one["pid"] for one in locks), "tied to the process that the node sees"
    assert "token" not in locks[0]
    refused = laptop.run("-l", "kpro7", "locks", "clear", winner)
    assert (refused.returncode, "its process" in refused.stderr) == (3, True)
    warmup = laptop.run(*ON, "warmup")
    assert (warmup.returncode, f"locked by run {winner}" in warmup.stderr) == (3, True)
    assert laptops[winner].run("stop", winner).returncode == 0
    assert laptop.run(*ON, "warmup").returncode == 0
    assert laptop.run("-l", "kpro7", "locks", "list").stdout == "no GPU is locked\n"


def test_a_warm_up_for_other_shapes_is_told_and_refused_when_a_fresh_one_is_asked_for(
    laptop: Project,
) -> None:
    assert laptop.run(*ON, "warmup").returncode == 0
    other = ("--set", "data.max_anchors=7")
    refused = laptop.run(*ON, "launch", "--tag", "cold", *other, "--require-warm")
    told = "the warm-up is stale: data.max_anchors 7, the warm-up had 1024"
    assert f"error[not-warm]: kpro7/200: {told}\n" in refused.stderr
    assert (refused.returncode, "dflashctl -l kpro7/200 warmup" in refused.stderr) == (3, True)
    assert laptop.run("-l", "kpro7", "locks", "list").stdout == "no GPU is locked\n"
    done = laptop.run(*ON, "launch", "--tag", "cold", *other, "--set", "optim.max_steps=2")
    assert (done.returncode, f"warning: {told}; the run compiles" in done.stderr) == (0, True)
    manifest = json.loads((laptop.root / "runs/cold/manifest.json").read_text())
    assert manifest["warmup"] == "stale"


def test_caches_are_taken_from_a_host_with_the_same_cards_alone(
    laptop: Project, lab_site: Lab, tmp_path: Path
) -> None:
    file = str(tmp_path / "caches.bin")
    assert laptop.run(*ON, "warmup", "--save-artifacts", file).returncode == 0
    taken = laptop.run(*ON, "warmup", "--load-artifacts", file)
    assert (taken.returncode, "loaded what was compiled" in taken.stderr) == (0, True)
    set_gpus(lab_site, {"name": "NVIDIA H200"}, {"name": "NVIDIA H200"})
    refused = laptop.run(*ON, "warmup", "--load-artifacts", file)
    assert refused.stderr.endswith(
        f"error[artifacts-kind]: kpro7/200: {file} was made for gpus ['NVIDIA GeForce RTX 3090'],"
        " this run has ['NVIDIA H200']; warm up here\n"
        "  hint: the same warmup without --load-artifacts\n"
    )
    assert refused.returncode == 7
    assert laptop.run("-l", "kpro7", "locks", "list").stdout == "no GPU is locked\n"


def test_a_launch_killed_with_its_locks_holds_others_off_and_its_rerun_takes_them_again(
    laptop: Project, tmp_path: Path
) -> None:
    with laptop.popen(*ON, "launch", "--tag", "killed") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("checking that"):
                break
        process.send_signal(signal.SIGKILL)
    other = another(laptop, tmp_path).run(*ON, "launch", "--tag", "other")
    assert other.returncode == 3
    assert "its launch is under way" in other.stderr
    done = laptop.document(*ON, "launch", "--tag", "killed")
    assert done["rc"] == 0, done
    assert done["round_trips"] == 3, "the container, the locks with a look, the binding with one"
    assert laptop.run("stop", "killed").returncode == 0


def test_launch_waits_for_a_gpu_and_says_so_and_gives_up_in_time(
    laptop: Project, lab_site: Lab
) -> None:
    foreign(lab_site, 1)
    late = laptop.run(*ON, "launch", "--tag", "waits", "--wait", "1s")
    assert late.returncode == 3
    assert re.search(r"waiting, \d s more at most: GPU 1 \(GPU-5eed0001-", late.stderr)
    assert "(after waiting 1 s)" in late.stderr
    assert "error[gpu-busy]" in late.stderr
    with laptop.popen(*ON, "launch", "--tag", "waits", "--wait", "2h") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("waiting"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (
        130,
        "interrupted; it was waiting: nothing was started or locked\n",
    )
    assert not (laptop.root / "runs/waits").exists()
    with laptop.popen(*ON, "launch", "--tag", "waits", "--wait", "40s") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("waiting"):
                break
        locks = laptop.run("-l", "kpro7", "locks", "list").stdout
        assert locks == "no GPU is locked\n", "who waits holds nothing"
        lab_site.in_container("kpro7", 200, "pkill -x sleep")
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert laptop.run("stop", "waits").returncode == 0


def test_a_driver_that_tells_one_lost_card_only_is_asked_card_by_card(  # F36
    laptop: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro7", "gpu", "lost:1")
    document = laptop.document("-l", "kpro7", "gpus")
    (host,) = document["hosts"]
    assert document["rc"] == 7
    assert [row["gpu"]["state"] for row in host["rows"]] == ["idle", "failed"]
    assert "GPU is lost" in host["error"]


def test_memory_that_no_process_holds_is_orphaned_and_refuses_the_launch(  # F32
    laptop: Project, lab_site: Lab
) -> None:
    set_gpus(lab_site, {}, {"memory.used": 20000})
    shown = laptop.run("-l", "kpro7", "gpus")
    assert shown.returncode == 0
    assert "ORPHANED" in shown.stdout
    assert "20000 MiB held by no process, even on the node; /dev/nvidia1 is open" in shown.stdout
    refused = laptop.run(*ON, "launch", "--tag", "orphan")
    assert refused.returncode == 3
    assert "error[gpu-orphaned]: kpro7/200: GPU 1 (GPU-5eed0001-" in refused.stderr
    assert laptop.run("-l", "kpro7", "locks", "list").stdout == "no GPU is locked\n"


def test_a_run_that_lands_on_another_card_is_told_by_launch_and_by_watch(  # F40
    laptop: Project, lab_site: Lab
) -> None:
    set_gpus(lab_site, {}, {}, {})  # of three cards two are the container's
    launched = laptop.run(*ON, "launch", "--tag", "astray", "--set", "seed=14")
    process = r"run astray \(CT 200 pid \d+, \d+ inside\)"
    told = rf"astray holds GPU 2 \(GPU-5eed0002-\S+\): {process}, and its own are GPU 0, 1\n"
    assert re.search(rf"error\[gpu-strayed\]: kpro7/200: {told}", launched.stderr), launched.stderr
    assert (launched.returncode, "dflashctl stop astray" in launched.stderr) == (7, True)
    with laptop.popen("--json", "watch", "astray") as watching:
        assert watching.stdout is not None
        lines = map(json.loads, watching.stdout)
        notice = next(line for line in lines if line.get("kind") == "strayed")
        assert "astray holds GPU 2 (" in notice["text"]
        assert laptop.run("stop", "astray").returncode == 0
        assert [line["type"] for line in lines][-1] == "ended"
    well = laptop.document(*ON, "launch", "--tag", "well")
    assert well["landed"] == [gpu["uuid"] for gpu in well["manifest"]["gpus"]]
    assert laptop.run("stop", "well").returncode == 0


def test_other_cards_than_hosts_yaml_says_exit_7(  # F44
    laptop: Project, lab_site: Lab, tmp_path: Path
) -> None:
    other = another(laptop, tmp_path)
    hosts = other.root / "hosts.yaml"
    plain = hosts.read_text()
    hosts.write_text(plain.replace("  kpro7:\n", "  kpro7:\n    expect: {count: 4}\n"))
    expected = other.run("-l", "kpro7", "gpus")
    assert expected.returncode == 7
    assert "hosts.yaml expects 4 GPUs, and 2 are there" in expected.stderr
    hosts.write_text(plain)
    set_gpus(lab_site, {"name": "NVIDIA H200"})
    missing = other.run("-l", "kpro7", "gpus")
    assert missing.returncode == 7
    assert "GPU 1 of hosts.yaml is not there (found: 0)" in missing.stderr
    refused = other.run(*ON, "launch", "--tag", "fewer")
    assert refused.returncode == 7
    assert "error[gpu-missing]" in refused.stderr


@contextmanager
def lost_gpus(lab: Lab, said: str) -> Iterator[None]:
    """Have nvidia-smi in kpro7/200 find no GPU, and say so."""
    smi = "/usr/bin/nvidia-smi"
    lose = f"cp {smi} /root/smi && printf '#!/bin/sh\\necho {said}; exit 255\\n' > {smi}"
    assert lab.in_container("kpro7", 200, lose).returncode == 0
    try:
        yield
    finally:
        lab.in_container("kpro7", 200, f"cat /root/smi > {smi}")


def test_a_container_that_lost_its_gpus_is_told_apart_from_a_broken_node(  # F39
    laptop: Project, lab_site: Lab
) -> None:
    said = "Failed to initialize NVML: Unknown Error"
    with lost_gpus(lab_site, said):
        seen = laptop.run("-l", "kpro7", "gpus")
        refused = laptop.run(*ON, "launch", "--tag", "lost")
    sentence = f"the container lost its GPUs, and the node has them (its nvidia-smi says: {said})"
    for done in (seen, refused):
        assert done.returncode == 7
        assert sentence in done.stderr
        assert "pct reboot 200" in done.stderr
    assert laptop.run(*ON, "launch", "--tag", "watched").returncode == 0
    with lost_gpus(lab_site, said), laptop.popen("watch", "watched") as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if line.startswith("alert: the container lost"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert told.endswith(f"(its nvidia-smi says: {said}); pct reboot 200\n")
    assert laptop.run("stop", "watched").returncode == 0


def test_cards_of_several_containers_are_listed_with_all_of_them(laptop: Project) -> None:  # F31
    (host,) = laptop.document("-l", "kpro6", "gpus")["hosts"]
    assert host["rows"][0]["roles"] == ["200 target", "201 target"]


def test_a_uuid_names_the_card_wherever_the_driver_lists_it(laptop: Project, lab_site: Lab) -> None:
    small, big = "GPU-00000000-1", "GPU-00000000-2"
    set_gpus(lab_site, {"uuid": small, "name": "NVIDIA T4"}, {"uuid": big, "name": "NVIDIA H200"})
    launched = laptop.document(*ON, "launch", "--tag", "uuids")
    assert launched["rc"] == 0, launched
    text = lab_site.in_container(
        "kpro7", 200, f"cat {WORKSPACE}/runs/uuids/environment.json"
    ).stdout
    environment = json.loads(text)  # F40
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{small},{big}"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert laptop.run("stop", "uuids").returncode == 0


def test_the_same_tag_twice_at_once_from_one_laptop_starts_once(laptop: Project) -> None:  # F50
    both = [laptop.popen(*ON, "launch", "--tag", "same") for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 3], errors
    assert sum("error[tag-exists]" in text for text in errors) == 1
    assert laptop.run("stop", "same").returncode == 0


def test_a_log_without_a_session_or_record_keeps_its_tag(laptop: Project, lab_site: Lab) -> None:
    left = f"{WORKSPACE}/runs/left"  # F50
    log = f"{left}/train_stdout_left.log"
    lab_site.in_container("kpro7", 200, f"mkdir -p {left} && echo step 1 > {log}")
    refused = laptop.run(*ON, "launch", "--tag", "left")
    assert refused.returncode == 3
    assert "error[tag-exists]" in refused.stderr
    assert lab_site.in_container("kpro7", 200, f"cat {log}").stdout == b"step 1\n"


def test_without_nvidia_smi_on_the_node_the_container_is_asked_and_the_node_keeps_the_locks(
    laptop: Project, lab_site: Lab
) -> None:
    assert lab_site.in_host("kpro7", ["mv", "/usr/bin/nvidia-smi", "/root/smi"]).returncode == 0
    try:
        foreign(lab_site, 1)
        (host,) = laptop.document("-l", "kpro7", "gpus")["hosts"]
        assert host["seen_from"] == "kpro7/200"
        assert [row["gpu"]["state"] for row in host["rows"]] == ["idle", "foreign"]
        assert "owner unknown" in host["rows"][1]["gpu"]["reason"]  # F30
        assert laptop.run(*ON, "launch", "--tag", "inside").returncode == 3
        assert laptop.run("-l", "kpro7", "locks", "list").stdout == "no GPU is locked\n"
        lab_site.in_container("kpro7", 200, "pkill -x sleep")
        assert laptop.run(*ON, "launch", "--tag", "inside").returncode == 0
        locks = laptop.document("-l", "kpro7", "locks", "list")["locks"]
        assert [one["state"] for one in locks] == ["live", "live"]
        assert laptop.run("stop", "inside").returncode == 0
    finally:
        lab_site.in_host("kpro7", ["mv", "/root/smi", "/usr/bin/nvidia-smi"])
