"""What can go wrong on a host of the lab, by name: how to switch it on and off."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import LabError
from dflashctl.lab.container import LAB
from dflashctl.lab.forwarder import TICK_S
from dflashctl.lab.gpu_state import set_gpu_state
from dflashctl.lab.state import SiteState, read_json, wait_for_sshd, write_json
from dflashctl.lab.supervisor import set_link

Apply = Callable[[SiteState, str, str], None]
Clear = Callable[[SiteState, str], None]


@dataclass(frozen=True)
class Fault:
    """A fault: `value` shows what it takes, `pattern` is what it accepts."""

    value: str
    pattern: str
    help: str
    apply: Apply
    clear: Clear


def set_fault(site: SiteState, host: str, name: str, value: str) -> None:
    """Switch a fault on; the value "off" switches it off, the name "none" all of the host's.

    Raises: LabError for an unknown host, fault, value or container.
    """
    site.pid_of(host)
    if name == "none":
        _clear_all(site, host)
    elif value == "off":
        _find(name).clear(site, host)
        _record(site, host, {k: v for k, v in active_faults(site, host).items() if k != name})
        _settle(site, host, {name})
    else:
        fault = _find(name)
        if not re.fullmatch(fault.pattern, value, re.DOTALL):
            raise LabError(
                f"{name}: found {value!r}, expected {fault.value}: {fault.help}", place=host
            )
        _apply(site, host, name, value)


def _apply(site: SiteState, host: str, name: str, value: str) -> None:
    before = active_faults(site, host)
    # Recorded first: whatever ends this process, "none" knows what to undo.
    _record(site, host, {**before, name: value})
    try:
        FAULTS[name].apply(site, host, value)
    except LabError:
        _record(site, host, before)
        raise
    if name == "net":
        _settle(site, host, {name})


def _clear_all(site: SiteState, host: str) -> None:
    active = active_faults(site, host)
    for name in active:
        FAULTS[name].clear(site, host)
    _clear_gpu(site, host)  # tests write gpu.json directly, too
    _record(site, host, {})
    _settle(site, host, set(active))


def _settle(site: SiteState, host: str, changed: set[str]) -> None:
    """Return when those who look at faults.json now and then have seen the change."""
    if "net" in changed:
        time.sleep(2 * TICK_S)
    if "sshd_kill" in changed:
        wait_for_sshd(host, site.ports[host])


def _record(site: SiteState, host: str, active: dict[str, str]) -> None:
    write_json(site.shared(host) / "faults.json", active)


def active_faults(site: SiteState, host: str) -> dict[str, str]:
    """Faults of a host that are on, by name, with their values."""
    return {str(k): str(v) for k, v in read_json(site.shared(host) / "faults.json").items()}


def describe_faults() -> str:
    """One line a fault, for help texts."""
    rows = [(f"{name} {fault.value}", fault.help) for name, fault in FAULTS.items()]
    rows += [("NAME off", "this fault off"), ("none", "all of the host's faults off")]
    return "\n".join(f"{left:<28}{right}" for left, right in rows)


def _find(name: str) -> Fault:
    if name not in FAULTS:
        raise LabError(
            f"unknown fault {name!r}; known are none, {', '.join(FAULTS)}",
            hint="dflashctl lab fault",
        )
    return FAULTS[name]


def _remember(_site: SiteState, _host: str, _value: str) -> None:
    """Nothing to do: pct or the forwarder reads faults.json."""


def _forget(_site: SiteState, _host: str) -> None:
    """Nothing to undo but the entry in faults.json."""


def _put_text(name: str) -> tuple[Apply, Clear]:
    def apply(site: SiteState, host: str, value: str) -> None:
        (site.shared(host) / name).write_text(value + "\n", encoding="utf-8")

    def clear(site: SiteState, host: str) -> None:
        (site.shared(host) / name).unlink(missing_ok=True)

    return apply, clear


def _set_net(site: SiteState, host: str, value: str) -> None:
    set_link(site, host, up=value == "ok")


def _clear_net(site: SiteState, host: str) -> None:
    set_link(site, host, up=True)


def _kill_sshd(site: SiteState, host: str, _value: str) -> None:
    """SIGKILL every sshd in the host's own pid namespace; those of containers have another one."""
    namespace = Path(f"/proc/{site.pid_of(host)}/ns/pid").readlink()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                is_sshd = (process / "comm").read_text(encoding="utf-8").startswith("sshd")
                if is_sshd and (process / "ns/pid").readlink() == namespace:
                    os.kill(int(process.name), signal.SIGKILL)


def _clear_gpu(site: SiteState, host: str) -> None:
    set_gpu_state(site, host, "ok")


# Shrinking comes first so that a workspace of many GiB is full at no cost in memory. The margin is
# for what is written meanwhile: a tmpfs cannot be made smaller than what is in it.
_FILL = """
for margin in 1024 8192 65536; do
    used=$(df -Pk "$0" | awk 'END {print $3}')
    mount -o "remount,size=$((used + margin))k" "$0" && break
done
cat /dev/zero > "$0/.fill" 2>/dev/null
test "$(df -Pk "$0" | awk 'END {print $4}')" = 0
"""


def _fill_disk(site: SiteState, host: str, value: str) -> None:
    site.check_container(host, int(value))
    _run(site, host, ["sh", "-c", _FILL, f"{LAB}/disk/ct/{int(value)}/workspace"])


