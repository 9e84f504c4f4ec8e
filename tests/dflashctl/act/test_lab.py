"""The acting verbs through real ssh and real containers of the look-alike site."""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import Project, held_gpu, wait_until, write_model, write_project

pytestmark = pytest.mark.lab

END_RUNS = r"""
cd %s/runs 2>/dev/null || exit 0
for record in */process.json; do
    [ -e "$record" ] || continue
    pid=$(grep -o '"trainer_pid": [0-9]*' "$record" | grep -o '[0-9]*$')
    if [ ! -e "${record%%/*}/exit.json" ]; then kill -9 "$pid" 2>/dev/null; fi
done
rm -rf %s
"""


@pytest.fixture
def project(tmp_path: Path, stand_in: Path, lab_site: Lab) -> Iterator[Project]:
    """A project whose hosts are the lab's; each test has a workspace of its own in kpro6/200."""
    workspace = f"/workspace/{tmp_path.name[-24:]}"
    env = {"PVE_LAB_GPU_MIB": "9000"}
    hosts = lab_site.hosts_yaml(python=sys.executable, env=env)
    write_project(
        tmp_path, workspace, hosts.replace("workspace: /workspace\n", f"workspace: {workspace}\n")
    )
    write_model(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    project = Project(tmp_path, workspace, stand_in, place="kpro6/200")
    yield project
    lab_site.in_container("kpro6", 200, END_RUNS % (workspace, workspace))


@pytest.fixture
def deployed(project: Project) -> Project:
    assert project.run("-l", "kpro6/200", "deploy").returncode == 0
    pushed = project.run("-l", "kpro6/200", "push", "target", "chats.jsonl", project.workspace)
    assert pushed.returncode == 0, pushed.stderr
    return project


def shell(lab: Lab, script: str) -> str:
    return lab.in_container("kpro6", 200, script).stdout.decode()


def gpu_states(project: Project) -> list[str]:
    (host,) = project.document("-l", "kpro6/200", "gpus")["hosts"]
    return [row["gpu"]["state"] for row in host["rows"]]


def test_deploy_takes_one_pct_call_whether_it_sends_or_not(project: Project, lab_site: Lab) -> None:
    counts, sent = [], []
    for _ in range(2):
        before = len(lab_site.pct_calls("kpro6"))
        place = project.document("-l", "kpro6/200", "deploy")["places"][0]
        counts.append(len(lab_site.pct_calls("kpro6")) - before)
        sent.append(place["num_sent"])
    assert counts == [1, 1]
    assert sent[0] > 5
    assert sent[1] == 0


def test_deploy_to_all_goes_on_past_a_container_that_is_down(project: Project) -> None:
    done = project.run("deploy")
    assert done.returncode == 6
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["kpro6/200", "kpro7/200"]
    assert "error[container-down]: kpro6/201" in done.stderr
    document = project.document("deploy")
    assert (document["rc"], document["ok"]) == (6, False)
    assert [place["num_sent"] for place in document["places"]] == [0, 0]
    assert [failure["place"] for failure in document["failures"]] == ["kpro6/201"]


def test_launch_holds_the_gpus_the_tag_and_the_line_and_stop_releases_them(
    deployed: Project, lab_site: Lab
) -> None:
    launched = deployed.document("-l", "kpro6/200", "launch", "--tag", "x")
    assert launched["rc"] == 0, launched
    gpus = launched["manifest"]["gpus"]
    assert [(gpu["role"], gpu["index"]) for gpu in gpus] == [
        *(("target", index) for index in range(5)),
        *(("drafter", index) for index in range(5, 8)),
    ]
    uuids = ",".join(gpu["uuid"] for gpu in gpus)
    event = json.loads(shell(lab_site, f"head -n1 {deployed.workspace}/runs/x/metrics.jsonl"))
    assert event["cuda"] == uuids
    assert gpu_states(deployed) == ["ours"] * 8
    table = deployed.run("-l", "kpro6/200", "gpus").stdout
    assert "run x (CT 200 pid " in table
    same = deployed.run("-l", "kpro6/200", "launch", "--tag", "x")
    assert (same.returncode, "error[tag-exists]" in same.stderr) == (3, True)
    other = deployed.run("-l", "kpro6/200", "launch", "--tag", "y")
    assert other.returncode == 3
    assert "GPU 0 (GPU-5eed0000-" in other.stderr
    assert "is not idle: locked by run x of " in other.stderr
    assert "dflashctl stop x" in other.stderr
    stopped = deployed.document("stop", "x")
    assert (stopped["rc"], stopped["signal"], stopped["gpus_released"]) == (0, "SIGINT", True)
    assert gpu_states(deployed) == ["idle"] * 8


def test_a_foreign_process_on_a_gpu_refuses_the_launch_and_is_named(
    deployed: Project, lab_site: Lab
) -> None:
    shell(lab_site, held_gpu(3))
    refused = deployed.run("-l", "kpro6/200", "launch", "--tag", "x")
    shell(lab_site, "pkill -fx 'sleep 600'")
    assert refused.returncode == 3
    assert "error[gpu-busy]: kpro6/200: GPU 3 (GPU-" in refused.stderr
    assert "is not idle: CT 200 pid " in refused.stderr
    assert "sleep 600" in refused.stderr
    assert (
        "No such"
        in lab_site.in_container(
            "kpro6", 200, f"ls {deployed.workspace}/runs/x 2>&1"
        ).stdout.decode()
    ), "nothing was made"


def test_gpus_of_a_host_that_is_cut_off_do_not_hide_the_others(
    project: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro7", "net", "cut")
    document = project.document("gpus")
    assert (document["rc"], document["ok"]) == (6, False)
    kpro6, kpro7 = document["hosts"]
    assert (len(kpro6["rows"]), kpro6["exit_code"]) == (8, 0)
    assert (kpro7["rows"], kpro7["exit_code"]) == ([], 4)
    shown = project.run("gpus")
    assert shown.returncode == 6
    assert "UNKNOWN" in shown.stdout
    assert "error: kpro7" in shown.stderr


def test_a_lost_card_is_a_problem_and_its_neighbours_keep_their_rows(
    project: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro7", "gpu", "lost_rows:1")
    document = project.document("-l", "kpro7", "gpus")
    (host,) = document["hosts"]
    assert document["rc"] == 7
    assert [row["gpu"]["state"] for row in host["rows"]] == ["idle", "failed"]
    assert host["error"] == "GPU 1 failed: the driver says [GPU is lost] of its memory"


@pytest.mark.slow
def test_a_driver_that_hangs_is_unknown_after_10_s(project: Project, lab_site: Lab) -> None:
    lab_site.fault("kpro7", "gpu", "hung")
    document = project.document("-l", "kpro7", "gpus")
    assert document["rc"] == 8
    assert "no answer within 10 s" in document["hosts"][0]["error"]


def test_a_stopped_container_exits_4_with_the_command_to_start_it(project: Project) -> None:
    refused = project.run("-l", "kpro6/201", "deploy")
    assert refused.returncode == 4
    assert "kpro6/201" in refused.stderr
    assert "pct start 201" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sigkill_of_deploy_leaves_the_release_absent_or_whole_and_a_rerun_completes(
    project: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro6", "latency", "0.2,0.4")
    chance = random.Random(8)
    releases = f"{project.workspace}/releases"
    for _ in range(6):
        shell(lab_site, f"rm -rf {releases}")
        process = project.popen("-l", "kpro6/200", "deploy")
        time.sleep(chance.uniform(0.4, 2.2))
        process.kill()
        process.communicate()
        names = shell(lab_site, f"ls {releases} 2>/dev/null").split()
        done = project.document("-l", "kpro6/200", "deploy")["places"][0]
        assert done["repaired"] == [], "what is there under the digest is whole"
        assert names in ([], [done["digest"]])
        # What the killed one's far end still does ends soon; then nothing partial is left.
        wanted = f"{done['digest']}\n"
        wait_until(lambda wanted=wanted: shell(lab_site, f"ls -A {releases}") == wanted)
        assert project.document("-l", "kpro6/200", "deploy")["places"][0]["num_sent"] == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sigkill_of_launch_leaves_the_run_absent_or_started_and_a_rerun_completes(
    deployed: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro6", "latency", "0.2,0.4")
    chance = random.Random(15)
    for number in range(5):
        tag = f"k{number}"
        process = deployed.popen("-l", "kpro6/200", "launch", "--tag", tag)
        time.sleep(chance.uniform(0.5, 3.5))
        process.kill()
        process.communicate()
        time.sleep(1.0)  # a start whose client is gone comes to its end or never began
        done = deployed.document("-l", "kpro6/200", "launch", "--tag", tag)
        assert done["rc"] == 0 or done["error"]["code"] == "tag-exists", done
        metrics = f"{deployed.workspace}/runs/{tag}/metrics.jsonl"
        wait_until(lambda metrics=metrics: shell(lab_site, f"cat {metrics}").count("\n") > 4)
        events = [json.loads(line) for line in shell(lab_site, f"cat {metrics}").splitlines()]
        steps = [event["step"] for event in events if event["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1)), "one trainer, not two"
        assert (deployed.root / "runs" / tag / "manifest.json").exists()
        assert deployed.run("stop", tag).returncode == 0


@pytest.mark.slow
def test_a_launch_whose_link_dies_in_the_middle_says_how_to_look_and_a_rerun_completes(
    deployed: Project, lab_site: Lab
) -> None:
    lab_site.fault("kpro6", "latency", "0.5,0.5")
    process = deployed.popen("-l", "kpro6/200", "launch", "--tag", "x")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("starting"):
            break
    lab_site.fault("kpro6", "sshd_kill", "1")
    _out, err = process.communicate(timeout=100)
    assert process.returncode in (4, 8), err
    assert "dflashctl status x" in err
    lab_site.fault("kpro6", "none")
    done = deployed.document("-l", "kpro6/200", "launch", "--tag", "x")
    assert done["rc"] == 0, done
    assert deployed.run("stop", "x").returncode == 0


def test_of_two_launches_at_once_for_the_same_gpus_exactly_one_wins(deployed: Project) -> None:
    both = [deployed.popen("-l", "kpro6/200", "launch", "--tag", tag) for tag in ("a", "b")]
    answers = {process.args[-1]: process.communicate(timeout=100) for process in both}
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 3], answers
    loser = next(tag for tag, (_, err) in answers.items() if "error[gpu-busy]" in err)
    winner = "b" if loser == "a" else "a"
    assert f"run {winner}" in answers[loser][1]
    assert not (deployed.root / "runs" / loser).exists()
    assert deployed.run("stop", winner).returncode == 0
    assert deployed.run("-l", "kpro6/200", "stop", loser).returncode == 2, "it never existed"
