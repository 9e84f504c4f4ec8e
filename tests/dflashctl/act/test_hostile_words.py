"""What a host says cannot drive the terminal of the laptop."""

import socket
import sys
import threading
from pathlib import Path

import pytest

from dflashctl.errors import DflashctlError
from dflashctl.render.failure import failure_text
from tests.dflashctl.act.test_exec import Shell

HOSTILE = "\x1b]0;owned\x07a\x1b[2J\x9b31mb\x90x\x9c\u202ec\x7f\x08"


def test_error_shows_the_words_of_a_host_without_controls() -> None:  # F64
    error = DflashctlError(f"m {HOSTILE}", hint=f"h {HOSTILE}\nnext", place=f"p{HOSTILE}")
    assert failure_text(error) == "error[failed]: pabc: m abc\n  hint: h abc\n        next\n"


@pytest.mark.parametrize("backend", ["fabric", "openssh"])
def test_greeting_of_a_hostile_server_is_shown_without_controls(
    tmp_path: Path, backend: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        greet = threading.Thread(target=_greet, args=(server,), daemon=True)
        greet.start()
        (tmp_path / "known").touch()
        (tmp_path / "config").touch()
        (tmp_path / "hosts.yaml").write_text(
            f"version: 1\nhosts:\n  near:\n    address: root@127.0.0.1\n"
            f"    port: {server.getsockname()[1]}\n    backend: {backend}\n"
            f"    known_hosts: {tmp_path}/known\n    ssh_config: {tmp_path}/config\n"
            f"    containers: {{self: {{python: {sys.executable}}}}}\n"
        )
        done = Shell(tmp_path).run("--", "true")
    assert done.returncode in (4, 5)
    assert done.stderr.startswith(b"error[")
    shown = done.stderr.decode()
    assert not [char for char in shown if not (char.isprintable() or char == "\n")], shown


def _greet(server: socket.socket) -> None:
    """Greet every connection with escapes instead of a protocol version."""
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return
        with link:
            link.sendall(b"SSH-9.9-\x1b]0;owned\x07\x1b[2J\x9b31m\r\n")
