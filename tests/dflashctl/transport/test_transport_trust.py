"""Host keys, logins and ssh_config: what is refused, with which exit code and which words."""

import getpass
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflashctl.errors import ConfigurationError, ExitCode, TrustError, UnreachableError, UsageError
from dflashctl.inventory import Container, Place
from dflashctl.transport import Script, Transport, connect, connect_host, run_script
from dflashctl.transport.fabric_ssh import FabricTransport
from dflashctl.transport.openssh import OpensshTransport

if TYPE_CHECKING:
    from conftest import SshServer

OpenWay = Callable[[Transport], Transport]
MakeKey = Callable[[Path], None]
ECHO = Script("echo here")


def fingerprint_of(public: Path) -> str:
    """As ssh-keygen -l prints it, the reference."""
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[1]


def test_unknown_host_key_is_refused_with_exit_code_5(
    ssh_server: "SshServer", ssh_kind: type, tmp_path: Path
) -> None:
    host = ssh_server.host(known_hosts=str(tmp_path / "none"))
    with pytest.raises(TrustError, match="host key is not known") as caught:
        ssh_kind(host).open()
    assert caught.value.exit_code == ExitCode.TRUST
    assert "--accept-new" in caught.value.hint
    assert f"-p {host.port} " in caught.value.hint
    assert not (tmp_path / "none").exists()


def test_accept_new_records_the_key_once_and_then_it_is_known(
    ssh_server: "SshServer", ssh_kind: type, open_way: OpenWay, tmp_path: Path
) -> None:
    known = tmp_path / "new" / "known_hosts"
    if ssh_kind is not FabricTransport:
        known.parent.mkdir()  # ssh itself makes only ~/.ssh
    host = ssh_server.host(known_hosts=str(known))
    run_script(open_way(ssh_kind(host, accept_new=True)), ECHO)
    assert run_script(open_way(ssh_kind(host)), ECHO).stdout == b"here\n"
    lines = known.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].split()[2] == ssh_server.host_key.with_suffix(".pub").read_text().split()[1]


