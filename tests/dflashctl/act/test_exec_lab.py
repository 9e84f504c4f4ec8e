"""exec through real ssh, pct and containers: arguments, streams, statuses, throughput."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import StateUnknownError, UnreachableError
from dflashctl.inventory import Place, load_inventory
from dflashctl.lab.site import Lab
from dflashctl.operations.execute import ExecuteRequest, execute
from dflashctl.transport import Transport, connect
from dflashctl.transport.openssh import OpensshTransport
from dflashctl.transport.pct import PctTransport
from tests.dflashctl.act.test_exec import Shell

pytestmark = pytest.mark.lab

MIB = 1 << 20


@pytest.fixture(params=["fabric", "openssh"])
def place(request: pytest.FixtureRequest, lab_site: Lab, tmp_path: Path) -> Place:
    (tmp_path / "hosts.yaml").write_text(lab_site.hosts_yaml(python=sys.executable))
    found = load_inventory(tmp_path / "hosts.yaml").one(["kpro6/200"])
    return dataclasses.replace(found, host=dataclasses.replace(found.host, backend=request.param))


@pytest.fixture
def way(place: Place) -> Iterator[Transport]:
    with closing(connect(place)) as transport:
        yield transport
    node = transport._node if isinstance(transport, PctTransport) else transport
    if isinstance(node, OpensshTransport):
        node.end_master()


@pytest.fixture
def there(tmp_path: Path, lab_site: Lab) -> Shell:
    (tmp_path / "hosts.yaml").write_text(lab_site.hosts_yaml(python=sys.executable))
    return Shell(tmp_path, "-l", "kpro6/200")


def run(way: Transport, *argv: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Return status, stdout and stderr of a command."""
    out, err = bytearray(), bytearray()
    status = execute(way, ExecuteRequest(argv, [stdin] if stdin else ()), out.extend, err.extend)
    return status, bytes(out), bytes(err)


ARGUMENTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
        st.binary(max_size=40).map(lambda raw: os.fsdecode(raw.replace(b"\0", b""))),
        st.text("-\"'`\\$*?[]{}()<>|&;#!~ \t\r\n\x01\x7f=%", max_size=20),
    ),
    min_size=60,
    max_size=120,
)


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arguments=ARGUMENTS, piece=st.text("x 'é\n*", min_size=1, max_size=50))
def test_random_arguments_come_back_unchanged(  # F01 F02 F10
    way: Transport, arguments: list[str], piece: str
) -> None:
    longest = piece * (100_000 // len(piece.encode()))
    sent = [*arguments, "", "-n", "--", "a b", "x y; echo INJECTED", longest, longest[::-1]]
    status, out, err = run(way, "printf", r"%s\0", *sent)
    assert (status, err) == (0, b"")
    assert out.split(b"\0")[:-1] == [os.fsencode(argument) for argument in sent]


def test_command_line_passes_every_byte_of_its_arguments(there: Shell) -> None:  # F01
    sent = ["", " ", "'", '"', "$(id)", "a\nb", "*", "модель", "-l", "--", "\udcff", "x" * 100_000]
    done = there.run("--", "printf", r"%s\0", *sent)
    assert done.returncode == 0
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(argument) for argument in sent]


def test_a_255_of_the_command_is_its_own(there: Shell) -> None:
    done = there.run("--", "bash", "-c", "echo said >&2; exit 255")
    assert (done.returncode, done.stdout, done.stderr) == (255, b"", b"said\n")


def test_noise_of_the_host_is_in_neither_stream(way: Transport, lab_site: Lab) -> None:  # F07
    lab_site.fault("kpro6", "noise", "Welcome to kpro6")
    lab_site.fault("kpro6", "banner", "Authorised users only")
    lab_site.fault("kpro6", "locale_warning", "1")
    found = run(way, "bash", "-c", "printf out; printf err >&2; exit 3")
    assert found == (3, b"out", b"err")


def test_environment_of_the_node_stays_there(way: Transport) -> None:  # F05
    _, out, _ = run(way, "env", "-0")
    names = {item.split(b"=")[0] for item in out.split(b"\0") if item}
    assert not {name for name in names if name.startswith((b"SSH", b"CUDA", b"SSL"))}
    assert b"LC_ALL=C.UTF-8" in out.split(b"\0")


@pytest.mark.parametrize(("fault", "value"), [("sshd_kill", "1"), ("net", "cut")])
def test_link_that_is_lost_under_a_command_is_unknown(
    way: Transport, lab_site: Lab, fault: str, value: str
) -> None:
    def cut(_: bytes) -> None:
        lab_site.fault("kpro6", fault, value)

    with pytest.raises(StateUnknownError) as caught:
        execute(way, ExecuteRequest(["bash", "-c", "echo up; sleep 60"]), cut, print)
    assert caught.value.exit_code == 8


def test_link_that_is_down_is_exit_4_and_never_255(there: Shell, lab_site: Lab) -> None:
    lab_site.fault("kpro6", "net", "cut")
    done = there.run("--", "true")
    assert done.returncode == 4
    assert done.stderr.startswith(b"error[")


def test_time_out_is_exit_4(way: Transport) -> None:
    with pytest.raises(UnreachableError, match=r"no end within 0\.5 s"):
        execute(way, ExecuteRequest(["sleep", "9"], deadline_s=0.5), print, print)


def test_much_of_both_streams_arrives_whole_and_hangs_nothing(way: Transport) -> None:  # F11 F12
    script = "head -c 5000000 /dev/zero >&2; head -c 8000000 /dev/zero | tr '\\0' x"
    status, out, err = run(way, "bash", "-c", script)
    assert (status, len(out), len(err)) == (0, 8_000_000, 5_000_000)


def test_standard_input_is_closed_where_there_is_none(way: Transport) -> None:  # F03
    assert run(way, "cat") == (0, b"", b"")
    data = bytes(range(256)) * 4096
    assert run(way, "cat", stdin=data) == (0, data, b"")


def test_several_containers_at_once_are_refused(there: Shell) -> None:
    done = Shell(there.root).run("--", "true")
    assert done.returncode == 2
    assert b"kpro6/200" in done.stderr
