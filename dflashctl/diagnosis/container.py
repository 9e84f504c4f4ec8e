"""The checks of a container, from the answer of ``remote/container_facts.py``."""

import re
from dataclasses import dataclass
from typing import Any

from dflashctl.diagnosis.check import Check, Checks
from dflashctl.diagnosis.node import driver_version
from dflashctl.inventory import Container

_GIB = 1 << 30
_MIB = 1 << 20
SMALL_SHM_BYTES = _GIB  # docker's 64 MiB is what bus errors come from
SMALL_MEMLOCK_BYTES = 64 * _MIB  # the kernel's own default is 8 MiB
SMALL_DISK_BYTES = 10 * _GIB
FEW_INODES = 10_000
SKEW_S = 2.0
_OVERFLOW_UID = 65534
_SHM = "/dev/shm"  # noqa: S108 - looked at, not written
_INSTALL_TMUX = "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install tmux"

Json = dict[str, Any]


@dataclass(frozen=True)
class Interval:
    """When the answer was on its way by the laptop's clock, in Unix seconds."""

    sent_unix_s: float
    received_unix_s: float

    def skew_s(self, there_unix_s: float) -> float:
        """Return how far a clock is off at least: 0 when its time lies in the interval."""
        early = min(0.0, there_unix_s - self.sent_unix_s)
        return early or max(0.0, there_unix_s - self.received_unix_s)


def judge_container(container: Container, facts: Json, interval: Interval) -> list[Check]:
    """Return the checks of a container, in the order in which a launch would meet them."""
    checks = Checks(container.label)
    _tmux(checks, facts)
    _logout(checks, facts)
    _python(checks, facts)
    _hybrid(checks, facts)
    if "cuda" in facts:
        _devices(checks, facts)
        _library(checks, facts)
        _cuda(checks, facts)
    else:
        checks.skip("CUDA", "hosts.yaml gives this place no GPU")
    _shm(checks, facts, container)
    _memlock(checks, facts, container)
    _workspace(checks, facts, container)
    _clock(checks, interval.skew_s(facts["clock_unix_s"]))
    if facts["locale"]:
        checks.warn("locale", facts["locale"], "env: {LC_ALL: C.UTF-8} in hosts.yaml")
    else:
        checks.ok("locale", "can be used")
    return checks.noted


def _tmux(checks: Checks, facts: Json) -> None:
    if facts["tmux"]:
        checks.ok("tmux", facts["tmux"])
        return
    fix = f"dflashctl doctor -l {checks.place} --fix   (or, there: apt-get install tmux)"
    mend: tuple[str, ...] = ("sh", "-c", _INSTALL_TMUX)
    if not facts["apt"] or facts["uid"] != 0:
        fix, mend = "install tmux there, as root", ()
    found = "missing: runs start with setsid, and `attach` does not work"
    checks.warn("tmux", found, fix, mend)


def _logout(checks: Checks, facts: Json) -> None:
    in_session = re.search(r"/session-[^/\s]+\.scope", facts["cgroup"] or "")
    kills = re.search(r"^\s*KillUserProcesses\s*=\s*(yes|true|1|on)\b", facts["logind"] or "", re.M)
    if in_session and kills:
        found = "commands run in a login session, and logind kills those at logout"
        fix = "KillUserProcesses=no in /etc/systemd/logind.conf, or: loginctl enable-linger"
        checks.fail("logout", found, fix)
    else:
        where = "a login session, which logind lets live" if in_session else "no login session"
        checks.ok("logout", f"commands run in {where}: a run outlives the connection")


def _python(checks: Checks, facts: Json) -> None:
    found, python = facts["packages"], facts["python"]
    fix = f"dflashctl deploy --env -l {checks.place}   (or correct `python:` in hosts.yaml)"
    if "error" in found:
        checks.fail("python", f"{python}: {found['error']}", fix)
    else:
        built = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
        text = f"{python} {found['version']}, torch {found['torch']} ({built})"
        checks.ok("python", text)
        if "cuda" in facts and not found["cuda"]:
            checks.fail("torch", "it was built without CUDA, and the roles are GPUs", fix)


def _hybrid(checks: Checks, facts: Json) -> None:
    if facts["hybrid"] is None:
        checks.skip("linear attention", "no target directory is named (--train FILE)")
    elif not facts["hybrid"]:
        checks.ok("linear attention", "the target has none")
    elif facts["packages"].get("fla"):
        checks.ok("linear attention", "flash-linear-attention is installed")
    else:
        found = "the target has such layers, and without flash-linear-attention they are slow"
        fix = f"{facts['python']} -m pip install flash-linear-attention"
        checks.warn("linear attention", found, fix)


def _devices(checks: Checks, facts: Json) -> None:
    names = {one["name"] for one in facts["devices"]}
    lost = [name for name in ("nvidiactl", "nvidia-uvm") if name not in names]
    closed = [one["name"] for one in facts["devices"] if not one["usable"]]
    if not any(re.fullmatch(r"nvidia\d+", name) for name in names):
        lost.append("nvidia0")
    fix = "pass them in: dev0: /dev/nvidia0 ... in the container's configuration, then restart it"
    if lost:
        checks.fail("device nodes", f"missing: /dev/{', /dev/'.join(lost)}", fix)
    elif closed:
        checks.fail("device nodes", f"may not be opened: {', '.join(closed)}", fix)
    else:
        checks.ok("device nodes", ", ".join(sorted(names)))


