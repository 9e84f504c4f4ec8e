"""doctor: what it makes of facts as real sites give them, and the verb on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnosis import Check
from dflashctl.diagnosis.container import Interval, judge_container
from dflashctl.diagnosis.node import judge_node
from dflashctl.inventory import Container, Host
from dflashctl.operations.doctor import asks_first
from tests.dflashctl.act.conftest import Project, wait_until

BOX = Container("pve1", 101, target=("0",), drafter=("1",))
NODE = Host("pve1", "root@pve1", containers=(BOX,))
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build"
    "  (dvs-builder@U22)  Sun Apr 13 04:50:56 UTC 2025\n"
)
LIST = "VMID       Status     Lock         Name\n101        running                 train\n"
SHARED = ["lxc.cgroup2.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow: c 508:* rwm"]
SHARED += ["lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"]


def said(out: str = "", rc: int | None = 0, err: str = "") -> dict[str, Any]:
    return {"rc": rc, "out": out, "err": err}


def node_facts(**changed: Any) -> dict[str, Any]:
    """What remote/node_facts.py prints on a node where all is well."""
    plain = {
        "hostname": "pve1",
        "user": "root",
        "pct": "/usr/sbin/pct",
        "list": said(LIST),
        "configurations": [{"node": "pve1", "vmid": "101", "lines": SHARED}],
        "cluster": None,
        "driver": CLOSED,
        "devices": "Character devices:\n195 nvidia\n508 nvidia-uvm\n",
        "nodes": ["nvidia-uvm", "nvidia0", "nvidiactl"],
        "persistence": said("0, Enabled\n1, Enabled\n"),
        "xid": [],
        "uptime_s": 86400.0 * 3,
    }
    return plain | changed


def node_checks(become: bool = False, **changed: Any) -> dict[str, Check]:
    checks = judge_node(NODE, [BOX], node_facts(**changed), become=become)
    return {check.name: check for check in checks}


def wrong(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if check.status in ("warn", "FAIL")]


def container_facts(**changed: Any) -> dict[str, Any]:
    """What remote/container_facts.py prints in a container where all is well."""
    room = {"exists": True, "at": "/workspace", "free_bytes": 1 << 40, "inodes": 10**8}
    names = ("nvidia-uvm", "nvidia0", "nvidiactl")
    plain = {
        "tmux": "/usr/bin/tmux",
        "apt": "/usr/bin/apt-get",
        "python": "/opt/dflash/bin/python",
        "packages": {"version": "3.12.3", "torch": "2.11.0", "cuda": "12.8", "fla": False},
        "hybrid": None,
        "shm_bytes": 16 << 30,
        "shm_mount": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0",
        "memlock_bytes": None,
        "workspace": room | {"free_inodes": 10**8, "writable": True, "uid": 0},
        "log_dir": None,
        "uid": 0,
        "uid_map": "         0     100000      65536\n",
        "locale": None,
        "cgroup": "0::/.lxc\n",
        "logind": None,
        "cuda": {"rc": 0, "count": 2, "file": "/usr/lib/libcuda.so.550.54.14"},
        "devices": [{"name": n, "major": 195, "minor": 0, "usable": True} for n in names],
        "driver": CLOSED,
        "clock_unix_s": 1000.5,
    }
    return plain | changed


def container_checks(**changed: Any) -> dict[str, Check]:
    checks = judge_container(BOX, container_facts(**changed), Interval(1000.0, 1001.0))
    return {check.name: check for check in checks}


def test_a_site_where_all_is_well_gives_no_warning() -> None:
    assert wrong(node_checks()) == []
    assert wrong(container_checks()) == []


def test_a_node_without_pct_is_told_from_one_without_rights() -> None:  # F04, F23
    assert node_checks(pct=None, list=None)["pct"].status == "FAIL"
    refused = said(rc=1, err="sudo: a password is required\n")
    root = node_checks(become=True, list=refused, user="anna")["root"]
    assert root.status == "FAIL"
    line = "echo 'anna ALL=(root) NOPASSWD: /usr/sbin/pct' > /etc/sudoers.d/dflashctl"
    assert line in root.fix
    assert "apt-get install sudo" in node_checks(become=True, list=None)["root"].fix


def test_a_container_on_another_node_of_the_cluster_is_named() -> None:  # F24
    elsewhere = [{"node": "pve2", "vmid": "101", "lines": []}]
    check = node_checks(list=said("VMID Status Lock Name\n"), configurations=elsewhere)
    assert check["container 101"].found == "101 is on pve2, not here"
    asked = [{"node": "pve3", "vmid": "101"}]
    check = node_checks(list=said(""), configurations=None, cluster=asked)
    assert check["container 101"].found == "101 is on pve3, not here"


def test_a_locked_container_is_a_warning_and_a_stopped_one_a_failure() -> None:  # F25
    locked = node_checks(list=said("101        running    backup       train\n"))
    assert (locked["container 101"].status, "backup" in locked["container 101"].found) == (
        "warn",
        True,
    )
    stopped = node_checks(list=said("101        stopped                 train\n"))["container 101"]
    assert (stopped.status, stopped.fix) == ("FAIL", "pct start 101")


def test_a_major_of_uvm_that_the_configuration_does_not_allow_fails_with_the_line() -> None:  # F38
    check = node_checks(devices="195 nvidia\n511 nvidia-uvm\n")["nvidia-uvm"]
    assert (check.status, check.found) == (
        "FAIL",
        "101 may use the majors 195, 508; nvidia-uvm has 511",
    )
    assert "lxc.cgroup2.devices.allow: c 511:* rwm" in check.fix
    assert node_checks(devices="195 nvidia\n")["nvidia-uvm"].status == "FAIL"
    assert node_checks(nodes=["nvidia0", "nvidiactl"])["nvidia-uvm"].status == "FAIL"
    by_entry = [{"node": "pve1", "vmid": "101", "lines": [*SHARED, "dev3: /dev/nvidia-uvm"]}]
    passed = node_checks(devices="511 nvidia-uvm\n", configurations=by_entry)["nvidia-uvm"]
    assert passed.status == "ok", "devN entries follow the node's numbers"


def test_slow_and_sick_drivers_are_warned_of() -> None:  # F34, F43
    slow = node_checks(persistence=said("0, Enabled\n1, Disabled\n"))["persistence"]
    assert (slow.status, slow.found[:13]) == ("warn", "off for GPU 1")
    hung = node_checks(persistence=said(rc=None, err="no answer within 15 s"))["persistence"]
    assert (hung.status, "no answer within 15 s" in hung.found) == ("skipped", True)
    long = 86400.0 * 61
    assert node_checks(uptime_s=long)["uptime"].status == "ok", "not a driver that hangs"
    assert node_checks(uptime_s=long, driver=OPEN)["uptime"].status == "warn"
    assert node_checks(uptime_s=long - 86400 * 2, driver=OPEN)["uptime"].status == "ok"
    xid = "[12.3] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    assert node_checks(xid=[xid])["kernel log"].found.endswith("fallen off the bus.")
    assert node_checks(xid=None)["kernel log"].status == "skipped"
    assert node_checks(driver=None)["driver"].status == "FAIL"


def test_a_card_in_two_containers_is_told_and_one_of_another_node_is_not() -> None:  # F31
    one = {"node": "pve1", "vmid": "101", "lines": SHARED}
    both = [one, {"node": "pve1", "vmid": "105", "lines": ["dev0: /dev/nvidia0,mode=0666"]}]
    check = node_checks(configurations=both)["shared GPUs"]
    assert check.status == "warn"
    assert "GPU 0 to 101, 105" in check.found
    far = [one, {"node": "pve2", "vmid": "105", "lines": SHARED}]
    assert node_checks(configurations=far)["shared GPUs"].status == "ok"


def test_libraries_of_another_driver_fail_with_both_versions() -> None:  # F37
    cuda = {"rc": 0, "count": 2, "file": "/usr/lib/libcuda.so.550.40.07"}
    check = container_checks(cuda=cuda)["driver version"]
    assert check.status == "FAIL"
    assert "550.54.14, libcuda in the container 550.40.07" in check.found


def test_cuda_that_does_not_start_fails_with_its_status() -> None:  # F38
    check = container_checks(cuda={"rc": 999, "count": -1, "file": "x"})["CUDA"]
    assert (check.status, check.found) == ("FAIL", "cuInit gave 999")
    assert container_checks(cuda={"rc": 0, "count": 0, "file": "x"})["CUDA"].status == "FAIL"
    assert container_checks(cuda={"error": "no answer within 60 s"})["CUDA"].status == "FAIL"
    lost = [{"name": "nvidia0", "major": 195, "minor": 0, "usable": True}]
    assert container_checks(devices=lost)["device nodes"].found == (
        "missing: /dev/nvidiactl, /dev/nvidia-uvm"
    )


def test_small_shm_and_memlock_are_shown_with_the_lines_that_mend_them() -> None:  # F58, F59
    mount = "shm /dev/shm tmpfs rw,size=65536k 0 0"
    shm = container_checks(shm_bytes=64 << 20, shm_mount=mount)["/dev/shm"]
    assert (shm.status, shm.found[:8], mount in shm.found) == ("warn", "64 MiB (", True)
    assert "lxc.mount.entry: tmpfs dev/shm" in shm.fix
    assert container_checks(shm_bytes=None, shm_mount=None)["/dev/shm"].status == "FAIL"
    memlock = container_checks(memlock_bytes=8 << 20)["memlock"]
    assert (memlock.status, "8192 KiB" in memlock.found) == ("warn", True)
    assert "lxc.prlimit.memlock: unlimited" in memlock.fix


def test_a_workspace_of_an_owner_outside_the_uid_map_fails() -> None:  # F26
    room = container_facts()["workspace"]
    lost = container_checks(workspace=room | {"uid": 65534, "writable": False})["workspace"]
    assert (lost.status, "(0 100000 65536)" in lost.found) == ("FAIL", True)
    assert "chown -R 100000:100000" in lost.fix
    closed = container_checks(workspace=room | {"uid": 7, "writable": False})["workspace"]
    assert "may not be written by uid 0" in closed.found
    full = container_checks(workspace=room | {"free_inodes": 3})["disk"]
    assert full.status == "FAIL"


def test_a_login_session_that_is_killed_at_logout_fails() -> None:  # F48
    scope = "0::/user.slice/user-0.slice/session-12.scope\n"
    assert container_checks(cgroup=scope)["logout"].status == "ok"
    kills = "#KillUserProcesses=no\nKillUserProcesses=yes\n"
    assert container_checks(cgroup=scope, logind=kills)["logout"].status == "FAIL"
    assert container_checks(logind=kills)["logout"].status == "ok", "pct exec makes no session"


def test_a_hybrid_target_without_its_kernels_is_warned_of() -> None:
    check = container_checks(hybrid=True)["linear attention"]
    assert (check.status, "pip install flash-linear-attention" in check.fix) == ("warn", True)
    assert container_checks(hybrid=False)["linear attention"].status == "ok"


@pytest.mark.parametrize(("there", "found"), [(1000.5, "within"), (1061.0, "60 s ahead of")])
def test_a_clock_is_off_only_by_what_the_round_trip_cannot_explain(
    there: float, found: str
) -> None:
    assert container_checks(clock_unix_s=there)["clock"].found.startswith(found)


def test_tmux_is_offered_only_to_who_can_install_it_and_never_without_a_question() -> None:
    missing = container_checks(tmux=None)["tmux"]
    assert (missing.status, "--fix" in missing.fix) == ("warn", True)
    assert missing.mend[-1].endswith("apt-get -qy install tmux")
    assert asks_first(missing)
    assert container_checks(tmux=None, uid=1000)["tmux"].mend == ()
    assert container_checks(tmux=None, apt=None)["tmux"].mend == ()


def by_name(document: dict[str, Any], place: str) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in document["checks"] if c["place"] == place}


def test_the_verb_looks_at_this_machine_and_makes_the_workspace_only_when_asked(
    project: Project,
) -> None:
    hosts = project.root / "hosts.yaml"
    fresh = Path(project.workspace) / "deep" / "workspace"
    hosts.write_text(hosts.read_text().replace(f"{project.workspace}\n", f"{fresh}\n"))
    # A python without site-packages would not find torch: the check is about the one of hosts.yaml.
    seen = project.document("doctor")
    inside = by_name(seen, "here/self")
    assert (seen["rc"], seen["ok"], seen["schema"]) == (0, True, 1), seen
    assert inside["workspace"]["status"] == "warn"
    assert inside["python"]["found"].startswith(f"{sys.executable} 3.")
    assert not fresh.exists()
    mended = project.document("doctor", "--fix")
    assert by_name(mended, "here/self")["workspace"]["status"] == "ok"
    assert fresh.is_dir()


def test_a_broken_python_makes_the_verb_end_with_1_and_name_the_fix(project: Project) -> None:
    hosts = project.root / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace(sys.executable, "/nowhere/python"))
    done = project.run("doctor")
    assert done.returncode == 1
    assert "FAIL     python" in done.stdout
    assert "/nowhere/python does not run: No such file or directory" in done.stdout
    assert "fix: dflashctl deploy --env -l here/self" in done.stdout


def answers(argv: list[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(argv, env=os.environ | environment, capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real ssh-agent with seven keys; its environment."""
    socket = f"/tmp/agent-{os.getpid()}.sock"  # short, unlike tmp_path
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as process:
        try:
            environment = {"SSH_AUTH_SOCK": socket}
            for number in range(7):
                key = tmp_path / f"key{number}"
                argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
                subprocess.run(argv, check=True)
                add = ["ssh-add", "-q", str(key)]
                wait_until(lambda add=add: answers(add, environment))  # its socket may be early
            yield environment
        finally:
            process.terminate()
    Path(socket).unlink(missing_ok=True)


