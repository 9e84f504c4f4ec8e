"""The checks of a Proxmox VE node, from the answer of ``remote/node_facts.py``."""

import re
from collections.abc import Sequence
from typing import Any

from dflashctl.diagnosis.check import Check, Checks
from dflashctl.inventory import Container, Host

_PCT = "/usr/sbin/pct"
_SUDOERS = "echo 'USER ALL=(root) NOPASSWD: /usr/sbin/pct' > /etc/sudoers.d/dflashctl"
_DAY_S = 86400.0
_LONG_UP_S = 60 * _DAY_S
# nvidia-smi hangs after some 66 days up. Source: NVIDIA/open-gpu-kernel-modules issue 971.
_HANGS_WHEN_LONG_UP = re.compile(r"Open Kernel Module.*\s570\.")

Json = dict[str, Any]


def judge_node(
    host: Host, containers: Sequence[Container], facts: Json, *, become: bool
) -> list[Check]:
    """Return the checks of a node; those about GPUs only when a container uses any."""
    checks = Checks(host.name)
    vmids = [container.vmid for container in containers if container.vmid is not None]
    if vmids:
        _pct(checks, facts, become=become)
        for vmid in vmids:
            _container(checks, vmid, facts)
    uses = {c.vmid for c in containers if any(role != "cpu" for role in (*c.target, *c.drafter))}
    if not uses:
        checks.skip("driver", "hosts.yaml gives the containers here no GPU")
        return checks.noted
    _driver(checks, facts)
    _uvm(checks, facts, [vmid for vmid in vmids if vmid in uses])
    _persistence(checks, facts)
    _kernel_log(checks, facts)
    _uptime(checks, facts)
    _shared(checks, facts)
    return checks.noted


def _pct(checks: Checks, facts: Json, *, become: bool) -> None:
    if facts["pct"] is None:
        fix = "name the container `self` in hosts.yaml, for a machine without Proxmox VE"
        checks.fail("pct", f"there is no {_PCT}: this is no Proxmox VE node", fix)
        return
    checks.ok("pct", f"{facts['pct']} on {facts['hostname']}")
    said = facts["list"]
    if said is not None and said["rc"] == 0:
        checks.ok("root", "sudo -n runs pct" if become else f"{facts['user']} runs pct")
        return
    why = " ".join(said["err"].split()) if said else "there is no sudo"
    fix = f"{_SUDOERS}   (as root; who may run pct is root there)"
    fix = fix.replace("USER", facts["user"])
    if said is None:
        fix = f"apt-get install sudo; {fix}; or log in as root (address: root@...)"
    elif not become:
        fix = f"set `become: sudo` in hosts.yaml, and: {fix}"
    checks.fail("root", f"pct does not run ({why})", fix)


def _container(checks: Checks, vmid: int, facts: Json) -> None:
    name = f"container {vmid}"
    said = facts["list"]
    if said is None or said["rc"] != 0:
        checks.skip(name, "pct list gave no answer")
        return
    rows = {words[0]: words[1:] for words in map(str.split, said["out"].splitlines()) if words}
    row = rows.get(str(vmid))
    if row is None:
        _absent(checks, vmid, facts)
    elif row[0] != "running":
        checks.fail(name, f"it is {row[0]}", f"pct start {vmid}")
    elif len(row) > 2:  # status, lock, name
        why = f"it runs and is locked ({row[1]}): exec works, push and stop do not"
        checks.warn(name, why, "wait for the end of the backup, snapshot or migration")
    else:
        checks.ok(name, "it runs, unlocked")


def _absent(checks: Checks, vmid: int, facts: Json) -> None:
    known = [*(facts["configurations"] or []), *(facts["cluster"] or [])]
    others = sorted({one["node"] for one in known if one["vmid"] == str(vmid)})
    others = [node for node in others if node != facts["hostname"]]
    if others:
        fix = f"move {vmid} in hosts.yaml to the host {others[0]}"
        checks.fail(f"container {vmid}", f"{vmid} is on {others[0]}, not here", fix)
    else:
        fix = "pct list; then correct the vmid in hosts.yaml"
        checks.fail(f"container {vmid}", "no node of the cluster has it", fix)