def library_version(file: str | None) -> str | None:
    """Return the version in the name of libcuda's file, such as libcuda.so.550.54.14."""
    found = re.search(r"libcuda\.so\.(\d+\.\d+(\.\d+)?)$", file or "")
    return found[1] if found else None


def _library(checks: Checks, facts: Json) -> None:
    kernel, library = driver_version(facts["driver"]), library_version(facts["cuda"].get("file"))
    if kernel is None or library is None:
        checks.skip("driver version", f"module {kernel or '?'}, libcuda {library or '?'}")
    elif kernel != library:
        found = f"the node's module is {kernel}, libcuda in the container {library}"
        fix = f"install the driver's libraries {kernel} in the container, without its module"
        checks.fail("driver version", found, fix)
    else:
        checks.ok("driver version", f"{kernel}, module and libcuda")


def _cuda(checks: Checks, facts: Json) -> None:
    cuda = facts["cuda"]
    fix = "on the node: nvidia-modprobe -u -c 0, then restart the container"
    if "error" in cuda:
        checks.fail("CUDA", cuda["error"], "install the driver's libraries in the container")
    elif cuda["rc"] != 0:
        checks.fail("CUDA", f"cuInit gave {cuda['rc']}", fix)
    else:
        wrong = None if cuda["count"] > 0 else "cuInit works and finds no GPU"
        checks.judge("CUDA", f"cuInit works, {cuda['count']} GPUs", wrong, fix)


def _shm(checks: Checks, facts: Json, container: Container) -> None:
    shown = facts["shm_mount"] or "not a mount of its own"
    size = facts["shm_bytes"]
    where = f"/etc/pve/lxc/{container.vmid}.conf" if container.vmid else "/etc/fstab"
    line = "lxc.mount.entry: tmpfs dev/shm tmpfs rw,nosuid,nodev,create=dir,size=16g 0 0"
    if container.vmid is None:
        line = "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=16g 0 0"
    fix = f"put `{line}` into {where}, then restart"
    if size is None:
        checks.fail(_SHM, "there is none", fix)
    elif size < SMALL_SHM_BYTES:
        checks.warn(_SHM, f"{size / _MIB:.0f} MiB ({shown}): bus errors come of that", fix)
    else:
        checks.ok(_SHM, f"{size / _GIB:.1f} GiB ({shown})")


def _memlock(checks: Checks, facts: Json, container: Container) -> None:
    limit = facts["memlock_bytes"]
    if limit is None:
        checks.ok("memlock", "unlimited, as a launch gets it")
    elif limit < SMALL_MEMLOCK_BYTES:
        fix = "raise it: ulimit -l unlimited (limits.conf)"
        if container.vmid is not None:
            line = "lxc.prlimit.memlock: unlimited"
            fix = f"put `{line}` into /etc/pve/lxc/{container.vmid}.conf, then restart"
        found = f"{limit // 1024} KiB, as a launch gets it: pinned memory can fail"
        checks.warn("memlock", found, fix)
    else:
        checks.ok("memlock", f"{limit / _MIB:.0f} MiB, as a launch gets it")


def _workspace(checks: Checks, facts: Json, container: Container) -> None:
    _owner(checks, facts, container)
    for name, path, room in (
        ("disk", container.workspace, facts["workspace"]),
        ("disk of logs", container.log_dir, facts["log_dir"]),
    ):
        if room is None:
            continue
        found = f"{room['free_bytes'] / _GIB:.1f} GiB free for {path}"
        if room["inodes"]:
            found += f", {room['free_inodes']} inodes"
        fix = f"dflashctl runs gc --keep 1 -l {checks.place}"
        if room["free_bytes"] < _MIB or (room["inodes"] and room["free_inodes"] < 10):
            checks.fail(name, found, fix)
        elif room["free_bytes"] < SMALL_DISK_BYTES or (
            room["inodes"] and room["free_inodes"] < FEW_INODES
        ):
            checks.warn(name, found, fix)
        else:
            checks.ok(name, found)


def _owner(checks: Checks, facts: Json, container: Container) -> None:
    room, uid = facts["workspace"], facts["uid"]
    mapped = " ".join((facts["uid_map"] or "").split())
    name, path = "workspace", container.workspace
    if room["uid"] == _OVERFLOW_UID and uid != _OVERFLOW_UID:
        found = f"{room['at']} belongs to nobody here: its owner is not in the uid map ({mapped})"
        first = (facts["uid_map"] or "0 0").split()
        fix = f"on the node: chown -R {first[1]}:{first[1]} the directory behind {room['at']}"
        checks.fail(name, found, fix)
    elif not room["writable"]:
        found = f"{room['at']} may not be written by uid {uid} (it belongs to {room['uid']})"
        checks.fail(name, found, f"chown {uid} {room['at']}   (or remount it read-write)")
    elif not room["exists"]:
        fix = f"dflashctl doctor -l {checks.place} --fix   (or, there: mkdir -p {path})"
        checks.warn(name, f"{path} is not there yet", fix, ("mkdir", "-p", "--", path))
    else:
        checks.ok(name, f"{path} of uid {room['uid']}, uid map {mapped}")


def _clock(checks: Checks, skew_s: float) -> None:
    if abs(skew_s) > SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        found = f"{abs(skew_s):.0f} s {ahead} the laptop"
        checks.warn("clock", found, "on the node: chronyc makestep   (and look at the laptop's)")
    else:
        checks.ok("clock", f"within {SKEW_S:g} s of the laptop")
