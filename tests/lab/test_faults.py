"""Each fault of the lab, seen as dflashctl would see it, and gone after "none"."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflashctl.errors import LabError
from dflashctl.lab.faults import FAULTS, describe_faults
from dflashctl.lab.site import Lab

Ssh = Callable[..., subprocess.CompletedProcess[bytes]]
pytestmark = pytest.mark.lab
LIBFAKETIME = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]


def active(lab: Lab, host: str) -> dict[str, str]:
    return {h.name: dict(h.faults) for h in lab.status().hosts}[host]


def date_of(lab: Lab, host: str) -> int:
    """Seconds by which the clock of the host's container is ahead, to the whole hour."""
    before = time.time()
    there = int(lab.in_container(host, 200, "date +%s").stdout)
    ahead = 3600 * round((there - before) / 3600)
    assert int(before) <= there - ahead <= time.time()
    return ahead


def test_latency_makes_every_pct_call_of_a_host_as_slow_as_asked(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "latency", "0.4,0.5")
    started = time.monotonic()
    lab_site.in_host("kpro6", ["pct", "list"])
    assert time.monotonic() - started >= 0.4
    assert active(lab_site, "kpro7") == {}, "other hosts are as fast as ever"


def test_the_locale_warning_is_perls(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "locale_warning", "1")
    done = lab_site.in_host("kpro6", ["pct", "exec", "200", "--", "echo", "ok"])
    assert done.stdout == b"ok\n"
    assert done.stderr.decode() == (
        "perl: warning: Setting locale failed.\n"
        "perl: warning: Please check that your locale settings:\n"
        '\tLANGUAGE = (unset),\n\tLC_ALL = (unset),\n\tLANG = "C.UTF-8"\n'
        "    are supported and installed on your system.\n"
        'perl: warning: Falling back to a fallback locale ("C.UTF-8").\n'
    )


def test_a_locale_the_host_lacks_brings_the_warning_by_itself(lab_site: Lab) -> None:
    argv = ["env", "LANG=xx_YY.UTF-8", "pct", "list"]
    stderr = lab_site.in_host("kpro6", argv).stderr.decode()
    assert stderr.endswith('perl: warning: Falling back to the standard locale ("C").\n')


def test_noise_comes_on_stdout_before_the_answer(lab_site: Lab, ssh: Ssh) -> None:
    lab_site.fault("kpro6", "noise", "Welcome to kpro6!")
    assert ssh("kpro6", "pct exec 200 -- echo ok").stdout == b"Welcome to kpro6!\nok\n"


def test_the_banner_comes_on_stderr_alone(lab_site: Lab, ssh: Ssh) -> None:
    lab_site.fault("kpro6", "banner", "Authorised use only")
    done = ssh("kpro6", "echo ok")
    assert (done.stdout, done.stderr) == (b"ok\n", b"Authorised use only\n")


