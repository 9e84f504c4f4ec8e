#!/usr/bin/python3 -S
"""A stand-in for Proxmox VE's `pct`, over real LXC: the real one's parsing, texts and exit codes.

Copied into each host of the lab as /usr/sbin/pct; standard library only. What the real one does was
read in pve-container 6.1.10; docs/lab.md says where this one differs. Every call adds a line
"TIME COMMAND VMID" to shared/pct_calls.log.
"""

# pathlib would add to the start-up time of every call, of which there are many; what only some
# commands need is imported by them.
# ruff: noqa: PTH103, PTH110, PTH120, PTH123, PTH208

import fcntl
import grp
import json
import locale
import os
import pwd
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

STARTED = time.monotonic()
LAB = "/var/lib/pve-lab"
NODE = os.uname().nodename
LXC = f"/var/lib/lxc/{NODE}"
PATH = "/sbin:/bin:/usr/sbin:/usr/bin"  # the real one forces this for itself and all it starts
CLONE_NEWNS = 0x20000
USAGE = "USAGE: pct <COMMAND> [ARGS] [OPTIONS]\n"
LOCK_S = 10.0

Values = dict[str, Any]

# command -> positional parameters, options ("?": a boolean)
PARAMETERS: dict[str, tuple[list[str], list[str]]] = {
    "exec": (["vmid", "extra-args"], ["keep-env?"]),
    "enter": (["vmid"], ["keep-env?"]),
    "push": (["vmid", "file", "destination"], ["user", "group", "perms"]),
    "pull": (["vmid", "path", "destination"], ["user", "group", "perms"]),
    "status": (["vmid"], ["verbose?"]),
    "config": (["vmid"], ["current?", "snapshot"]),
    "list": ([], []),
    "start": (["vmid"], ["debug?", "skiplock?"]),
    "stop": (["vmid"], ["skiplock?", "overrule-shutdown?"]),
    "shutdown": (["vmid"], ["timeout", "forceStop?"]),
    "reboot": (["vmid"], ["timeout"]),
    "unlock": (["vmid"], []),
}


class Die(Exception):  # noqa: N818  the name of what it stands for
    """Perl's die: the text on stderr, then errno or 255."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.code = code


def say(text: str) -> None:
    """A line on stdout."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")


# ---- parameters


def usage(command: str) -> str:
    """The synopsis that follows an error of the command line."""
    positional, options = PARAMETERS[command]
    words = [f"[<{p}>]" if p == "extra-args" else f"<{p}>" for p in positional]
    if options or "extra-args" in positional:
        words.append("[OPTIONS]")
    return f"pct {command} " + " ".join(words)


def parse(command: str, argv: list[str]) -> Values:
    """Values by name, as PVE reads the command line of one of its commands."""
    rest, got = read_options(command, argv)
    for name in PARAMETERS[command][0]:
        if name == "extra-args":
            got[name], rest = rest, []
        elif rest:
            got[name] = rest.pop(0)
        elif name not in got:
            raise Die(f"400 not enough arguments\n{usage(command)}\n")
    if rest:
        raise Die(f"400 too many arguments\n{usage(command)}\n")
    if "vmid" in got and not re.fullmatch(r"[1-9]\d{2,8}", got["vmid"]):
        why = f"type check ('integer') failed - got '{got['vmid']}'"
        if got["vmid"].isdigit():
            why = "invalid format - value does not look like a valid VM ID"
        raise Die(f"400 Parameter verification failed.\nvmid: {why}\n{usage(command)}\n")
    return got


def read_options(command: str, argv: list[str]) -> tuple[list[str], Values]:
    """Getopt::Long as PVE sets it up.

    Permuting, one or two dashes, unique prefixes, "--" ends options, and positional parameters
    can be given by name too.
    """
    positional, options = PARAMETERS[command]
    is_flag = {o.rstrip("?"): o.endswith("?") for o in options} | dict.fromkeys(positional, False)
    rest: list[str] = []
    got: Values = {}
    bad = False
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += words
            break
        match = re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if not match:
            rest.append(word)
            continue
        try:
            name = find_option(match[1], list(is_flag))
            got[name] = option_value(match, words, flag=is_flag[name])
        except ValueError as error:
            complain(str(error))
            bad = True
    if bad:
        raise Die(f"400 unable to parse option\n{usage(command)}\n")
    return rest, got


def find_option(text: str, names: list[str]) -> str:
    """The option that `text` names or begins."""
    hits = [n for n in names if n == text] or [n for n in names if n.startswith(text)]
    if not hits:
        raise ValueError(f"Unknown option: {text}")
    if len(hits) > 1:
        raise ValueError(f"Option {text} is ambiguous ({', '.join(hits)})")
    return hits[0]