def driver_version(text: str | None) -> str | None:
    """Return the version that /proc/driver/nvidia/version tells."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(\.\d+)?)\s", text or "")
    return found[1] if found else None


def _driver(checks: Checks, facts: Json) -> None:
    version = driver_version(facts["driver"])
    if version:
        checks.ok("driver", f"NVIDIA {version}")
    else:
        checks.fail("driver", "the NVIDIA kernel module is not loaded", "modprobe nvidia")


def uvm_major(devices: str | None) -> int | None:
    """Return the major number of nvidia-uvm in /proc/devices."""
    found = re.search(r"^\s*(\d+) nvidia-uvm$", devices or "", re.MULTILINE)
    return int(found[1]) if found else None


def _uvm(checks: Checks, facts: Json, vmids: list[int]) -> None:
    major = uvm_major(facts["devices"])
    if major is None:
        fix = "nvidia-modprobe -u -c 0   (or: modprobe nvidia-uvm; at boot: /etc/modules)"
        checks.fail("nvidia-uvm", "the module is not loaded: CUDA cannot start", fix)
        return
    if "nvidia-uvm" not in facts["nodes"]:
        fix = "nvidia-modprobe -u -c 0"
        checks.fail("nvidia-uvm", "/dev/nvidia-uvm is missing: CUDA cannot start", fix)
        return
    wrong = []
    for vmid in vmids:
        lines = _lines(facts, vmid)
        allowed = _allowed_majors(lines)
        if allowed is not None and major not in allowed:
            wrong.append((vmid, ", ".join(map(str, sorted(allowed)))))
    for vmid, allowed_text in wrong:
        found = f"{vmid} may use the majors {allowed_text or 'none'}; nvidia-uvm has {major}"
        line = f"lxc.cgroup2.devices.allow: c {major}:* rwm"
        fix = f"put `{line}` into /etc/pve/lxc/{vmid}.conf, then: pct reboot {vmid}"
        checks.fail("nvidia-uvm", found, fix)
    if not wrong:
        checks.ok("nvidia-uvm", f"loaded, major {major}")


def _lines(facts: Json, vmid: int) -> list[str] | None:
    for one in facts["configurations"] or []:
        if one["vmid"] == str(vmid) and one["node"] == facts["hostname"]:
            return list(one["lines"])
    return None


def _allowed_majors(lines: list[str] | None) -> set[int] | None:
    """Return the majors that a configuration allows; None when it sets no limit that we know.

    Proxmox's own ``devN:`` entries follow the node's numbers, so they need no look.
    """
    text = "\n".join(lines or [])
    rules = re.findall(r"^lxc\.cgroup2?\.devices\.allow:\s*(.+)$", text, re.MULTILINE)
    if not rules or re.search(r"^dev\d+:.*nvidia-uvm", text, re.MULTILINE):
        return None
    if any(rule.split()[0] == "a" or rule.startswith("c *:") for rule in rules):
        return None
    return {int(found[1]) for rule in rules if (found := re.match(r"c (\d+):", rule))}


def _persistence(checks: Checks, facts: Json) -> None:
    said = facts["persistence"]
    if said is None or said["rc"] != 0:
        why = "there is no nvidia-smi" if said is None else said["err"] or said["out"]
        checks.skip("persistence", f"nvidia-smi did not tell ({' '.join(why.split())})")
        return
    off = [line.split(",")[0] for line in said["out"].splitlines() if "Disabled" in line]
    if off:
        found = f"off for GPU {', '.join(off)}: every nvidia-smi takes seconds"
        checks.warn("persistence", found, "nvidia-smi -pm 1   (or enable nvidia-persistenced)")
    else:
        checks.ok("persistence", "on")


def _kernel_log(checks: Checks, facts: Json) -> None:
    if facts["xid"] is None:
        checks.skip("kernel log", f"{facts['user']} may not read it (as root: dmesg | grep Xid)")
    elif facts["xid"]:
        last = facts["xid"][-1].strip()
        found = f"{len(facts['xid'])} Xid errors since boot, the last: {last}"
        checks.warn("kernel log", found, "dmesg | grep Xid; a card with Xid 79 needs a reboot")
    else:
        checks.ok("kernel log", "no Xid error since boot")


def _uptime(checks: Checks, facts: Json) -> None:
    days = facts["uptime_s"] / _DAY_S
    if facts["uptime_s"] > _LONG_UP_S and _HANGS_WHEN_LONG_UP.search(facts["driver"] or ""):
        version = driver_version(facts["driver"])
        found = f"{days:.0f} days up; nvidia-smi of driver {version} hangs after some 66"
        checks.warn("uptime", found, "reboot the node before the run, or take a newer driver")
    else:
        checks.ok("uptime", f"{days:.0f} days")


def _shared(checks: Checks, facts: Json) -> None:
    if facts["configurations"] is None:
        checks.skip("shared GPUs", f"{facts['user']} may not read the containers' configurations")
        return
    holders: dict[str, list[str]] = {}
    for one in facts["configurations"]:
        if one["node"] == facts["hostname"]:
            for card in sorted(set(re.findall(r"/?dev/nvidia(\d+)\b", "\n".join(one["lines"])))):
                holders.setdefault(card, []).append(one["vmid"])
    shared: dict[str, list[str]] = {}
    for card, vmids in holders.items():
        if len(vmids) > 1:
            shared.setdefault(", ".join(vmids), []).append(card)
    if not shared:
        checks.ok("shared GPUs", "no card is given to two containers by name")
        return
    text = "; ".join(f"GPU {', '.join(cards)} to {vmids}" for vmids, cards in shared.items())
    checks.warn("shared GPUs", f"given to several containers: {text}", "dflashctl gpus")
