"""One container: the configuration that Proxmox shows, the one LXC runs, and its own layer.

As on a real node, the cgroup of a container's processes ends in /lxc/VMID/ns, so that a process
seen on the host can be mapped to its container through /proc/PID/cgroup.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashctl.lab.interpreter import outermost
from dflashctl.lab.layer import add_file, hide, is_hidden, mount_points
from dflashctl.lab.spec import SiteSpec

# Where a host keeps what belongs to the lab. In a container the same path is HOST's "shared".
LAB = "/var/lib/pve-lab"
# The host's /proc inside a container: the real driver knows all processes, the stand-in has this.
HOST_PROC = "var/lib/pve-lab-proc"

_INIT = """#!/bin/sh
trap 'exit 0' PWR INT TERM
while :; do sleep 3600 & wait $!; done
"""


# A stop while lxc-attach enters leaves empty cgroups behind, and LXC starts in none that exists.
_FORGET = "find /sys/fs/cgroup -depth -type d \\( {} \\) -exec rmdir {{}} + 2>/dev/null; true"


@dataclass(frozen=True)
class Bind:
    """A path of this machine, where a container sees it, and whether it may write there."""

    source: str
    target: str
    writable: bool


class Container:
    """A container of one host of a site."""

    def __init__(self, site: SiteSpec, host: str, vmid: int, cgroup: str) -> None:
        self.host = host
        self.vmid = vmid
        self.spec = site.hosts[host].containers[vmid]
        self.hostname = self.spec.hostname or f"train{vmid}"
        self.root = f"{LAB}/disk/ct/{vmid}"
        self.devices = [*(f"nvidia{i}" for i in range(site.hosts[host].gpus))]
        self.devices += ["nvidiactl", "nvidia-uvm"]
        self._cgroup = f"{cgroup}/{host}"
        self.binds = self._binds(site.exposed(host, vmid))

    def place(self, number: int) -> str:
        """Where the host keeps bind `number`, before the container starts."""
        return f"{LAB}/binds/{self.vmid}/{number}"

    def pve_config(self) -> str:
        """/etc/pve/lxc/VMID.conf, keys in the order Proxmox writes them."""
        mounts = {
            f"mp{number}": f"{mount.source},mp={path},ro={0 if mount.writable else 1}"
            for number, (path, mount) in enumerate(self.spec.mount_points().items(), 1)
        }
        values = {
            "arch": "amd64",
            "cores": self.spec.cores,
            "features": "nesting=1",
            "hostname": self.hostname,
            "memory": self.spec.memory,
            "mp0": f"local-zfs:subvol-{self.vmid}-disk-1,mp=/workspace,size=500G",
            **mounts,
            "net0": "name=eth0,bridge=vmbr0,"
            f"hwaddr=BC:24:11:00:00:{self.vmid % 100:02X},ip=dhcp,type=veth",
            "onboot": int(self.spec.onboot),
            "ostype": "debian",
            "rootfs": f"local-zfs:subvol-{self.vmid}-disk-0,size=64G",
            "swap": 0,
        }
        lines = [f"{key}: {value}" for key, value in values.items()]
        lines += [f"lxc.cgroup2.devices.allow: c {major}:* rwm" for major in (195, 510)]
        lines += [f"lxc.mount.entry: /dev/{d} {_device_entry(d)}" for d in self.devices]
        return "\n".join(lines) + "\n"

    def lxc_config(self) -> str:
        """What lxc-start reads."""
        cgroup = f"{self._cgroup}/lxc/{self.vmid}"
        monitor = f"{self._cgroup}/lxc.monitor/{self.vmid}"
        left = (f'-path "*/{top}{below}"' for top in (cgroup, monitor) for below in ("", "/*"))
        entries = [
            "shm dev/shm tmpfs rw,nosuid,nodev,create=dir",
            f"{self.root}/workspace workspace none bind,create=dir",
            f"{LAB}/shared {LAB[1:]} none bind,ro,create=dir",
            f"/proc {HOST_PROC} none bind,ro,create=dir",
            *(f"/dev/{d} {_device_entry(d)}" for d in self.devices),
            *(self._bind_entry(i, b) for i, b in enumerate(self.binds)),
        ]
        values = [
            f"lxc.rootfs.path = overlay:{LAB}/base:{self.root}/up",
            f"lxc.uts.name = {self.hostname}",
            "lxc.init.cmd = /sbin_init",
            "lxc.signal.halt = SIGTERM",
            "lxc.net.0.type = empty",
            "lxc.net.0.flags = up",
            f"lxc.cgroup.dir.container = {cgroup}",
            "lxc.cgroup.dir.container.inner = ns",
            f"lxc.cgroup.dir.monitor = {monitor}",
            f"lxc.cgroup.dir.monitor.pivot = {self._cgroup}/pivot",
            f"lxc.hook.pre-start = sh -c '{_FORGET.format(' -o '.join(left))}'",
            "lxc.apparmor.profile = unconfined",
            "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed",
            "lxc.tty.max = 2",
            "lxc.pty.max = 256",
            "lxc.environment = TERM=linux",
            *(f"lxc.mount.entry = {entry} 0 0" for entry in entries),
        ]
        return "\n".join(values) + "\n"

    def write(self, host_layer: Path, disk: Path, nvidia_smi: str) -> None:
        """Write its configurations into the host's layer and its own layer below `disk`."""
        pve = host_layer / f"etc/pve/nodes/{self.host}/lxc/{self.vmid}.conf"
        add_file(pve, self.pve_config(), 0o640)
        add_file(host_layer / f"var/lib/lxc/{self.host}/{self.vmid}/config", self.lxc_config())
        layer = disk / f"ct/{self.vmid}/up"
        hide(layer)
        (layer / "run/lock").mkdir()
        add_file(layer / "etc/hostname", self.hostname + "\n")
        add_file(layer / "etc/hosts", f"127.0.0.1 localhost {self.hostname}\n")
        add_file(layer / "etc/motd", "")
        add_file(layer / "usr/bin/nvidia-smi", nvidia_smi, 0o755)
        add_file(layer / "sbin_init", _INIT, 0o755)

    def _binds(self, exposed: Sequence[str]) -> list[Bind]:
        """What is mounted into it, in order. What its root shows anyway is left out."""
        mounted = mount_points()
        hidden = [path for path in outermost(exposed) if is_hidden(path, mounted)]
        mounts = self.spec.mount_points().items()
        return [
            *(Bind(path, path, writable=False) for path in hidden),
            *(Bind(mount.source, path, mount.writable) for path, mount in mounts),
        ]

    def _bind_entry(self, number: int, bind: Bind) -> str:
        kind = "dir" if Path(bind.source).is_dir() else "file"
        options = f"bind,{'rw' if bind.writable else 'ro'},create={kind}"
        # Fields are those of fstab(5): a blank in a path is written in octal.
        target = re.sub(r"[\s\\]", lambda found: f"\\{ord(found[0]):03o}", bind.target[1:])
        return f"{self.place(number)} {target} none {options}"


def _device_entry(device: str) -> str:
    return f"dev/{device} none bind,optional,create=file"
