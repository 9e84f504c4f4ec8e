"""A host of the lab: this runs as pid 1 of the host's namespaces, started by the supervisor.

It builds the host's root file system, moves into it, starts the containers, and then keeps sshd
alive and reaps orphans until it is killed.
Run (by the supervisor only): python -m dflashctl.lab.host STATE_DIR HOST
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from dflashctl.lab.container import LAB, Container
from dflashctl.lab.kernel import MS_BIND, MS_RDONLY, MS_REMOUNT, bind, mount, pivot_into
from dflashctl.lab.layer import add_file, hide
from dflashctl.lab.spec import HostSpec
from dflashctl.lab.state import SiteState

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
_SSHD_CONFIG = f"""Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
PrintMotd no
UseDNS no
X11Forwarding no
AcceptEnv LANG LC_*
Banner {LAB}/shared/banner
Subsystem sftp /usr/lib/openssh/sftp-server
"""
# A login that is not root, for those who reach pct through sudo.
_OPS = {
    "passwd": ("ops:x:1999:1999::/home/ops:/bin/bash\n", 0o644),
    "group": ("ops:x:1999:\n", 0o644),
    "shadow": ("ops:*:19000::::::\n", 0o640),
}
_HERE = Path(__file__).resolve().parent


class Host:
    """What is needed to build one host; `top` is the tmpfs that holds all its changes."""

    def __init__(self, site: SiteState, name: str) -> None:
        self.name = name
        self.spec: HostSpec = site.spec.hosts[name]
        self.base = site.spec.base
        self.state = site.state
        self.directory = site.state / name
        self.containers = [
            Container(site.spec, name, vmid, site.cgroup) for vmid in self.spec.containers
        ]
        self.top = self.directory / "mnt"
        self.layer = self.top / "up"
        self.root = self.top / "root"

    def build(self) -> None:
        """Make this process's root the host's: everything but what runs in it."""
        mount("pve-lab", self.top, "tmpfs", 0, "mode=755,size=4g")
        for name in ("up", "wk", "root"):
            (self.top / name).mkdir()
        hide(self.layer)
        self._write_system()
        self._write_ops()
        self._write_stand_ins()
        for name in ("base", "disk", "shared", "binds"):
            (self.layer / LAB[1:] / name).mkdir(parents=True)
        # Relative paths: a comma or colon in the state directory's name would end an option.
        os.chdir(self.top)
        options = "lowerdir=/,upperdir=up,workdir=wk"
        mount("overlay", self.root, "overlay", 0, options)
        self._mount_lab()
        self._mount_kernel()
        self._make_devices()
        pivot_into(self.root)

    def _write_system(self) -> None:
        etc = self.layer / "etc"
        (etc / f"pve/nodes/{self.name}/lxc").mkdir(parents=True)
        add_file(etc / "hostname", self.name + "\n")
        hosts = f"127.0.0.1 localhost\n{self.spec.ip} {self.name}.lab {self.name}\n"
        add_file(etc / "hosts", hosts)
        add_file(etc / "motd", f"Linux {self.name} (pve-lab)\n")
        add_file(etc / "default/locale", "LANG=C.UTF-8\n")
        key = (self.state / "key.pub").read_text(encoding="ascii")
        add_file(self.layer / "root/.ssh/authorized_keys", key, 0o600)
        (self.layer / "root/.ssh").chmod(0o700)
        noise = f"{LAB}/shared/noise"
        add_file(self.layer / "root/.bashrc", f"[ -f {noise} ] && cat {noise}\n")
        for suffix in ("", ".pub"):
            target = etc / f"ssh/ssh_host_ed25519_key{suffix}"
            shutil.copy2(self.directory / f"host_key{suffix}", target)
        add_file(etc / "ssh/sshd_config", _SSHD_CONFIG)
        session = Path("/etc/pam.d/common-session")
        if session.exists():  # pam_cgfs and pam_systemd leave cgroups behind, outside the lab's own
            lines = session.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [s for s in lines if "pam_cgfs" not in s and "pam_systemd" not in s]
            add_file(etc / "pam.d/common-session", "".join(kept))

    def _write_ops(self) -> None:
        if not shutil.which("sudo"):
            return
        for name, (line, mode) in _OPS.items():
            text = Path("/etc", name).read_text(encoding="utf-8")
            add_file(self.layer / "etc" / name, text + line, mode)
        rule = "ops ALL=(root) NOPASSWD: /usr/sbin/pct\n"
        add_file(self.layer / "etc/sudoers.d/ops", rule, 0o440)
        key = (self.state / "key.pub").read_text(encoding="ascii")
        add_file(self.layer / "home/ops/.ssh/authorized_keys", key)

    def _write_stand_ins(self) -> None:
        add_file(self.layer / "usr/sbin/pct", stand_in("pct"), 0o755)
        nvidia_smi = stand_in("nvidia_smi")
        add_file(self.layer / "usr/bin/nvidia-smi", nvidia_smi, 0o755)
        for container in self.containers:
            container.write(self.layer, self.top, nvidia_smi)

    def _mount_lab(self) -> None:
        lab = self.root / LAB[1:]
        _bind_read_only(Path(self.base), lab / "base")
        bind(self.top, lab / "disk")
        bind(self.directory / "shared", lab / "shared")
        for container in self.containers:
            for i, wanted in enumerate(container.binds):
                source, place = Path(wanted.source), self.root / container.place(i)[1:]
                place.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    place.mkdir()
                else:
                    place.touch()
                if wanted.writable:
                    bind(source, place)
                else:
                    _bind_read_only(source, place)

    def _mount_kernel(self) -> None:
        mount("proc", self.root / "proc", "proc")
        mount("sysfs", self.root / "sys", "sysfs")
        bind(Path("/sys/fs/cgroup"), self.root / "sys/fs/cgroup", recursive=True)

    def _make_devices(self) -> None:
        dev = self.root / "dev"
        mount("dev", dev, "tmpfs", 0, "mode=755")
        nodes = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8)}
        nodes |= {"urandom": (1, 9), "tty": (5, 0)}
        nodes |= {f"nvidia{i}": (195, i) for i in range(self.spec.gpus)}
        nodes |= {"nvidiactl": (195, 255), "nvidia-uvm": (510, 0)}
        for name, (major, minor) in nodes.items():
            os.mknod(dev / name, 0o20666, os.makedev(major, minor))
            (dev / name).chmod(0o666)
        for name in ("pts", "shm"):
            (dev / name).mkdir()
        options = "newinstance,gid=5,mode=620,ptmxmode=666"
        mount("devpts", dev / "pts", "devpts", 0, options)
        mount("shm", dev / "shm", "tmpfs")
        (dev / "ptmx").symlink_to("pts/ptmx")
        (dev / "fd").symlink_to("/proc/self/fd")
        for i, name in enumerate(("stdin", "stdout", "stderr")):
            (dev / name).symlink_to(f"/proc/self/fd/{i}")

    def boot(self) -> None:
        """Inside the new root: directories, network, containers that start by themselves."""
        Path("/etc/pve/lxc").symlink_to(f"nodes/{self.name}/lxc")
        for name in ("/run/sshd", "/run/lock", "/run/user", "/var/log"):
            Path(name).mkdir(parents=True, exist_ok=True)
        if not Path("/var/lock").is_symlink():
            Path("/var/lock").mkdir(parents=True, exist_ok=True)
        socket.sethostname(self.name)
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for container in self.containers:
            workspace = Path(container.root, "workspace")
            workspace.mkdir(parents=True)
            mount("workspace", workspace, "tmpfs", 0, f"size={container.spec.workspace}")
            if container.spec.onboot:
                subprocess.run(["pct", "start", str(container.vmid)], check=True)

    def serve(self) -> None:
        """Keep a listening sshd, also after it was killed, and reap orphans. Never returns."""
        sshd: subprocess.Popen[bytes] | None = None
        while True:
            if sshd is None:
                with Path("/var/log/sshd.log").open("ab") as log:
                    sshd = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e"], stderr=log)
                Path(LAB, "shared/ready").touch()
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                pid = sshd.pid
            if pid == sshd.pid:
                sshd.returncode = 0  # reaped above; Popen must not wait for it again
                sshd = None
                time.sleep(0.3)


def stand_in(name: str) -> str:
    """The text of a stand-in program, which is copied because its module is hidden in there."""
    return (_HERE / f"{name}.py").read_text(encoding="utf-8")


def _bind_read_only(source: Path, target: Path) -> None:
    bind(source, target)
    mount("none", target, "none", MS_BIND | MS_REMOUNT | MS_RDONLY)


def main() -> None:
    """Entry point of the process that the supervisor starts in new namespaces."""
    host = Host(SiteState(Path(sys.argv[1])), sys.argv[2])
    host.build()
    host.boot()
    host.serve()


if __name__ == "__main__":
    main()