def _clear_disk(site: SiteState, host: str) -> None:
    for vmid, container in site.spec.hosts[host].containers.items():
        workspace = f"{LAB}/disk/ct/{vmid}/workspace"
        _run(site, host, ["rm", "-f", f"{workspace}/.fill"])
        _run(site, host, ["mount", "-o", f"remount,size={container.workspace}", workspace])


def _make_root_read_only(site: SiteState, host: str, value: str) -> None:
    # rbind: what is exposed below /root stays visible. rprivate: the umount that ends the fault
    # must not reach the exposed mounts themselves.
    script = """test -w /root || exit 0
        mount --rbind /root /root && mount --make-rprivate /root &&
        mount -o remount,ro,bind /root"""
    _run_in_container(site, host, int(value), script)


def _clear_root(site: SiteState, host: str) -> None:
    _in_running(site, host, "test -w /root || umount -l /root")


def _skew_clock(site: SiteState, host: str, value: str) -> None:
    vmid, _, seconds = value.partition(":")
    script = f"""library=$(ls /usr/lib/*/faketime/libfaketime.so.1) || exit 1
        echo '{int(seconds):+d}' > /etc/faketimerc; echo "$library" > /etc/ld.so.preload"""
    try:
        _run_in_container(site, host, int(vmid), script)
    except LabError as error:
        raise LabError(error.message, place=host, hint="apt-get install faketime") from None


def _clear_clock(site: SiteState, host: str) -> None:
    _in_running(site, host, "rm -f /etc/ld.so.preload")
    for vmid in site.spec.hosts[host].containers:
        if not site.is_running(host, vmid):  # its layer is not mounted: it may be changed directly
            _run(site, host, ["rm", "-f", f"{LAB}/disk/ct/{vmid}/up/etc/ld.so.preload"])


def _lock(site: SiteState, host: str, value: str) -> None:
    site.check_container(host, int(value))
    path = f"/etc/pve/lxc/{int(value)}.conf"
    _run(site, host, ["sh", "-c", f"sed -i /^lock:/d {path} && echo 'lock: backup' >> {path}"])


def _clear_lock(site: SiteState, host: str) -> None:
    for vmid in site.spec.hosts[host].containers:
        _run(site, host, ["sed", "-i", "/^lock:/d", f"/etc/pve/lxc/{vmid}.conf"])


def _run(site: SiteState, host: str, argv: list[str]) -> None:
    done = site.in_host(host, argv)
    if done.returncode:
        detail = done.stderr.decode(errors="replace").strip()
        raise LabError(f"{' '.join(argv)}: exit {done.returncode}: {detail}", place=host)


def _run_in_container(site: SiteState, host: str, vmid: int, script: str) -> None:
    site.check_container(host, vmid)
    if not site.is_running(host, vmid):
        raise LabError("the container does not run", place=f"{host}/{vmid}")
    done = site.in_container(host, vmid, script)
    if done.returncode:
        detail = done.stderr.decode(errors="replace").strip()
        raise LabError(f"exit {done.returncode}: {detail}", place=f"{host}/{vmid}")


def _in_running(site: SiteState, host: str, script: str) -> None:
    for vmid in site.spec.hosts[host].containers:
        if site.is_running(host, vmid):
            site.in_container(host, vmid, script)


_VMID = r"\d{3,9}"
FAULTS: dict[str, Fault] = {
    "latency": Fault(
        "LO,HI",
        r"\d+(\.\d+)?,\d+(\.\d+)?",
        "seconds each pct call takes (0,0; a real host 0.6,1.0)",
        _remember,
        _forget,
    ),
    "locale_warning": Fault(
        "1", "1", "perl's locale warning on stderr of every pct call", _remember, _forget
    ),
    "noise": Fault(
        "TEXT",
        ".+",
        "the host's .bashrc prints TEXT on stdout of every command",
        *_put_text("noise"),
    ),
    "banner": Fault("TEXT", ".+", "sshd's Banner, which ssh shows on stderr", *_put_text("banner")),
    "net": Fault(
        "ok|stall|cut",
        "ok|stall|cut",
        "stall: no byte moves; cut: all reset and refused; both: LAN link down",
        _set_net,
        _clear_net,
    ),
    "sshd_kill": Fault(
        "1", "1", "SIGKILL to every sshd of the host; the listener comes back", _kill_sshd, _forget
    ),
    "gpu": Fault(
        "STATE",
        r"\w+(:\d+)?",
        "ok, no_driver, mismatch, no_devices, hung; lost:N, lost_rows:N, ecc:N, mig:N, busy:N",
        set_gpu_state,
        _clear_gpu,
    ),
    "disk_full": Fault("VMID", _VMID, "no byte left in /workspace", _fill_disk, _clear_disk),
    "ro_root": Fault(
        "VMID", _VMID, "/root of the container read-only", _make_root_read_only, _clear_root
    ),
    "skew": Fault(
        "VMID:SECONDS",
        _VMID + r":[+-]?\d+",
        "move the container's clock (needs libfaketime)",
        _skew_clock,
        _clear_clock,
    ),
    "lock": Fault("VMID", _VMID, "'lock: backup' in its configuration", _lock, _clear_lock),
}
