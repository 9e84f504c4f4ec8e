"""A link that dies or stalls under a command: noticed in time, and never taken for success."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from dflashctl.errors import StateUnknownError, UnreachableError
from dflashctl.transport import Script, Transport, run_script, stream_script
from dflashctl.transport.base import EnoughRead
from dflashctl.transport.fabric_ssh import FabricTransport
from dflashctl.transport.openssh import OpensshTransport
from tests.dflashctl.act.conftest import wait_until
from tests.dflashctl.transport.conftest import require_no_new_thread

if TYPE_CHECKING:
    from conftest import SshServer

OpenWay = Callable[[Transport], Transport]


def test_connection_killed_under_a_script_leaves_the_state_unknown(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    way = open_way(ssh_kind(own_server.host()))

    def cut(chunk: bytes) -> None:
        assert chunk == b"begun\n"
        own_server.kill_connections(signal.SIGKILL)

    with pytest.raises(StateUnknownError) as caught:
        stream_script(way, Script("echo begun; sleep 60", what="launch"), cut)
    assert "launch" in caught.value.message


class _OneWaySocket:
    """A socket whose peer is gone for what is sent, while nothing says so to the reader yet.

    For a moment every cut link is in this state; here it lasts.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.broken = False

    def send(self, data: bytes) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return self._sock.send(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    "line",
    [
        "echo begun; sleep 60",  # found when the channel is closed
        "echo begun; head -c 40000000 /dev/zero; sleep 60",  # when its window is opened
        "echo begun; cat >/dev/null; sleep 60",  # when more is sent
    ],
)
def test_link_that_takes_no_more_bytes_is_lost_and_not_a_traceback(
    own_server: "SshServer", open_way: OpenWay, line: str
) -> None:
    way = open_way(FabricTransport(own_server.host(), alive_interval_s=1.0))
    link = way._link  # type: ignore[attr-defined]
    sock = _OneWaySocket(link.sock)
    link.packetizer._Packetizer__socket = sock
    begun = threading.Event()

    def blocks() -> Iterator[bytes]:
        yield b"first"
        begun.wait(60)
        yield bytes(1 << 20)

    def cut(_chunk: bytes) -> None:
        sock.broken = True
        begun.set()

    with pytest.raises(UnreachableError) as caught:
        way.execute(["sh", "-c", line], blocks(), cut, 50.0)
    assert caught.value.code == "link-lost"


def test_link_that_breaks_while_the_channel_is_closed_is_lost(
    own_server: "SshServer", open_way: OpenWay
) -> None:
    way = open_way(FabricTransport(own_server.host()))
    sock = _OneWaySocket(way._link.sock)  # type: ignore[attr-defined]
    way._link.packetizer._Packetizer__socket = sock  # type: ignore[attr-defined]

    def enough(_chunk: bytes) -> None:
        sock.broken = True
        raise EnoughRead

    with pytest.raises(UnreachableError) as caught:
        way.execute(["sh", "-c", "echo begun; sleep 60"], [], enough, 30.0)
    assert caught.value.code == "link-lost"


class _SlowToClose:
    """A channel that takes its time to close: until then the link does not say that it is down."""

    def _unlink(self) -> None:
        time.sleep(1.5)


def test_link_that_is_slow_to_say_that_it_is_down_is_lost_all_the_same(
    own_server: "SshServer", open_way: OpenWay
) -> None:
    way = open_way(FabricTransport(own_server.host()))
    slow = _SlowToClose()
    received: list[bytes] = []

    def cut(chunk: bytes) -> None:
        received.append(chunk)
        way._link._channels.put(1 << 20, slow)  # type: ignore[attr-defined]  # after the command's
        own_server.kill_connections(signal.SIGKILL)

    with pytest.raises(UnreachableError) as caught:
        way.execute(["sh", "-c", "echo begun; sleep 60"], (), cut, 100.0)
    assert (caught.value.code, received) == ("link-lost", [b"begun\n"])


