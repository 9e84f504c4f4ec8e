"""A real sshd on loopback with a key, a port and a configuration of its own, and ways to it."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflashctl.inventory import Host
from dflashctl.transport.base import Transport
from dflashctl.transport.fabric_ssh import FabricTransport
from dflashctl.transport.local import LocalTransport
from dflashctl.transport.openssh import OpensshTransport


class SshServer:
    """One sshd for the current user; its known_hosts names it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = ""  # more lines of sshd_config
        self.port = _free_port()
        self.user_key = directory / "user_key"
        self.host_key = directory / "host_key"
        self.known_hosts = directory / "known_hosts"
        self._process: subprocess.Popen[bytes] | None = None
        write_key(self.user_key)
        write_key(self.host_key)
        self.trust()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def name(self) -> str:
        """As known_hosts names it."""
        return f"[127.0.0.1]:{self.port}"

    def trust(self) -> None:
        """Write known_hosts with the present host key."""
        kind, blob = self.host_key.with_suffix(".pub").read_text().split()[:2]
        self.known_hosts.write_text(f"{self.name} {kind} {blob}\n")

    def host(self, **settings: object) -> Host:
        """This server as hosts.yaml would tell it."""
        empty = self.directory / "ssh_config"
        empty.touch()
        values: dict[str, object] = {
            "name": "near",
            "address": f"{getpass.getuser()}@127.0.0.1",
            "port": self.port,
            "identity_file": str(self.user_key),
            "known_hosts": str(self.known_hosts),
            "ssh_config": str(empty),
            "connect_timeout_s": 20.0,
        }
        return Host(**(values | settings))  # type: ignore[arg-type]

    def start(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd as root refuses to start without it
        config = self.directory / "sshd_config"
        config.write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {self.host_key}\nPidFile none\n"
            f"AuthorizedKeysFile {self.user_key}.pub\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n{self.settings}"
        )
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        self._process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)])
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1) as link,
            ):
                if link.recv(4) == b"SSH-":
                    return
            time.sleep(0.02)
        raise AssertionError("sshd does not answer")

    def children(self) -> list[int]:
        """Processes of sshd that each serve one connection."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in listed.stdout.split()]

    def kill_connections(self, how: signal.Signals) -> None:
        """Send ``how`` to every process that serves a connection, those below included."""
        for pid in self.children():
            below = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(pid)],
                capture_output=True,
                text=True,
                check=False,
            )
            for each in [pid, *map(int, below.stdout.split())]:
                name = Path(f"/proc/{each}/comm")
                with contextlib.suppress(OSError):
                    if name.read_text().startswith("sshd"):
                        os.kill(each, how)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None


def require_no_new_thread(before: set[threading.Thread], seconds: float = 60.0) -> None:
    """Fail when a thread that is not of ``before`` goes on; a cancelled timer takes a moment."""
    limit = time.monotonic() + seconds
    while new := set(threading.enumerate()) - before:
        assert time.monotonic() < limit, f"left behind: {new}"
        time.sleep(0.02)


def write_key(path: Path) -> None:
    for file in (path, path.with_suffix(".pub")):
        file.unlink(missing_ok=True)
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(argv, check=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[Path]:
    """Control sockets of OpenSSH go to a short private path, unlike tmp_path."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="run-") as name:
        patch.setenv("XDG_RUNTIME_DIR", name)
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        yield Path(name)


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """One server for all tests that leave it as it is."""
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SshServer]:
    """A server for a test that changes it."""
    server = SshServer(tmp_path)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def opened(transport: Transport) -> Iterator[Transport]:
    """Open ``transport``, and leave no connection or master process behind."""
    try:
        transport.open()
        yield transport
    finally:
        transport.close()
        if isinstance(transport, OpensshTransport):
            transport.end_master()


@pytest.fixture(scope="session", params=["local", "openssh", "fabric"])
def way(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Each way to a place in turn, opened."""
    if request.param == "local":
        transport: Transport = LocalTransport("near")
    else:
        kind = OpensshTransport if request.param == "openssh" else FabricTransport
        transport = kind(request.getfixturevalue("ssh_server").host())
    with opened(transport) as ready:
        yield ready


@pytest.fixture
def open_way() -> Iterator[Callable[[Transport], Transport]]:
    """Opens a transport and leaves nothing of it behind after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda transport: stack.enter_context(opened(transport))


@pytest.fixture
def make_key() -> Callable[[Path], None]:
    """Makes a key pair at a path."""
    return write_key


@pytest.fixture(params=[OpensshTransport, FabricTransport], ids=["openssh", "fabric"])
def ssh_kind(request: pytest.FixtureRequest) -> type[OpensshTransport] | type[FabricTransport]:
    """Both ways over SSH, as classes."""
    kind: type[OpensshTransport] | type[FabricTransport] = request.param
    return kind
