"""The stand-in pct over real LXC: texts and exit codes of the real one, and how exec behaves."""

import shlex
import subprocess
import time
from collections.abc import Callable

import pytest

from dflashctl.lab.site import Lab

Ssh = Callable[..., subprocess.CompletedProcess[bytes]]
pytestmark = pytest.mark.lab

EXEC_USAGE = b"pct exec <vmid> [<extra-args>] [OPTIONS]\n"
NOT_FOUND = b"Configuration file 'nodes/kpro6/lxc/999.conf' does not exist\n"
NO_COMMAND = b"missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.\n"
PULL_REFUSED = (
    b"can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 664.\n"
)
GENERAL_USAGE = b"USAGE: pct <COMMAND> [ARGS] [OPTIONS]\n"

REFUSALS = {
    "no command": ("", 255, b"ERROR: no command specified\n" + GENERAL_USAGE),
    "unknown command": ("foo", 255, b"ERROR: unknown command 'pct foo'\n" + GENERAL_USAGE),
    "unknown container": ("exec 999 -- true", 2, NOT_FOUND),
    "status of unknown container": ("status 999", 2, NOT_FOUND),
    "stopped container": ("exec 201 -- true", 255, b"container '201' not running!\n"),
    "empty command": ("exec 200 --", 255, NO_COMMAND),
    "option without --": (
        "exec 200 ls -la",
        255,
        b"Unknown option: la\n400 unable to parse option\n" + EXEC_USAGE,
    ),
    "vmid too small": (
        "exec 99 -- true",
        255,
        b"400 Parameter verification failed.\n"
        b"vmid: invalid format - value does not look like a valid VM ID\n" + EXEC_USAGE,
    ),
    "vmid no number": (
        "exec abc -- true",
        255,
        b"400 Parameter verification failed.\nvmid: type check ('integer') failed - got 'abc'\n"
        + EXEC_USAGE,
    ),
    "no vmid": ("exec", 255, b"400 not enough arguments\n" + EXEC_USAGE),
    "too many arguments": (
        "status 200 x",
        255,
        b"400 too many arguments\npct status <vmid> [OPTIONS]\n",
    ),
    "bad boolean": (
        "exec 200 --keep-env=maybe -- true",
        255,
        b"400 unable to parse boolean option\n",
    ),
    "start a running one": ("start 200", 255, b"CT 200 already running\n"),
    "stop a stopped one": ("stop 201", 255, b"CT 201 not running\n"),
    "shutdown of a stopped one": ("shutdown 201", 255, b"CT 201 not running\n"),
    "reboot of a stopped one": ("reboot 201", 255, b"VM 201 not running\n"),
    "start an unknown one": ("start 999", 255, NOT_FOUND),
    "push into a stopped one": (
        "push 201 /etc/hostname /root/x",
        255,
        b"can only push files to a running CT\n",
    ),
    "pull from a stopped one": ("pull 201 /etc/hostname /root/x", 255, PULL_REFUSED),
    "unlock without a lock": ("unlock 200", 255, b"no lock found trying to remove any lock\n"),
    "command not found": ("exec 200 -- /nonexistent", 127, None),
    "command not executable": ("exec 200 -- /etc/hostname", 126, None),
    "command's own status": ("exec 200 -- sh -c 'exit 7'", 7, b""),
    "command killed": ("exec 200 -- sh -c 'kill -9 $$'", 137, b""),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_pct_says_and_returns_what_the_real_one_does(lab_site: Lab, name: str) -> None:
    command, status, text = REFUSALS[name]
    done = lab_site.in_host("kpro6", ["pct", *shlex.split(command)])
    assert (done.returncode, done.stdout) == (status, b"")
    if text is None:
        assert done.stderr.startswith(b"lxc-attach: ")
    else:
        assert done.stderr == text


def test_an_option_of_the_command_is_lost_to_pct_when_the_dashes_are_missing(
    lab_site: Lab,
) -> None:
    # -v is a prefix of --vmid, which the first positional parameter then overrides.
    done = lab_site.in_host("kpro6", ["pct", "exec", "200", "echo", "x", "-v", "5"])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x\n", b"")
    done = lab_site.in_host("kpro6", ["pct", "exec", "200", "--", "echo", "x", "-v", "5"])
    assert done.stdout == b"x -v 5\n"


def test_list_shows_width_filled_columns(lab_site: Lab) -> None:
    done = lab_site.in_host("kpro6", ["pct", "list"])
    assert done.stdout.decode().splitlines() == [
        "VMID       Status     Lock         Name                ",
        "200        running                 train200            ",
        "201        stopped                 train201            ",
    ]


def test_config_is_sorted_and_ends_with_the_raw_lines_in_their_order(lab_site: Lab) -> None:
    lines = lab_site.in_host("kpro7", ["pct", "config", "200"]).stdout.decode().splitlines()
    raw = [line for line in lines if line.startswith("lxc.")]
    assert lines[: -len(raw)] == sorted(lines[: -len(raw)])
    assert raw[:3] == [
        "lxc.cgroup2.devices.allow: c 195:* rwm",
        "lxc.cgroup2.devices.allow: c 510:* rwm",
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
    ]
    assert "hostname: train200" in lines


def test_status_verbose_tells_the_pid_of_a_running_container(lab_site: Lab) -> None:
    done = lab_site.in_host("kpro6", ["pct", "status", "200", "--verbose"])
    values = dict(line.split(": ", 1) for line in done.stdout.decode().splitlines())
    assert (values["status"], values["vmid"], values["maxmem"]) == ("running", "200", "68719476736")
    command = lab_site.in_host("kpro6", ["cat", f"/proc/{values['pid']}/cmdline"]).stdout
    assert b"/sbin_init" in command
    assert lab_site.in_host("kpro6", ["pct", "status", "201"]).stdout == b"status: stopped\n"


def test_start_stop_and_reboot_are_silent_and_do_it(lab_site: Lab) -> None:
    for verb, after in [("start", "running"), ("reboot", "running"), ("stop", "stopped")]:
        done = lab_site.in_host("kpro6", ["pct", verb, "201"])
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), verb
        assert lab_site.in_host("kpro6", ["pct", "status", "201"]).stdout.decode().split() == [
            "status:",
            after,
        ]