def option_value(match: re.Match[str], words: list[str], *, flag: bool) -> str:
    """The option's value: after "=", or the next word, which is taken off `words`."""
    if match[2] is not None:
        return match[2]
    if words and not (flag and words[0].startswith("-")):
        return words.pop(0)
    if flag:
        return "1"
    raise ValueError(f"Option {match[1]} requires an argument")


def boolean(got: Values, name: str, *, default: bool) -> bool:
    """A flag's value as PVE reads it."""
    if name not in got:
        return default
    value = got[name].lower()
    if value in ("1", "on", "yes", "true"):
        return True
    if value in ("0", "off", "no", "false"):
        return False
    raise Die("400 unable to parse boolean option\n")


# ---- containers


def configuration_path(vmid: str) -> str:
    """Where a container's configuration lies."""
    return f"/etc/pve/nodes/{NODE}/lxc/{vmid}.conf"


def load(vmid: str) -> list[tuple[str, str]]:
    """Keys and values of a container's configuration, without its snapshots."""
    try:
        with open(configuration_path(vmid)) as file:
            text = file.read().split("\n[", 1)[0]
    except FileNotFoundError:
        text = f"Configuration file 'nodes/{NODE}/lxc/{vmid}.conf' does not exist\n"
        raise Die(text, 2) from None
    pairs = (s.partition(":") for s in text.splitlines() if ":" in s and not s.startswith("#"))
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def is_running(vmid: str) -> bool:
    """Whether LXC's command socket exists: a container that still boots runs already."""
    with open("/proc/net/unix") as file:
        return any(line.rstrip().endswith(f"@{LXC}/{vmid}/command") for line in file)


def init_pid(vmid: str) -> int:
    """The container's pid 1 as the host sees it."""
    import subprocess

    argv = ["lxc-info", "-P", LXC, "-n", vmid, "-pH"]
    return int(subprocess.run(argv, capture_output=True, text=True, check=False).stdout or 0)


def lock(vmid: str) -> IO[str]:
    """The flock that every changing command holds (exec and status take none)."""
    path = f"/run/lock/lxc/pve-config-{vmid}.lock"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = open(path, "a")  # noqa: SIM115  the caller keeps it open, which is the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        complain("trying to acquire lock...")
    end = time.monotonic() + LOCK_S
    while time.monotonic() < end:
        time.sleep(0.1)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        complain(" OK")
        return file
    raise Die(f"can't lock file '{path}' - got timeout\n")


def work(task: Callable[[], None]) -> int:
    """fork_worker as the CLI runs it: output and errors are shown; the exit status of the task."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            task()
        except (Die, OSError) as error:
            sys.stderr.write(str(error).rstrip("\n") + "\n")
            code = 1
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- exec, enter


def do_exec(got: Values) -> NoReturn:
    """Become lxc-attach: stdin, stdout, stderr, terminal and exit status are its own."""
    load(got["vmid"])
    if not is_running(got["vmid"]):
        raise Die(f"container '{got['vmid']}' not running!\n")
    extra = got.get("extra-args")
    if extra == []:
        raise Die("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.\n")
    keep = boolean(got, "keep-env", default=True)
    attach = ["lxc-attach", "-P", LXC, "-n", got["vmid"], "--keep-env" if keep else "--clear-env"]
    # Perl decodes every argument by the locale: in C/POSIX each byte above 127 becomes U+FFFD.
    words = [a.encode("utf-8", "surrogateescape") for a in extra or []]
    if locale.setlocale(locale.LC_CTYPE) in ("C", "POSIX"):
        replacement = "\N{REPLACEMENT CHARACTER}".encode()
        words = [re.sub(rb"[\x80-\xff]", replacement, word) for word in words]
    sys.stdout.flush()
    os.execvp(attach[0], [*map(os.fsencode, attach), *([b"--", *words] if words else [])])  # noqa: S606


# ---- push, pull


def enter_mounts(vmid: str) -> None:
    """Move this process into the container's mount namespace."""
    import ctypes

    fd = os.open(f"/proc/{init_pid(vmid)}/ns/mnt", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNS):
        raise Die("failed to enter the container's mount namespace\n")
    os.chdir("/")


def owner(got: Values) -> tuple[int, int]:
    """Numbers of the wanted user and group; -1 where none was asked for."""
    uid = gid = -1
    if "user" in got:
        try:
            uid = int(got["user"]) if got["user"].isdigit() else pwd.getpwnam(got["user"]).pw_uid
        except KeyError:
            raise Die(f"failed to get uid for: {got['user']}\n") from None
    if "group" in got:
        try:
            gid = int(got["group"]) if got["group"].isdigit() else grp.getgrnam(got["group"]).gr_gid
        except KeyError:
            raise Die(f"failed to get gid for: {got['group']}\n") from None
    return uid, gid


