"""What the lab's own tests share: ssh as a user types it."""

import subprocess
from collections.abc import Callable

import pytest

from dflashctl.lab.site import Lab

Ssh = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def ssh(lab_site: Lab) -> Ssh:
    """ssh(host, command, *options, stdin=b"", timeout=60): the ssh program, bytes captured."""

    def run(
        host: str, command: str, *options: str, stdin: bytes = b"", timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        argv = ["ssh", "-F", str(lab_site.ssh_config), *options, host, command]
        return subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)

    return run