def test_exec_passes_argv_stdin_and_bytes_unchanged_through_ssh(ssh: Ssh) -> None:
    words = ["a b", "$HOME", "it's", '"', "new\nline", "*", "-v", "--", "\\", ""]
    argv = ["pct", "exec", "200", "--", "printf", r"%s\0", *words]
    done = ssh("kpro6", shlex.join(argv))
    assert done.stdout == b"".join(w.encode() + b"\0" for w in words)
    payload = bytes(range(256)) * 1000
    assert ssh("kpro6", "pct exec 200 -- cat", stdin=payload).stdout == payload


def test_a_letter_beyond_ascii_is_lost_in_the_c_locale(lab_site: Lab) -> None:
    argv = ["env", "LC_ALL=C", "pct", "exec", "200", "--", "printf", "%s", "é"]
    assert lab_site.in_host("kpro6", argv).stdout.decode() == "��"
    argv[1] = "LC_ALL=C.UTF-8"
    assert lab_site.in_host("kpro6", argv).stdout.decode() == "é"


def test_the_environment_is_kept_unless_told_otherwise(lab_site: Lab) -> None:
    leak = ["env", "LEAK=1", "pct", "exec", "200"]
    kept = lab_site.in_host("kpro6", [*leak, "--", "env"]).stdout.decode().splitlines()
    assert {"LEAK=1", "HOME=/root", "PATH=/sbin:/bin:/usr/sbin:/usr/bin"} <= set(kept)
    argv = [*leak, "--keep-env", "0", "--", "env"]
    cleared = lab_site.in_host("kpro6", argv).stdout.decode()
    assert "LEAK" not in cleared
    assert "HOME=" not in cleared


def test_push_ends_with_0_also_when_it_failed(lab_site: Lab) -> None:
    ok = lab_site.in_host("kpro6", ["pct", "push", "200", "/etc/hostname", "/root/pushed"])
    assert (ok.returncode, ok.stderr) == (0, b"")
    assert lab_site.in_container("kpro6", 200, "cat /root/pushed").stdout == b"kpro6\n"
    for argv, text in [
        (["/none", "/root/x"], b"failed to open /none for reading\n"),
        (
            ["/etc/hostname", "/none/x"],
            b"failed to create file: /none/x: No such file or directory\n",
        ),
        (["/etc/hostname", "/root/x", "--user", "nobody2"], b"failed to get uid for: nobody2\n"),
        (["/etc/hostname", "/root/x", "--group", "nobody2"], b"failed to get gid for: nobody2\n"),
        (["/etc/hostname", "/root/x", "--perms", "9"], b"invalid mode: '09'\n"),
    ]:
        done = lab_site.in_host("kpro6", ["pct", "push", "200", *argv])
        assert (done.returncode, done.stderr) == (0, text)


def test_push_and_pull_set_mode_and_owner_only_when_asked(lab_site: Lab) -> None:
    push = ["pct", "push", "200", "/etc/hostname"]
    lab_site.in_host("kpro6", [*push, "/root/a", "--perms", "640", "--user", "daemon"])
    lab_site.in_host("kpro6", [*push, "/root/b", "--perms", "0x1ff"])
    lab_site.in_host("kpro6", [*push, "/root/b"])  # an existing file keeps its mode
    modes = lab_site.in_container("kpro6", 200, "stat -c '%a %U' /root/a /root/b").stdout
    assert modes == b"640 daemon\n777 root\n"
    pull = ["pct", "pull", "200", "/root/a", "/root/pulled"]
    assert lab_site.in_host("kpro6", pull).returncode == 0
    assert lab_site.in_host("kpro6", ["cat", "/root/pulled"]).stdout == b"kpro6\n"