def test_key_that_cannot_be_recorded_is_not_accepted(
    ssh_server: "SshServer", tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    host = ssh_server.host(known_hosts=str(tmp_path / "file" / "known_hosts"))
    with pytest.raises(TrustError, match="cannot be recorded"):
        FabricTransport(host, accept_new=True).open()


@pytest.mark.parametrize("accept_new", [False, True])
def test_changed_host_key_is_refused_showing_both_fingerprints_and_the_line(
    own_server: "SshServer", ssh_kind: type, make_key: MakeKey, *, accept_new: bool
) -> None:
    old = own_server.directory / "old"
    make_key(old)
    kind, blob = old.with_suffix(".pub").read_text().split()[:2]
    own_server.known_hosts.write_text(f"# a comment\n{own_server.name} {kind} {blob}\n")
    before = own_server.known_hosts.read_bytes()
    with pytest.raises(TrustError) as caught:
        ssh_kind(own_server.host(), accept_new=accept_new).open()
    error = caught.value
    assert (error.exit_code, error.code) == (ExitCode.TRUST, "host-key-changed")
    assert fingerprint_of(old.with_suffix(".pub")) in error.message
    assert fingerprint_of(own_server.host_key.with_suffix(".pub")) in error.message
    assert f"{own_server.known_hosts}:2" in error.message
    assert "ssh-keygen -f" in error.hint
    assert own_server.name in error.hint
    assert own_server.known_hosts.read_bytes() == before


def test_revoked_host_key_is_refused(own_server: "SshServer", ssh_kind: type) -> None:
    line = own_server.known_hosts.read_text()
    own_server.known_hosts.write_text(f"{line}@revoked {line}")
    with pytest.raises(TrustError, match="revoked"):
        ssh_kind(own_server.host()).open()


def test_second_recorded_key_of_a_host_is_accepted(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay, make_key: MakeKey
) -> None:
    other = own_server.directory / "other"
    make_key(other)
    kind, blob = other.with_suffix(".pub").read_text().split()[:2]
    right = own_server.known_hosts.read_text()
    own_server.known_hosts.write_text(f"{own_server.name} {kind} {blob}\n{right}")
    assert run_script(open_way(ssh_kind(own_server.host())), ECHO).stdout == b"here\n"


def test_hashed_known_hosts_are_understood(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    argv = ["ssh-keygen", "-q", "-H", "-f", str(own_server.known_hosts)]
    subprocess.run(argv, check=True, capture_output=True)
    assert own_server.known_hosts.read_text().startswith("|1|")
    assert run_script(open_way(ssh_kind(own_server.host())), ECHO).stdout == b"here\n"


def test_host_with_several_keys_is_asked_for_the_recorded_kind(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    second = own_server.directory / "ecdsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(second)], check=True)
    own_server.stop()
    own_server.settings = f"HostKey {second}\n"
    own_server.start()
    kind, blob = second.with_suffix(".pub").read_text().split()[:2]
    own_server.known_hosts.write_text(f"{own_server.name} {kind} {blob}\n")
    assert run_script(open_way(ssh_kind(own_server.host())), ECHO).stdout == b"here\n"


def test_wrong_key_is_exit_code_5_and_names_user_and_key(
    ssh_server: "SshServer", ssh_kind: type, make_key: MakeKey, tmp_path: Path
) -> None:
    make_key(tmp_path / "wrong")
    with pytest.raises(TrustError, match="refused the login") as caught:
        ssh_kind(ssh_server.host(identity_file=str(tmp_path / "wrong"))).open()
    assert (caught.value.exit_code, caught.value.code) == (ExitCode.TRUST, "auth")
    assert getpass.getuser() in caught.value.message
    assert "ssh-add" in caught.value.hint


def test_key_with_a_passphrase_is_told_and_never_asked_for(
    ssh_server: "SshServer", ssh_kind: type, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)]
    subprocess.run(argv, check=True)
    with pytest.raises(TrustError, match="refused the login") as caught:
        ssh_kind(ssh_server.host(identity_file=str(locked))).open()
    assert "passphrase works through the agent" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no key at all\n",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
        "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n",
        "-----BEGIN OPENSSH PRIVATE KEY-----\n%%%\n-----END OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_identity_file_that_holds_no_key_is_a_refused_login(
    ssh_server: "SshServer", ssh_kind: type, tmp_path: Path, content: str
) -> None:
    (tmp_path / "bad").write_text(content)
    (tmp_path / "bad").chmod(0o600)
    with pytest.raises(TrustError, match="refused the login"):
        ssh_kind(ssh_server.host(identity_file=str(tmp_path / "bad"))).open()


@pytest.fixture
def full_agent(tmp_path: Path, make_key: MakeKey) -> Iterator[str]:
    """The socket of an ssh-agent that holds 7 keys, none of them right."""
    with tempfile.TemporaryDirectory(prefix="agent-") as short:
        path = f"{short}/socket"
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
        try:
            for number in range(7):
                make_key(tmp_path / f"agent{number}")
                argv = ["ssh-add", "-q", str(tmp_path / f"agent{number}")]
                for _ in range(600):
                    done = subprocess.run(
                        argv,
                        env=os.environ | {"SSH_AUTH_SOCK": path},
                        capture_output=True,
                        check=False,
                    )
                    if done.returncode == 0:
                        break
                    time.sleep(0.05)
            yield path
        finally:
            agent.terminate()
            agent.wait(60)


def test_named_key_is_used_alone_however_many_the_agent_holds(
    ssh_server: "SshServer",
    ssh_kind: type,
    open_way: OpenWay,
    full_agent: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", full_agent)
    assert run_script(open_way(ssh_kind(ssh_server.host())), ECHO).stdout == b"here\n"


def test_agent_with_too_many_keys_is_named_as_the_reason(
    ssh_server: "SshServer", full_agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", full_agent)
    with pytest.raises(TrustError, match="7 keys of the agent") as caught:
        FabricTransport(ssh_server.host(identity_file=None)).open()
    assert "identity_file" in caught.value.hint


def test_missing_identity_file_is_a_configuration_error(
    ssh_server: "SshServer", ssh_kind: type, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"nokey does not exist"):
        ssh_kind(ssh_server.host(identity_file=str(tmp_path / "nokey"))).open()


def test_closed_port_is_unreachable(ssh_server: "SshServer", ssh_kind: type) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = ssh_server.host(port=free.getsockname()[1])
        with pytest.raises(UnreachableError, match="refused") as caught:
            ssh_kind(host).open()
    assert caught.value.exit_code == ExitCode.UNREACHABLE


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 70])
def test_unresolvable_name_is_unreachable(
    ssh_server: "SshServer", ssh_kind: type, name: str
) -> None:
    with pytest.raises(UnreachableError, match="resolve") as caught:
        ssh_kind(ssh_server.host(address=f"root@{name}")).open()
    assert "correct the name in hosts.yaml" in caught.value.hint


def test_server_that_says_nothing_is_unreachable_within_the_timeout(
    ssh_server: "SshServer", ssh_kind: type
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        host = ssh_server.host(port=mute.getsockname()[1], connect_timeout_s=1.0)
        with pytest.raises(UnreachableError):
            ssh_kind(host).open()


def test_broken_ssh_config_is_a_configuration_error(
    ssh_server: "SshServer", ssh_kind: type, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("Hostt near\n")
    with pytest.raises(ConfigurationError, match="Bad configuration option"):
        ssh_kind(ssh_server.host(ssh_config=str(tmp_path / "bad"))).open()


def write_config(server: "SshServer", directory: Path) -> Path:
    """The server as an alias in an included file, and a second alias behind a jump to the first."""
    (directory / "sub.conf").write_text(
        f"Host alias\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {server.user_key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {server.known_hosts}\n"
        f"Host behind\n  ProxyJump alias\n  HostName 127.0.0.1\n  Port {server.port}\n"
        f"  User {getpass.getuser()}\n  IdentityFile {server.user_key}\n"
        f"  UserKnownHostsFile {server.known_hosts}\n"
    )
    config = directory / "main.conf"
    config.write_text(f"Include {directory}/sub.conf\n")
    return config


@pytest.mark.parametrize("alias", ["alias", "behind"])
def test_alias_of_an_included_ssh_config_is_reached_also_behind_a_jump(
    ssh_server: "SshServer", ssh_kind: type, open_way: OpenWay, tmp_path: Path, alias: str
) -> None:
    config = write_config(ssh_server, tmp_path)
    host = ssh_server.host(
        address=alias, port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
    )
    way = open_way(ssh_kind(host))
    assert run_script(way, ECHO).stdout == b"here\n"
    assert way.user == getpass.getuser()


def test_jump_named_in_the_inventory_is_used(
    ssh_server: "SshServer", ssh_kind: type, open_way: OpenWay, tmp_path: Path
) -> None:
    config = write_config(ssh_server, tmp_path)
    host = ssh_server.host(jump="alias", ssh_config=str(config))
    assert run_script(open_way(ssh_kind(host)), ECHO).stdout == b"here\n"


def test_jump_to_a_closed_port_is_unreachable(ssh_server: "SshServer", ssh_kind: type) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        jump = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UnreachableError):
            ssh_kind(ssh_server.host(jump=jump)).open()


def take_only_place(server: "SshServer") -> socket.socket:
    """Hold the only place for those not logged in yet; the start's own probe may still have it."""
    for _ in range(1000):
        hog = socket.create_connection(("127.0.0.1", server.port))
        if hog.recv(4) == b"SSH-":
            return hog
        hog.close()
        time.sleep(0.05)
    raise AssertionError("no place became free")


def test_server_that_hangs_up_before_its_greeting_is_tried_again(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    own_server.stop()
    own_server.settings = "MaxStartups 1:100:1\n"
    own_server.start()
    with take_only_place(own_server) as hog:
        timer = threading.Timer(0.3, hog.shutdown, [socket.SHUT_RDWR])
        timer.start()
        way = open_way(ssh_kind(own_server.host()))
        timer.join()
    assert run_script(way, ECHO).stdout == b"here\n"


def test_paths_with_blanks_and_percent_signs_are_taken_as_they_are(
    ssh_server: "SshServer", ssh_kind: type, open_way: OpenWay, tmp_path: Path
) -> None:
    odd = tmp_path / "my %h keys"
    odd.mkdir()
    for file in (ssh_server.user_key, ssh_server.known_hosts):
        (odd / file.name).write_bytes(file.read_bytes())
    (odd / "user_key").chmod(0o600)
    (odd / "config").write_text("Host *\n  RemoteCommand false\n  LocalForward 1 localhost:1\n")
    host = ssh_server.host(
        identity_file=str(odd / "user_key"),
        known_hosts=str(odd / "known_hosts"),
        ssh_config=str(odd / "config"),
    )
    assert run_script(open_way(ssh_kind(host)), ECHO).stdout == b"here\n"


def test_fabric_reads_ssh_config_itself_where_no_ssh_program_is(
    ssh_server: "SshServer", open_way: OpenWay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "sub.conf"
    write_config(ssh_server, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    host = ssh_server.host(
        address="behind", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
    )
    assert run_script(open_way(FabricTransport(host)), ECHO).stdout == b"here\n"
    with pytest.raises(UsageError, match="ssh program is not installed"):
        OpensshTransport(host).open()


def test_socket_goes_to_a_short_private_directory_when_the_runtime_directory_does_not_serve(
    ssh_server: "SshServer", open_way: OpenWay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / "open" / "dflashctl"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    too_long = tmp_path / ("x" * 100)
    for directory in (open_to_all.parent, too_long):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        assert run_script(open_way(OpensshTransport(ssh_server.host())), ECHO).stdout == b"here\n"
        assert list(directory.glob("dflashctl/*")) == []
    private = Path(f"/tmp/dflashctl-{os.geteuid()}").stat()
    assert (private.st_uid, private.st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.parametrize("backend", ["fabric", "openssh", "local"])
def test_connect_opens_the_backend_that_the_inventory_names(
    ssh_server: "SshServer", open_way: OpenWay, backend: str
) -> None:
    host = ssh_server.host(backend=backend)
    way = open_way(connect(Place(host, Container("near", None))))
    assert way.place == "near/self"
    assert run_script(way, ECHO).stdout == b"here\n"
    assert open_way(connect_host(host)).place == "near"


def test_eight_threads_connect_at_once(ssh_server: "SshServer") -> None:
    def work(_: int) -> bytes:
        transport = connect_host(ssh_server.host())
        try:
            return run_script(transport, ECHO).stdout
        finally:
            transport.close()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [b"here\n"] * 8


def test_two_threads_that_share_a_way_open_it_once(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    way = ssh_kind(own_server.host())
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_script(way, ECHO).stdout, range(2)))
    open_way(way)
    assert both == [b"here\n"] * 2
    assert len(own_server.children()) == 1
