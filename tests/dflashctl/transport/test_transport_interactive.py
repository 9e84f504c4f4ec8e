"""`attach` and its like: a command on the user's own terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from dflashctl.errors import UsageError
from dflashctl.transport.local import LocalTransport

if TYPE_CHECKING:
    from conftest import SshServer

PROGRAM = """
import sys
from pathlib import Path
from dflashctl.inventory import load_inventory
from dflashctl.transport import connect
way = connect(load_inventory(Path(sys.argv[1])).one([]))
status = way.interactive(["bash", "-c", "test -t 0 && test -t 1 && read x && echo got:$x; exit 7"])
getattr(way, "end_master", way.close)()
sys.exit(status)
"""


@pytest.mark.parametrize("backend", ["fabric", "openssh", "local"])
def test_command_has_the_terminal_and_its_status_comes_back(
    ssh_server: "SshServer", backend: str
) -> None:
    host = ssh_server.host()
    file = ssh_server.directory / f"{backend}.yaml"
    file.write_text(
        f"version: 1\nhosts:\n  near:\n    address: {host.address}\n    port: {host.port}\n"
        f"    backend: {backend}\n    identity_file: {host.identity_file}\n"
        f"    known_hosts: {host.known_hosts}\n    ssh_config: {host.ssh_config}\n"
        "    containers: {self: {}}\n"
    )
    master, slave = pty.openpty()
    argv = [sys.executable, "-c", PROGRAM, str(file)]
    with subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave) as child:
        os.close(slave)
        os.write(master, b"hello\n")
        shown = read_until(master, b"got:hello")
        assert child.wait(100) == 7, shown
    os.close(master)


def read_until(master: int, wanted: bytes) -> bytes:
    shown, end = b"", time.monotonic() + 100
    while wanted not in shown and time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            try:
                shown += os.read(master, 4096)
            except OSError:
                break
    assert wanted in shown, shown
    return shown


def test_program_that_is_missing_is_no_traceback() -> None:
    with pytest.raises(UsageError, match="no-such-program is not installed"):
        LocalTransport("near").interactive(["no-such-program"])


ENDS = """
import sys
from pathlib import Path
from dflashctl.errors import DflashctlError
from dflashctl.inventory import load_inventory
from dflashctl.transport.openssh import ssh_interactive
host = load_inventory(Path(sys.argv[1])).one([]).host
try:
    status = ssh_interactive(host, ["bash", "-c", sys.argv[2]], accept_new=False)
except DflashctlError as error:
    print(f"{error.code} {error.exit_code:d}")
else:
    print("status", status)
"""


@pytest.mark.parametrize(
    ("script", "kill", "said"),
    [
        ("exit 255", False, "status 255"),  # F08
        ("echo up; sleep 60", True, "state-unknown 8"),
    ],
)
def test_255_of_a_command_on_the_terminal_is_told_from_that_of_the_link(
    own_server: "SshServer", script: str, kill: bool, said: str
) -> None:
    host = own_server.host()
    file = own_server.directory / "hosts.yaml"
    file.write_text(
        f"version: 1\nhosts:\n  near:\n    address: {host.address}\n    port: {host.port}\n"
        f"    backend: openssh\n    identity_file: {host.identity_file}\n"
        f"    known_hosts: {host.known_hosts}\n    ssh_config: {host.ssh_config}\n"
        "    containers: {self: {}}\n"
    )
    master, slave = pty.openpty()
    argv = [sys.executable, "-c", ENDS, str(file), script]
    with subprocess.Popen(argv, stdin=slave, stdout=subprocess.PIPE, stderr=slave) as child:
        assert child.stdout is not None
        if kill:
            assert child.stdout.readline().strip() == b"up"
            own_server.kill_connections(signal.SIGKILL)
        shown = child.stdout.read()
        child.wait(100)
    os.close(slave)
    os.close(master)
    assert shown.decode().strip() == said
