"""Logins by a security key, with one in software: a real sshd checks what it signed."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflashctl.errors import ExitCode, TrustError
from dflashctl.transport import Script, Transport, run_script
from tests.dflashctl.transport.security_key import SecurityKey

if TYPE_CHECKING:
    from conftest import SshServer

OpenWay = Callable[[Transport], Transport]


@pytest.fixture
def key(own_server: "SshServer", monkeypatch: pytest.MonkeyPatch) -> Iterator[SecurityKey]:
    """A security key in the agent, the only one that the server knows."""
    with tempfile.TemporaryDirectory(prefix="sk-") as short:
        path = Path(short) / "agent"
        found = SecurityKey(path)
        own_server.user_key.with_suffix(".pub").write_text(found.public_line)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield found
        found.close()


def test_a_security_key_of_the_agent_logs_in(
    own_server: "SshServer", key: SecurityKey, open_way: OpenWay, ssh_kind: type
) -> None:
    way = open_way(ssh_kind(own_server.host(identity_file=None)))
    assert run_script(way, Script("echo here")).stdout == b"here\n"
    assert key.num_signed == 1


def test_a_security_key_that_is_not_there_is_told_as_what_it_is(
    own_server: "SshServer",
    key: SecurityKey,
    ssh_kind: type,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK")
    file = tmp_path / "id_ed25519_sk"
    file.write_text(key.private_file())
    file.chmod(0o600)
    with pytest.raises(TrustError, match="refused the login") as caught:
        ssh_kind(own_server.host(identity_file=str(file))).open()
    assert caught.value.exit_code == ExitCode.TRUST
    assert f"{file} is a security key: plug it in" in caught.value.hint
    assert "backend: openssh" in caught.value.hint
    assert key.num_signed == 0