def test_a_stalled_net_moves_no_byte_until_it_is_ok_again(lab_site: Lab) -> None:
    argv = ["ssh", "-F", str(lab_site.ssh_config), "kpro6", "while read x; do echo $x; done"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ssh:
        assert ssh.stdin
        assert ssh.stdout
        ssh.stdin.write(b"before\n")
        ssh.stdin.flush()
        assert ssh.stdout.readline() == b"before\n"
        lab_site.fault("kpro6", "net", "stall")
        time.sleep(0.3)
        ssh.stdin.write(b"after\n")
        ssh.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            ssh.wait(timeout=1)
        lab_site.fault("kpro6", "net", "ok")
        assert ssh.stdout.readline() == b"after\n"
        ssh.stdin.close()
        assert ssh.wait(timeout=60) == 0


def test_no_connection_opens_over_a_stalled_net(lab_site: Lab, ssh: Ssh) -> None:
    lab_site.fault("kpro6", "net", "stall")
    assert ssh("kpro6", "true", "-o", "ConnectTimeout=1").returncode == 255


def test_keepalives_notice_a_stalled_net(lab_site: Lab) -> None:
    options = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"]
    argv = ["ssh", "-F", str(lab_site.ssh_config), *options, "kpro6", "echo up; sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as open_one:
        assert open_one.stdout
        assert open_one.stdout.readline() == b"up\n"
        lab_site.fault("kpro6", "net", "stall")
        assert open_one.wait(timeout=60) == 255


def test_a_cut_net_resets_what_is_open_and_refuses_what_is_new(lab_site: Lab, ssh: Ssh) -> None:
    argv = ["ssh", "-F", str(lab_site.ssh_config), "kpro6", "echo up; sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as open_one:
        assert open_one.stdout
        assert open_one.stdout.readline() == b"up\n"
        lab_site.fault("kpro6", "net", "cut")
        assert open_one.wait(timeout=60) == 255
    assert ssh("kpro6", "true").returncode == 255
    assert ssh("kpro7", "true").returncode == 0
    lab_site.fault("kpro6", "none")
    assert ssh("kpro6", "true").returncode == 0


def test_a_cut_net_unplugs_the_host_from_the_lan(lab_site: Lab) -> None:
    ping = "import socket; socket.create_connection(('10.1.2.6', 22), 3)"
    argv = lab_site.lan_command(["/usr/bin/python3", "-c", ping])
    assert subprocess.run(argv, check=False).returncode == 0
    lab_site.fault("kpro6", "net", "cut")
    assert subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode == 1


def test_sshd_kill_ends_the_session_and_the_command_in_the_container_lives_on(
    lab_site: Lab, ssh: Ssh
) -> None:
    command = "pct exec 200 -- sh -c 'echo $$; exec sleep 600'"
    argv = ["ssh", "-F", str(lab_site.ssh_config), "kpro6", command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as session:
        assert session.stdout
        pid = int(session.stdout.readline())
        lab_site.fault("kpro6", "sshd_kill", "1")
        assert session.wait(timeout=60) == 255
    lab_site.fault("kpro6", "none")  # returns when the listener is back
    assert ssh("kpro6", f"pct exec 200 -- kill {pid}").returncode == 0


def test_a_full_disk_takes_no_byte_more_and_gets_its_size_back(lab_site: Lab) -> None:
    write = "echo x > /workspace/x && sync /workspace/x && rm /workspace/x"
    before = lab_site.in_container("kpro6", 200, "df -Pk /workspace").stdout.decode().split()
    lab_site.fault("kpro6", "disk_full", "200")
    full = lab_site.in_container("kpro6", 200, "df -Pk /workspace").stdout.decode().split()
    assert full[10] == "0", "available"
    dd = "dd if=/dev/zero of=/workspace/big bs=64k count=1; s=$?; rm -f /workspace/big; exit $s"
    done = lab_site.in_container("kpro6", 200, dd)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    lab_site.fault("kpro6", "none")
    after = lab_site.in_container("kpro6", 200, f"{write} && df -Pk /workspace")
    assert after.stdout.decode().split()[8] == before[8] == str(2 << 20), "KiB in all"


def test_a_read_only_root_refuses_files_and_still_shows_what_is_exposed(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "ro_root", "200")
    lab_site.fault("kpro6", "ro_root", "200")  # twice must not need two clears
    done = lab_site.in_container("kpro6", 200, "touch /root/x")
    assert b"Read-only file system" in done.stderr
    assert lab_site.in_container("kpro6", 200, "touch /workspace/x").returncode == 0
    lab_site.fault("kpro6", "ro_root", "off")
    assert lab_site.in_container("kpro6", 200, "touch /root/x").returncode == 0
    assert lab_site.in_container("kpro6", 200, f"{sys.executable} --version").returncode == 0
    mounts = lab_site.in_container("kpro6", 200, "grep -c ' /root ' /proc/mounts").stdout
    assert mounts == b"0\n"


@pytest.mark.skipif(not LIBFAKETIME, reason="libfaketime is missing: apt-get install faketime")
def test_skew_moves_the_clock_of_one_container_alone(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "skew", "200:-7200")
    assert date_of(lab_site, "kpro6") == -7200
    assert date_of(lab_site, "kpro7") == 0
    lab_site.fault("kpro6", "none")
    assert date_of(lab_site, "kpro6") == 0


@pytest.mark.skipif(not LIBFAKETIME, reason="libfaketime is missing: apt-get install faketime")
def test_a_skewed_clock_is_right_again_also_after_a_stop(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "skew", "200:+3600")
    lab_site.in_host("kpro6", ["pct", "stop", "200"])
    lab_site.fault("kpro6", "none")
    lab_site.in_host("kpro6", ["pct", "start", "200"])
    assert abs(int(lab_site.in_container("kpro6", 200, "date +%s").stdout) - time.time()) < 5


def test_a_locked_container_refuses_stop_and_takes_exec(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "lock", "200")
    stop = lab_site.in_host("kpro6", ["pct", "stop", "200"])
    assert (stop.returncode, stop.stderr) == (255, b"CT is locked (backup)\n")
    listing = lab_site.in_host("kpro6", ["pct", "list"]).stdout.decode()
    assert "200        running    backup       train200" in listing
    assert lab_site.in_host("kpro6", ["pct", "exec", "200", "--", "true"]).returncode == 0
    lab_site.fault("kpro6", "none")
    assert "backup" not in lab_site.in_host("kpro6", ["pct", "list"]).stdout.decode()


def test_unlock_removes_the_lock(lab_site: Lab) -> None:
    before = lab_site.in_host("kpro6", ["pct", "config", "200"]).stdout
    lab_site.fault("kpro6", "lock", "200")
    assert lab_site.in_host("kpro6", ["pct", "unlock", "200"]).returncode == 0
    assert lab_site.in_host("kpro6", ["pct", "config", "200"]).stdout == before


def test_the_value_off_ends_one_fault_and_leaves_the_others(lab_site: Lab) -> None:
    lab_site.fault("kpro6", "latency", "0,0.1")
    lab_site.fault("kpro6", "banner", "hello")
    assert active(lab_site, "kpro6") == {"latency": "0,0.1", "banner": "hello"}
    lab_site.fault("kpro6", "latency", "off")
    assert active(lab_site, "kpro6") == {"banner": "hello"}
    lab_site.fault("kpro6", "none")
    assert active(lab_site, "kpro6") == {}


@pytest.mark.parametrize(
    ("host", "name", "value", "message"),
    [
        ("kpro9", "latency", "0,1", "no host kpro9; known are kpro6, kpro7"),
        ("kpro6", "latnecy", "0,1", "unknown fault 'latnecy'; known are none, latency"),
        ("kpro6", "latency", "fast", "latency: found 'fast', expected LO,HI"),
        ("kpro6", "lock", "999", "kpro6: no container 999; known are 200, 201"),
        ("kpro6", "disk_full", "", "disk_full: found '', expected VMID"),
        ("kpro6", "ro_root", "201", "kpro6/201: the container does not run"),
        ("kpro6", "gpu", "lost:8", "expected ok, no_driver, mismatch, no_devices, hung, or"),
        ("kpro6", "gpu", "broken", "found 'broken'"),
        ("kpro6", "net", "slow", "net: found 'slow', expected ok|stall|cut"),
    ],
)
def test_a_wrong_fault_is_refused_by_name_and_leaves_nothing_on(
    lab_site: Lab, host: str, name: str, value: str, message: str
) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        lab_site.fault(host, name, value)
    assert active(lab_site, "kpro6") == {}


def test_the_help_names_every_fault() -> None:
    text = describe_faults()
    assert all(f"{name} {fault.value}" in text for name, fault in FAULTS.items())


def test_a_disk_that_is_in_use_can_be_filled_while_it_grows(lab_site: Lab) -> None:
    script = "cd /workspace; for i in $(seq 400); do head -c 40000 /dev/zero >> grow || break; done"
    lab_site.in_container("kpro7", 200, f"({script}) >/dev/null 2>&1 </dev/null &")
    lab_site.fault("kpro7", "disk_full", "200")
    free = lab_site.in_container("kpro7", 200, "df -Pk /workspace").stdout.decode().split()[10]
    lab_site.in_container("kpro7", 200, "rm -f /workspace/grow")
    assert free == "0"