def permissions(got: Values) -> int | None:
    """The wanted mode: octal unless it begins with 0x."""
    if "perms" not in got:
        return None
    text = got["perms"] if got["perms"].startswith("0") else "0" + got["perms"]
    try:
        return int(text, 16) if text[:2] in ("0x", "0X") else int(text, 8)
    except ValueError:
        raise Die(f"invalid mode: '{text}'\n") from None


def create(path: str, got: Values) -> int:
    """Open the destination; mode and owner are set for a new file or when they were asked for."""
    uid, gid = owner(got)
    mode = permissions(got)
    new = not os.path.exists(path)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Die(f"failed to create file: {path}: {error.strerror}\n") from None
    if mode is None and new:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    if mode is not None:
        os.fchmod(fd, mode)
    if (uid, gid) != (-1, -1):
        os.fchown(fd, uid, gid)
    return fd


def copy(source: int, destination: int) -> None:
    """Copy until end of file. The real one ignores the result: a full disk truncates in silence."""
    import shutil

    try:
        with os.fdopen(source, "rb") as reader, os.fdopen(destination, "wb", 0) as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
    except OSError:
        pass


def do_push(got: Values) -> None:
    """A file of the host into the container."""
    with lock(got["vmid"]):
        if not is_running(got["vmid"]):
            raise Die("can only push files to a running CT\n")
        load(got["vmid"])

        def task() -> None:
            try:
                source = os.open(got["file"], os.O_RDONLY)
            except OSError:
                raise Die(f"failed to open {got['file']} for reading\n") from None
            enter_mounts(got["vmid"])
            copy(source, create(got["destination"], got))

        work(task)  # exit status 0 whatever the task did, as in PVE 6 to 9


def do_pull(got: Values) -> None:
    """A file of the container to the host."""
    with lock(got["vmid"]):
        if not is_running(got["vmid"]):
            at = "at /usr/share/perl5/PVE/CLI/pct.pm line 664.\n"
            raise Die(f"can only pull files from a running VM {at}")

        def task() -> None:
            destination = create(got["destination"], got)
            enter_mounts(got["vmid"])
            try:
                source = os.open(got["path"], os.O_RDONLY)
            except OSError as error:
                raise Die(f"failed to open {got['path']}: {error.strerror}\n") from None
            copy(source, destination)

        work(task)


# ---- status, list, config, power


def do_status(got: Values) -> None:
    """Running or stopped; with --verbose the keys of the real one, most of them zero."""
    vmid = got["vmid"]
    configuration = dict(load(vmid))
    status = "running" if is_running(vmid) else "stopped"
    if not boolean(got, "verbose", default=False):
        say(f"status: {status}")
        return
    zeros = ("disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime")
    values: Values = dict.fromkeys(zeros, 0)
    values |= {
        "cpus": configuration.get("cores", os.cpu_count()),
        "maxdisk": 4 << 30,
        "maxmem": int(configuration.get("memory", 512)) << 20,
        "maxswap": int(configuration.get("swap", 0)) << 20,
        "name": configuration.get("hostname", f"CT{vmid}"),
        "status": status,
        "type": "lxc",
        "vmid": vmid,
    }
    if configuration.get("lock"):
        values["lock"] = configuration["lock"]
    if status == "running":
        values |= measure(init_pid(vmid))
    for key in sorted(values):
        say(f"{key}: {values[key]}")


