"""Bringing a site up and down: what is in the way, what is left, what is seen from inside."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dflashctl.errors import LabError
from dflashctl.inventory import load_inventory
from dflashctl.lab.claim import MARKER
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import ContainerSpec, HostSpec, MountSpec, SiteSpec
from dflashctl.lab.state import live_pids, read_json, recorded_pids
from dflashctl.transport import connect, run_script
from dflashctl.transport.base import Script

Ssh = Callable[..., subprocess.CompletedProcess[bytes]]
pytestmark = pytest.mark.lab
ROOT = Path(__file__).parents[2]


def small_site(port: int = 0, container: ContainerSpec | None = None) -> SiteSpec:
    """One host, one container: quick to start."""
    containers = {100: container or ContainerSpec(hostname="box")}
    return SiteSpec({"one": HostSpec(ip="10.1.2.9", port=port, gpus=1, containers=containers)})


@pytest.fixture
def second(lab_site: Lab) -> Iterator[Lab]:
    """Another lab, still down; removed after the test. lab_site has checked the requirements."""
    assert lab_site.status().up
    lab = Lab(Path(tempfile.mkdtemp(prefix="lab-")))
    try:
        yield lab
    finally:
        lab.down()


def wait_until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def cgroups_of(name: str) -> list[str]:
    return [d for d, below, _ in os.walk("/sys/fs/cgroup") if name in below]


# ---- up and down


def test_two_labs_run_at_once_without_seeing_each_other(lab_site: Lab, second: Lab) -> None:
    second.up(small_site())
    (one,) = second.status().hosts
    assert one.port not in {host.port for host in lab_site.status().hosts}
    assert second.in_container("one", 100, "hostname").stdout == b"box\n"
    assert lab_site.in_container("kpro6", 200, "hostname").stdout == b"train200\n"
    second.down()
    assert not second.status().up
    assert lab_site.in_container("kpro6", 200, "hostname").stdout == b"train200\n"


def test_a_lab_that_is_up_cannot_be_brought_up_again(lab_site: Lab) -> None:
    with pytest.raises(LabError, match="already up") as refused:
        lab_site.up(small_site())
    assert refused.value.hint == f"dflashctl lab down --state {lab_site.state}"
    assert [host.name for host in lab_site.status().hosts] == ["kpro6", "kpro7"]


def test_down_ends_every_process_and_leaves_no_cgroup_and_no_file(second: Lab) -> None:
    second.up(small_site())
    name = read_json(second.state / "lab.json")["cgroup"]
    pids = live_pids(second.state)
    assert cgroups_of(name)
    second.down()
    assert all(map(has_ended, pids.values()))
    assert cgroups_of(name) == []
    assert not second.state.exists()
    second.down()  # twice is fine


def test_killing_the_supervisor_ends_everything(second: Lab) -> None:
    second.up(small_site())
    job = second.in_container("one", 100, "sleep 98765 >/dev/null 2>&1 & echo $!")
    assert job.returncode == 0
    pids = live_pids(second.state)
    os.kill(pids["supervisor"], signal.SIGKILL)
    wait_until(lambda: not recorded_pids(second.state))
    left = [
        p for p in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x0098765" in read_or_empty(p)
    ]
    assert left == []
    assert not second.status().up


def read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_up_after_an_unclean_end_works_and_removes_the_old_cgroups(second: Lab) -> None:
    second.up(small_site())
    old = read_json(second.state / "lab.json")["cgroup"]
    pids = live_pids(second.state)
    os.kill(pids["supervisor"], signal.SIGKILL)
    wait_until(lambda: not recorded_pids(second.state))
    second.up(small_site())
    assert second.in_container("one", 100, "echo ok").stdout == b"ok\n"
    assert cgroups_of(old) == []


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.15, 0.25])
def test_up_killed_half_way_leaves_what_down_and_the_next_up_can_clear(
    second: Lab, after_s: float
) -> None:
    argv = [sys.executable, "-m", "dflashctl", "lab", "up", "--state", str(second.state)]
    null = subprocess.DEVNULL
    with subprocess.Popen(argv, cwd=ROOT, stdout=null, stderr=null) as up:
        wait_until((second.state / MARKER).exists)  # the directory is there before
        time.sleep(after_s)
        up.kill()
    second.down()
    assert not second.state.exists()
    second.up(small_site())
    assert second.in_container("one", 100, "echo ok").stdout == b"ok\n"


def test_down_also_ends_a_lab_that_is_just_starting(second: Lab, tmp_path: Path) -> None:
    tool = tmp_path / "unshare"  # one that starts nothing: the supervisor gets no further
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    argv = [sys.executable, "-m", "dflashctl", "lab", "up", "--state", str(second.state)]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe) as up:
        wait_until((second.state / "pids.json").exists)
        second.down()
        told = up.communicate(timeout=60)[1]
    assert up.returncode == 1
    assert b"error[lab]: the lab did not start" in told
    assert not second.state.exists()


def test_of_two_who_bring_the_same_lab_up_at_once_one_is_refused(second: Lab) -> None:
    argv = [sys.executable, "-m", "dflashctl", "lab", "up", "--state", str(second.state)]
    both = [
        subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=100)[1].decode() for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    refused = "".join(answers)
    assert re.search("another process is using|is already up", refused), refused
    assert len(second.status().hosts) == 2


def test_the_end_of_its_owner_ends_the_lab_and_leaves_nothing(second: Lab) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        second.up(small_site(), owner=owner.pid)
        cgroup = read_json(second.state / "lab.json")["cgroup"]
        owner.kill()
    wait_until(lambda: not second.state.exists())
    assert cgroups_of(cgroup) == []


def test_a_lab_whose_directory_is_removed_ends(second: Lab) -> None:
    second.up(small_site())
    (second.state / "lab.json").unlink()
    wait_until(lambda: not recorded_pids(second.state))


def test_a_fixed_port_is_used_and_a_taken_one_is_named(second: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LabError, match=f"one: port {port} of 127.0.0.1: Address already"):
            second.up(small_site(port=port))
    second.up(small_site(port=port))
    assert second.status().hosts[0].port == port


def test_a_directory_with_other_things_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        (Path(name) / "mine").write_text("precious")
        for verb in (lambda lab: lab.up(small_site()), lambda lab: lab.down()):
            with pytest.raises(LabError, match="exists and is not a lab's state directory"):
                verb(Lab(Path(name)))
        assert (Path(name) / "mine").read_text() == "precious"


def test_a_state_path_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    with pytest.raises(LabError, match="and 90 is the most, for the unix sockets"):
        Lab(long).up(small_site())
    assert not long.exists()


def test_a_host_that_cannot_start_is_reported_with_its_log_and_leaves_nothing(
    second: Lab, tmp_path: Path
) -> None:
    site = replace(small_site(), base=str(tmp_path))  # nothing a container could run on
    with pytest.raises(LabError, match="the lab did not start") as failed:
        second.up(site)
    assert "startup for container '100' failed" in failed.value.message
    assert not second.state.exists()


def test_questions_to_a_lab_that_is_down_say_how_to_start_it(second: Lab) -> None:
    for ask in (lambda: second.in_host("one", ["true"]), second.hosts_yaml):
        with pytest.raises(LabError, match="there is no lab in") as refused:
            ask()
        assert refused.value.hint == f"dflashctl lab up --state {second.state}"
    assert not second.status().up


def test_a_host_without_containers_lists_nothing_not_even_a_header(second: Lab) -> None:
    second.up(SiteSpec({"bare": HostSpec(ip="10.1.2.9", gpus=0)}))
    assert "bare" in second.hosts_yaml()
    done = second.in_host("bare", ["pct", "list"])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert second.in_host("bare", ["nvidia-smi"]).stdout == b"No devices were found\n"


# ---- from inside


def test_this_python_with_torch_runs_in_a_container(lab_site: Lab) -> None:
    script = f"{shlex.quote(sys.executable)} -c 'import torch; print(torch.ones(3).sum().item())'"
    done = lab_site.in_container("kpro6", 200, script)
    assert done.stdout == b"3.0\n", done.stderr.decode()


def test_what_is_exposed_is_read_only_and_the_rest_of_the_machine_hidden(lab_site: Lab) -> None:
    exposed = python_paths(sys.executable)
    for path in exposed:
        done = lab_site.in_container("kpro6", 200, f"touch {shlex.quote(path)}/x")
        assert b"Read-only file system" in done.stderr or path.startswith("/usr"), path
    assert not Path("/usr/x").exists()
    done = lab_site.in_container("kpro6", 200, f"ls {shlex.quote(str(ROOT))}")
    assert b"pyproject.toml" not in done.stdout
    for top in ("home", "tmp", "srv", "mnt"):  # the interpreter itself may lie below one of them
        shown = {Path(path).parts[2] for path in exposed if Path(path).parts[1] == top}
        listed = lab_site.in_container("kpro6", 200, f"ls -A /{top}").stdout.decode().split()
        assert set(listed) == shown, top


def test_a_host_cannot_write_to_this_machine_either(lab_site: Lab) -> None:
    script = "touch /var/lib/pve-lab/base/x; touch /var/lib/pve-lab/binds/200/0/x"
    stderr = lab_site.in_host("kpro6", ["sh", "-c", script]).stderr
    assert stderr.count(b"Read-only file system") == 2


def test_mounts_show_a_directory_at_another_path(second: Lab, tmp_path: Path) -> None:
    for name in ("models", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "models/config.json").write_text("{}")
    (tmp_path / "one.txt").write_text("one")
    container = ContainerSpec(
        mounts={
            "/models": str(tmp_path / "models"),
            "/data/out": MountSpec(str(tmp_path / "out"), writable=True),
            "/data/one.txt": MountSpec(str(tmp_path / "one.txt")),
        },
        expose=(str(tmp_path),),
    )
    second.up(small_site(container=container))
    assert second.in_container("one", 100, "cat /models/config.json").stdout == b"{}"
    assert second.in_container("one", 100, "cat /data/one.txt").stdout == b"one"
    assert second.in_container("one", 100, f"cat {tmp_path}/one.txt").stdout == b"one"
    assert b"Read-only" in second.in_container("one", 100, "touch /models/x").stderr
    assert second.in_container("one", 100, "echo hi > /data/out/x").returncode == 0
    assert (tmp_path / "out/x").read_text() == "hi\n"
    config = second.in_host("one", ["pct", "config", "100"]).stdout.decode()
    assert f"mp1: {tmp_path}/one.txt,mp=/data/one.txt,ro=1\n" in config
    assert f"mp2: {tmp_path}/out,mp=/data/out,ro=0\n" in config


def test_paths_with_blanks_and_other_odd_letters_work(lab_site: Lab) -> None:
    assert lab_site.status().up
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        odd = Path(name, "a b,c:d%e")
        (odd / "what is seen").mkdir(parents=True)
        (odd / "what is seen/x").write_text("seen")
        lab = Lab(odd / "state")
        try:
            lab.up(small_site(container=ContainerSpec(expose=(str(odd / "what is seen"),))))
            script = f"cat {shlex.quote(str(odd))}/*/x"
            assert lab.in_container("one", 100, script).stdout == b"seen"
            ssh = ["ssh", "-F", str(lab.ssh_config), "one", "hostname"]
            done = subprocess.run(ssh, capture_output=True, check=False, timeout=60)
            assert (done.stdout, done.stderr) == (b"one\n", b"")
        finally:
            lab.down()


def test_a_mount_that_lxc_cannot_make_is_shown_with_its_reason(second: Lab, tmp_path: Path) -> None:
    # Inside a read-only directory no mount point can be made.
    mounts: dict[str, MountSpec | str] = {f"{tmp_path}/none": str(tmp_path)}
    container = ContainerSpec(expose=(str(tmp_path),), mounts=mounts)
    with pytest.raises(LabError, match="the lab did not start") as failed:
        second.up(small_site(container=container))
    assert "Read-only file system" in failed.value.message


def test_a_path_on_another_file_system_can_be_exposed(second: Lab) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        (Path(name) / "x").write_text("seen")
        second.up(small_site(container=ContainerSpec(expose=(name,))))
        assert second.in_container("one", 100, f"cat {name}/x").stdout == b"seen"


def test_a_path_that_does_not_exist_is_named_before_anything_starts(second: Lab) -> None:
    with pytest.raises(LabError, match="/nowhere does not exist"):
        second.up(small_site(container=ContainerSpec(expose=("/nowhere",))))


def test_the_workspace_has_the_size_asked_for(second: Lab) -> None:
    second.up(small_site(container=ContainerSpec(workspace="6g")))
    size = second.in_container("one", 100, "df -Pk /workspace | awk 'END {print $2}'").stdout
    assert int(size) == 6 << 20


def test_the_container_has_the_programs_that_dflashctl_needs(lab_site: Lab) -> None:
    script = "for p in python3 tmux tar sha256sum bash head env; do command -v $p; done"
    done = lab_site.in_container("kpro6", 200, script)
    assert len(done.stdout.splitlines()) == 7


def test_tmux_started_through_ssh_and_pct_lives_on(ssh: Ssh) -> None:
    tmux = "tmux -S /workspace/t.sock"
    assert ssh("kpro6", f"pct exec 200 -- {tmux} new -d -s job 'sleep 30'").returncode == 0
    assert ssh("kpro6", f"pct exec 200 -- {tmux} has-session -t =job").returncode == 0
    assert ssh("kpro6", f"pct exec 200 -- {tmux} kill-server").returncode == 0


# ---- ways in


def test_the_hosts_yaml_is_one_that_dflashctl_reads(lab_site: Lab, tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(lab_site.hosts_yaml(python=sys.executable, env={"PVE_LAB_GPU_MIB": "9000"}))
    inventory = load_inventory(path)
    places = inventory.select([])
    assert [p.container.label for p in places if p.container] == [
        "kpro6/200",
        "kpro6/201",
        "kpro7/200",
    ]
    kpro6 = inventory.one(["kpro6/200"])
    assert kpro6.container
    assert (kpro6.container.target, kpro6.container.drafter) == (
        ("0", "1", "2", "3", "4"),
        ("5", "6", "7"),
    )
    assert kpro6.container.python == sys.executable
    assert kpro6.container.env == {"PVE_LAB_GPU_MIB": "9000"}
    assert kpro6.host.port == lab_site.status().hosts[0].port
    path.write_text(lab_site.hosts_yaml(cpu=True))
    on_cpu = load_inventory(path).one(["kpro7"]).container
    assert on_cpu
    assert (on_cpu.target, on_cpu.drafter) == (("cpu",), ("cpu",))
    assert on_cpu.env == {"OMP_WAIT_POLICY": "PASSIVE"}


def test_a_host_of_hosts_yaml_is_reached_through_the_project_s_own_transport(
    lab_site: Lab, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(lab_site.hosts_yaml())
    place = load_inventory(path).one(["kpro6/200"])
    before = lab_site.pct_calls("kpro6")
    with closing(connect(place)) as transport:
        result = run_script(transport, Script("hostname; echo $((6 * 7))", deadline_s=20, what="x"))
    assert result.stdout == b"train200\n42\n"
    assert len(lab_site.pct_calls("kpro6")) == len(before) + 1


def test_a_host_answers_by_ssh_under_its_name_and_keeps_its_key(ssh: Ssh) -> None:
    done = ssh("kpro7", "hostname; id -un")
    assert (done.stdout, done.stderr) == (b"kpro7\nroot\n", b"")


def test_an_unknown_host_key_is_refused_by_the_ssh_program(lab_site: Lab, ssh: Ssh) -> None:
    done = ssh("kpro7", "true", "-o", f"UserKnownHostsFile={lab_site.state}/none")
    assert done.returncode == 255
    assert b"Host key verification failed" in done.stderr


def test_a_jump_through_another_host_works(ssh: Ssh) -> None:
    assert ssh("kpro6-via-kpro7", "hostname").stdout == b"kpro6\n"


def test_on_the_lan_hosts_have_their_own_addresses(lab_site: Lab) -> None:
    ssh = ["ssh", "-F", str(lab_site.lan_ssh_config), "root@10.1.2.6", "hostname"]
    done = subprocess.run(lab_site.lan_command(ssh), capture_output=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == (b"kpro6\n", b"")


def test_unknown_hosts_and_containers_are_named_with_the_known_ones(lab_site: Lab) -> None:
    with pytest.raises(LabError, match="no host kpro9; known are kpro6, kpro7"):
        lab_site.in_host("kpro9", ["true"])
    with pytest.raises(LabError, match=re.escape("kpro7: no container 201; known are 200")):
        lab_site.in_container("kpro7", 201, "true")


def test_a_command_that_takes_too_long_is_given_up(lab_site: Lab) -> None:
    with pytest.raises(LabError, match=r"kpro6: sleep 30 took longer than 0\.3 s"):
        lab_site.in_host("kpro6", ["sleep", "30"], timeout_s=0.3)


def test_restore_ends_what_runs_in_containers_and_keeps_files(lab_site: Lab) -> None:
    start = "echo kept > /workspace/kept; setsid -f sleep 987 </dev/null >/dev/null 2>&1"
    lab_site.in_container("kpro6", 200, start)
    count = "ls -d /proc/[0-9]* | wc -l"
    assert int(lab_site.in_container("kpro6", 200, count).stdout) >= 3
    lab_site.restore()
    commands = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /workspace/kept"
    seen = lab_site.in_container("kpro6", 200, commands).stdout
    assert b"sleep 987" not in seen
    assert seen.endswith(b"kept\n")


def test_restore_brings_power_states_and_faults_back(lab_site: Lab) -> None:
    lab_site.in_host("kpro6", ["pct", "stop", "200"])
    lab_site.in_host("kpro6", ["pct", "start", "201"])
    lab_site.fault("kpro7", "latency", "0,0.1")
    lab_site.restore()
    kpro6, kpro7 = lab_site.status().hosts
    assert kpro6.containers == {200: "running", 201: "stopped"}
    assert kpro7.faults == {}