def test_too_many_keys_and_an_unknown_unreachable_host_are_told_before_a_launch(  # F20
    project: Project, agent: dict[str, str]
) -> None:
    text = (project.root / "hosts.yaml").read_text()
    (project.root / "known").write_text("")
    far = "    backend: openssh\n    address: root@127.0.0.1\n    port: 1\n    known_hosts: known\n"
    (project.root / "hosts.yaml").write_text(text.replace("    backend: local\n", far))
    project.environment |= agent
    found = project.document("doctor")
    laptop = by_name(found, "laptop")
    assert laptop["ssh agent"]["found"] == "7 keys"
    assert laptop["keys here"]["found"].startswith("the agent offers 7 keys")
    assert "identity_file:" in laptop["keys here"]["fix"]
    assert laptop["host key here"]["status"] == "warn"
    assert by_name(found, "here")["reach"]["status"] == "FAIL"
    assert by_name(found, "here/self")["reach"]["status"] == "skipped"
    assert found["rc"] == 4


def test_a_key_that_others_can_read_is_closed_by_fix(project: Project, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("not read by doctor")
    key.chmod(0o644)
    text = (project.root / "hosts.yaml").read_text()
    far = f"    address: root@127.0.0.1\n    port: 1\n    identity_file: {key}\n"
    (project.root / "hosts.yaml").write_text(text.replace("    backend: local\n", far))
    assert by_name(project.document("doctor"), "laptop")["keys here"]["status"] == "FAIL"
    mended = project.document("doctor", "--fix")
    assert by_name(mended, "laptop")["keys here"]["status"] == "ok"
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_bad_inventory_is_refused_before_anything_is_asked(project: Project) -> None:  # F69
    (project.root / "hosts.yaml").write_text("hosts: [a, b]  # comment\n")
    done = project.run("doctor")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hosts.yaml:1" in done.stderr