def measure(pid: int) -> Values:
    """What can be measured of a running container: disk in bytes, uptime in seconds."""
    disk = os.statvfs(f"/proc/{pid}/root/")
    with open(f"/proc/{pid}/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
        age_s = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return {
        "pid": pid,
        "uptime": int(age_s),
        "disk": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
        "maxdisk": disk.f_blocks * disk.f_frsize,
    }


def do_list(_got: Values) -> None:
    """All containers; no output at all, not even a header, when there are none."""
    names = os.listdir(os.path.dirname(configuration_path("0")))
    vmids = sorted(int(n[:-5]) for n in names if n.endswith(".conf"))
    row = "{:<10} {:<10} {:<12} {:<20}"
    if vmids:
        say(row.format("VMID", "Status", "Lock", "Name"))
    for vmid in map(str, vmids):
        values = dict(load(vmid))
        status = "running" if is_running(vmid) else "stopped"
        name = values.get("hostname", f"CT{vmid}")
        say(row.format(vmid, status, values.get("lock", ""), name))


def do_config(got: Values) -> None:
    """Sorted keys, then raw lxc lines in the order of the file."""
    pairs = load(got["vmid"])
    raw = [pair for pair in pairs if pair[0].startswith("lxc.")]
    for key, value in sorted(set(pairs) - set(raw)) + raw:
        say(f"{key}: {value}")


def do_unlock(got: Values) -> None:
    """Remove the lock entry."""
    pairs = load(got["vmid"])
    if not dict(pairs).get("lock"):
        raise Die("no lock found trying to remove any lock\n")
    with open(configuration_path(got["vmid"]), "w") as file:
        file.writelines(f"{key}: {value}\n" for key, value in pairs if key != "lock")


def lxc(program: str, *arguments: str) -> int:
    """Run one of LXC's programs quietly."""
    import subprocess

    return subprocess.run(
        [program, "-P", LXC, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


def power(command: str, got: Values) -> None:
    """start, stop, shutdown, reboot: silent on success; a failed task ends with exit(-1): 255."""
    vmid = got["vmid"]
    if command == "start" and is_running(vmid):
        raise Die(f"CT {vmid} already running\n")
    if command != "start" and not is_running(vmid):
        raise Die(f"{'VM' if command == 'reboot' else 'CT'} {vmid} not running\n")

    def task() -> None:
        with lock(vmid):
            held = dict(load(vmid)).get("lock")
            if held and not boolean(got, "skiplock", default=False):
                raise Die(f"CT is locked ({held})\n")
            if command != "start":
                how = ["-k"] if command == "stop" else ["-t", got.get("timeout", "60")]
                lxc("lxc-stop", "-n", vmid, *how)
                if is_running(vmid):
                    raise Die("container did not stop\n")
            if command in ("start", "reboot"):
                log = f"{LAB}/shared/lxc-{vmid}.log"
                if lxc("lxc-start", "-n", vmid, "-d", "-l", "INFO", "-o", log):
                    raise Die(f"startup for container '{vmid}' failed\n")

    if work(task):
        sys.exit(255)


COMMANDS: dict[str, Callable[[Values], None]] = {
    "exec": do_exec,
    "enter": do_exec,
    "push": do_push,
    "pull": do_pull,
    "status": do_status,
    "list": do_list,
    "config": do_config,
    "unlock": do_unlock,
}


# ---- start


def faults() -> Values:
    """What the lab was told to do to every call."""
    try:
        with open(f"{LAB}/shared/faults.json") as file:
            found: Values = json.load(file)
    except (OSError, ValueError):
        return {}
    return found


def record_call(command: str, got: Values) -> None:
    """One line a call; O_APPEND keeps the lines of parallel calls whole."""
    try:
        with open(f"{LAB}/shared/pct_calls.log", "a") as file:
            file.write(f"{time.time():.3f} {command} {got.get('vmid', '-')}\n")
    except OSError:
        pass  # not root: the real one refuses such a call as well


def set_locale(*, warn: bool) -> None:
    """Take the locale as Perl does: LANG when LC_ALL names one this host lacks, then C."""
    fallback = False
    for name in ("", os.environ.get("LANG", "C"), "C"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            fallback = True
    if not (fallback or warn):
        return
    now = locale.setlocale(locale.LC_CTYPE)
    rows = [
        f"\t{name} = {json.dumps(os.environ[name]) if name in os.environ else '(unset)'}"
        for name in ("LANGUAGE", "LC_ALL", "LANG")
    ]
    back_to = 'the standard locale ("C")' if now == "C" else f'a fallback locale ("{now}")'
    complain("perl: warning: Setting locale failed.")
    complain("perl: warning: Please check that your locale settings:")
    complain(",\n".join(rows))
    complain("    are supported and installed on your system.")
    complain(f"perl: warning: Falling back to {back_to}.")


def wait_like_perl(latency: str) -> None:
    """Let the call take LO to HI seconds, this program's own start included."""
    import random

    low, high = map(float, latency.split(","))
    time.sleep(max(0.0, random.uniform(low, high) - (time.monotonic() - STARTED)))  # noqa: S311


def main(argv: list[str]) -> None:
    """Run one command line."""
    active = faults()
    os.environ["PATH"] = PATH
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        os.environ.pop(name, None)
    set_locale(warn="locale_warning" in active)
    if "latency" in active:
        wait_like_perl(active["latency"])
    command = argv[0] if argv else ""
    got: Values = {}
    try:
        if not argv:
            raise Die(f"ERROR: no command specified\n{USAGE}")
        if os.geteuid():
            raise Die("please run as root\n")
        if command not in PARAMETERS:
            raise Die(f"ERROR: unknown command 'pct {command}'\n{USAGE}")
        got = parse(command, argv[1:])
    finally:
        record_call(command or "-", got)
    if command in COMMANDS:
        COMMANDS[command](got)
    else:
        power(command, got)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main(sys.argv[1:])
    except Die as error:
        sys.stdout.flush()
        sys.stderr.write(str(error))
        sys.exit(error.code)
