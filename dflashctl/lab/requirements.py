"""What this machine lacks for a lab."""

import os
import shutil
from pathlib import Path

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# program -> Debian package
_PROGRAMS = {
    "lxc-start": "lxc",
    "lxc-attach": "lxc",
    "lxc-stop": "lxc",
    "lxc-info": "lxc",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "setpriv": "util-linux",
    "python3": "python3",
    "tmux": "tmux",
    "tar": "tar",
}


def missing_requirements() -> list[str]:
    """Why a lab cannot run here, one sentence each with its cure; empty when it can."""
    missing = [] if os.geteuid() == 0 else ["not root: use sudo"]
    for program, package in _PROGRAMS.items():
        # The lab's hosts use the system's own programs, not those of a virtual environment.
        if not shutil.which(program, path=SEARCH_PATH):
            missing.append(f"{program} is missing: apt-get install {package}")
    if "overlay" not in Path("/proc/filesystems").read_text(encoding="ascii"):
        missing.append("the kernel has no overlay file system: modprobe overlay")
    return missing