def test_pull_of_a_missing_file_leaves_an_empty_one(lab_site: Lab) -> None:
    done = lab_site.in_host("kpro6", ["pct", "pull", "200", "/none", "/root/empty"])
    assert (done.returncode, done.stderr) == (
        0,
        b"failed to open /none: No such file or directory\n",
    )
    assert lab_site.in_host("kpro6", ["stat", "-c", "%s", "/root/empty"]).stdout == b"0\n"


def test_a_push_to_a_full_disk_truncates_without_a_word(lab_site: Lab) -> None:
    lab_site.in_host("kpro6", ["sh", "-c", "head -c 300000 /dev/zero > /root/big"])
    lab_site.fault("kpro6", "disk_full", "200")
    done = lab_site.in_host("kpro6", ["pct", "push", "200", "/root/big", "/workspace/big"])
    assert (done.returncode, done.stderr) == (0, b"")
    size = lab_site.in_container(
        "kpro6", 200, "stat -c %s /workspace/big; rm /workspace/big"
    ).stdout
    assert int(size) < 300000


def test_changing_commands_wait_for_the_lock_and_exec_does_not(lab_site: Lab) -> None:
    script = (
        "mkdir -p /run/lock/lxc; exec 9>>/run/lock/lxc/pve-config-200.lock; flock 9;"
        "pct exec 200 -- true && echo exec works;"
        ": >/root/said; pct push 200 /etc/hostname /root/locked 9>&- 2>/root/said &"
        "until grep -q trying /root/said; do sleep 0.05; done; flock -u 9; wait;"
        "cat /root/said >&2; rm /root/said"
    )
    done = lab_site.in_host("kpro6", ["bash", "-c", script])
    assert done.stdout == b"exec works\n"
    assert done.stderr == b"trying to acquire lock...\n OK\n"


@pytest.mark.slow
def test_a_lock_that_is_never_released_ends_the_call_after_ten_seconds(lab_site: Lab) -> None:
    script = (
        "mkdir -p /run/lock/lxc; exec 9>>/run/lock/lxc/pve-config-200.lock; flock 9;"
        "pct push 200 /etc/hostname /root/locked 9>&-"
    )
    started = time.monotonic()
    done = lab_site.in_host("kpro6", ["bash", "-c", script])
    assert time.monotonic() - started >= 10
    assert done.returncode == 255
    path = b"/run/lock/lxc/pve-config-200.lock"
    assert done.stderr == (
        b"trying to acquire lock...\ncan't lock file '" + path + b"' - got timeout\n"
    )


def test_a_container_stopped_under_a_command_gives_137(lab_site: Lab) -> None:
    script = (
        "mkfifo /root/told; pct exec 200 -- sh -c 'echo up; exec sleep 600' >/root/told &"
        "read -r _ </root/told; rm /root/told; pct stop 200; wait $!; echo $?"
    )
    assert lab_site.in_host("kpro6", ["bash", "-c", script]).stdout == b"137\n"


def test_a_container_starts_again_though_its_stop_left_cgroups_behind(lab_site: Lab) -> None:
    """As a stop does while lxc-attach enters: LXC by itself starts in no cgroup that exists."""
    script = (
        "own=$(sed -n 's/^lxc.cgroup.dir.monitor = //p' /var/lib/lxc/kpro6/200/config);"
        'tops=$(find /sys/fs/cgroup -type d -path "*/$own" 2>/dev/null); pct stop 200;'
        "for top in $tops; do mkdir -p $top; done; pct start 200 && echo $tops"
    )
    done = lab_site.in_host("kpro6", ["bash", "-c", script])
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/kpro6/lxc.monitor/200" in done.stdout
    assert lab_site.in_container("kpro6", 200, "echo here").stdout == b"here\n"


def test_a_user_other_than_root_reaches_pct_through_sudo_alone(ssh: Ssh) -> None:
    refused = ssh("ops@kpro6", "/usr/sbin/pct list")
    assert (refused.returncode, refused.stderr) == (255, b"please run as root\n")
    allowed = ssh("ops@kpro6", "sudo -n /usr/sbin/pct exec 200 -- hostname")
    assert allowed.stdout == b"train200\n"
    assert ssh("ops@kpro6", "sudo -n /usr/bin/true").returncode == 1


def test_every_call_is_one_line_of_the_call_log(lab_site: Lab) -> None:
    before = lab_site.pct_calls("kpro6")
    started = time.time()
    for argv in (["exec", "200", "--", "true"], ["list"], ["exec", "999", "--", "true"], ["foo"]):
        lab_site.in_host("kpro6", ["pct", *argv])
    new = [line.split() for line in lab_site.pct_calls("kpro6")[len(before) :]]
    assert [words[1:] for words in new] == [
        ["exec", "200"],
        ["list", "-"],
        ["exec", "999"],
        ["foo", "-"],
    ]
    assert all(started - 1 < float(words[0]) < time.time() + 1 for words in new)


def test_calls_of_one_host_are_not_counted_for_another(lab_site: Lab) -> None:
    before = lab_site.pct_calls("kpro7")
    lab_site.in_host("kpro6", ["pct", "list"])
    assert lab_site.pct_calls("kpro7") == before