def test_connection_killed_between_two_commands_is_unreachable_or_made_anew(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    way = open_way(ssh_kind(own_server.host()))
    own_server.kill_connections(signal.SIGKILL)
    if isinstance(way, OpensshTransport):  # a command would find its dying master
        wait_until(lambda: not way._socket.exists())
    if ssh_kind is FabricTransport:
        with pytest.raises(UnreachableError) as caught:
            run_script(way, Script("echo a", deadline_s=10))
        assert caught.value.code == "link-lost"
    else:
        assert run_script(way, Script("echo a", deadline_s=10)).stdout == b"a\n"


def test_host_that_stops_answering_is_noticed_by_the_heartbeat(
    own_server: "SshServer", open_way: OpenWay
) -> None:
    way = open_way(FabricTransport(own_server.host(), alive_interval_s=1.0))

    def stall(chunk: bytes) -> None:
        assert chunk == b"begun\n"
        own_server.kill_connections(signal.SIGSTOP)

    try:
        with pytest.raises(StateUnknownError):
            stream_script(way, Script("echo begun; sleep 60", deadline_s=None), stall)
    finally:
        own_server.kill_connections(signal.SIGKILL)


def test_deadline_holds_while_the_host_is_stalled(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    way = open_way(ssh_kind(own_server.host()))
    own_server.kill_connections(signal.SIGSTOP)
    try:
        with pytest.raises(UnreachableError):
            run_script(way, Script("cat", [bytes(1 << 20)] * 8, deadline_s=1.0))
    finally:
        own_server.kill_connections(signal.SIGKILL)


def test_idle_connection_stays_open_by_answers_to_the_heartbeat(
    own_server: "SshServer", open_way: OpenWay
) -> None:
    way = open_way(FabricTransport(own_server.host(), alive_interval_s=0.8))
    time.sleep(3.0)  # longer than a host may be silent
    assert run_script(way, Script("echo a")).stdout == b"a\n"


def test_close_ends_every_thread_of_the_connection(own_server: "SshServer") -> None:
    before = set(threading.enumerate())
    way = FabricTransport(own_server.host())
    way.open()
    run_script(way, Script("cat", [b"x"]))
    way.close()
    require_no_new_thread(before)


def test_noise_of_a_login_file_stays_out_of_the_output(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    noise = 'echo "Welcome to near"; printf "no newline@@"'
    force_command(own_server, f'{noise}; eval "$SSH_ORIGINAL_COMMAND"')
    way = open_way(ssh_kind(own_server.host()))
    assert run_script(way, Script("printf x")).stdout == b"x"


def test_endless_noise_is_told_and_not_kept(own_server: "SshServer", open_way: OpenWay) -> None:
    force_command(own_server, "yes noise")
    way = open_way(FabricTransport(own_server.host()))
    with pytest.raises(StateUnknownError, match="before the script began") as caught:
        run_script(way, Script("echo a", deadline_s=100))
    assert ".bashrc" in caught.value.hint


def test_login_that_runs_nothing_is_never_taken_for_success(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    force_command(own_server, "echo This account is for mail; exit 0")
    way = open_way(ssh_kind(own_server.host()))
    with pytest.raises(StateUnknownError, match="no sign of having begun") as caught:
        run_script(way, Script("echo a"))
    assert "for mail" in caught.value.message


def test_output_that_comes_after_the_exit_status_is_not_lost(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    force_command(own_server, '{ sleep 1.2; eval "$SSH_ORIGINAL_COMMAND"; } <&0 &')
    way = open_way(ssh_kind(own_server.host()))
    result = run_script(way, Script("echo late; exit 3"))
    assert (result.rc, result.stdout) == (3, b"late\n")


def test_interrupt_of_the_user_leaves_no_child_and_no_thread(
    own_server: "SshServer", ssh_kind: type, open_way: OpenWay
) -> None:
    way = open_way(ssh_kind(own_server.host()))
    before = set(threading.enumerate())

    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_script(way, Script("echo begun; sleep 60"), interrupt)
    listed = subprocess.run(
        ["ps", "-o", "comm=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ssh" not in listed.stdout.split()
    require_no_new_thread(before)
    assert run_script(way, Script("echo a")).stdout == b"a\n"


def force_command(server: "SshServer", command: str) -> None:
    server.stop()
    server.settings = f"ForceCommand {command}\n"
    server.start()
