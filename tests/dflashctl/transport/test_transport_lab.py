"""Into containers through pct exec, on the look-alike Proxmox site with its faults."""

import dataclasses
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import (
    ContainerDownError,
    ExitCode,
    StateUnknownError,
    TrustError,
    UnreachableError,
    UsageError,
)
from dflashctl.inventory import Container, Inventory, Place, load_inventory
from dflashctl.lab.site import Lab
from dflashctl.transport import Script, Transport, connect, connect_host, run_script, stream_script

pytestmark = [pytest.mark.lab, pytest.mark.slow]

OpenWay = Callable[[Transport], Transport]


@pytest.fixture(scope="module")
def inventory(lab_site: Lab, tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    file: Path = tmp_path_factory.mktemp("lab") / "hosts.yaml"
    file.write_text(lab_site.hosts_yaml())
    return load_inventory(file)


@pytest.fixture(params=["fabric", "openssh"])
def place(request: pytest.FixtureRequest, inventory: Inventory) -> Place:
    """Container 200 of kpro6, by each backend."""
    found = inventory.one(["kpro6/200"])
    return dataclasses.replace(found, host=dataclasses.replace(found.host, backend=request.param))


@pytest.fixture
def way(place: Place, open_way: OpenWay, lab_site: Lab) -> Iterator[Transport]:
    lab_site.restore()
    return open_way(connect(place))


def other(place: Place, vmid: int) -> Place:
    return dataclasses.replace(place, container=Container("kpro6", vmid))


def test_script_runs_inside_the_container_in_one_pct_call(way: Transport, lab_site: Lab) -> None:
    before, trips = len(lab_site.pct_calls("kpro6")), way.round_trips
    result = run_script(way, Script("cat; cat /proc/sys/kernel/hostname", [b"\0\xff payload\n"]))
    name = lab_site.in_container("kpro6", 200, "cat /proc/sys/kernel/hostname").stdout
    assert result.stdout == b"\0\xff payload\n" + name
    assert name != Path("/proc/sys/kernel/hostname").read_bytes()
    assert len(lab_site.pct_calls("kpro6")) - before == 1
    assert way.round_trips - trips == 1
    assert way.place == "kpro6/200"


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arguments=st.lists(
        st.text(st.characters(max_codepoint=126, exclude_characters="\0"), max_size=20),
        min_size=1,
        max_size=5,
    )
)
def test_random_arguments_pass_ssh_and_pct_unchanged(way: Transport, arguments: list[str]) -> None:
    received: list[bytes] = []
    way.execute(["printf", "%s\\0", *arguments], (), received.append, 100)
    assert b"".join(received) == b"".join(item.encode() + b"\0" for item in arguments)


def test_text_outside_ascii_arrives_by_stdin_and_is_refused_as_argument(way: Transport) -> None:
    assert run_script(way, Script("printf модель")).stdout == "модель".encode()
    with pytest.raises(UsageError, match="ASCII"):
        way.execute(["echo", "модель"], (), print, 5)


def test_environment_of_the_node_does_not_leak_in(way: Transport) -> None:
    listed = run_script(way, Script("env -0")).stdout.split(b"\0")
    names = {item.split(b"=")[0] for item in listed if item}
    assert {b"HOME", b"LANG", b"LC_ALL", b"PATH"} <= names
    assert not {name for name in names if name.startswith((b"SSH", b"CUDA"))}


def test_stopped_container_is_exit_code_4_and_told_how_to_start(
    place: Place, open_way: OpenWay
) -> None:
    way = open_way(connect(other(place, 201)))
    with pytest.raises(ContainerDownError, match="container '201' not running!") as caught:
        run_script(way, Script("echo a"))
    assert (caught.value.exit_code, caught.value.place) == (ExitCode.UNREACHABLE, "kpro6/201")
    assert "pct start 201" in caught.value.hint


def test_unknown_container_is_exit_code_2_and_names_pct_list(
    place: Place, open_way: OpenWay
) -> None:
    way = open_way(connect(other(place, 999)))
    with pytest.raises(UsageError, match=r"999\.conf' does not exist") as caught:
        run_script(way, Script("echo a"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "pct list" in caught.value.hint


def test_locked_container_still_runs_scripts(way: Transport, lab_site: Lab) -> None:
    lab_site.fault("kpro6", "lock", "200")
    assert run_script(way, Script("echo a")).stdout == b"a\n"


def test_noise_banner_and_locale_warning_stay_out_of_results_and_messages(
    way: Transport, lab_site: Lab
) -> None:
    lab_site.fault("kpro6", "noise", "Welcome to kpro6")
    lab_site.fault("kpro6", "banner", "Authorised users only")
    lab_site.fault("kpro6", "locale_warning", "1")
    result = run_script(way, Script("printf x; echo real trouble >&2; exit 3"))
    assert (result.rc, result.stdout) == (3, b"x")
    with pytest.raises(UsageError) as caught:
        result.check(UsageError, "it failed", place="kpro6/200")
    assert caught.value.hint == "real trouble"


def test_latency_of_pct_is_paid_once(way: Transport, lab_site: Lab) -> None:
    lab_site.fault("kpro6", "latency", "0.6,0.7")
    before = len(lab_site.pct_calls("kpro6"))
    result = run_script(way, Script("for i in 1 2 3 4 5; do echo $i; done"))
    assert result.stdout == b"1\n2\n3\n4\n5\n"
    assert len(lab_site.pct_calls("kpro6")) - before == 1
    assert result.elapsed_s > 0.5


def test_stalled_network_ends_at_the_deadline(way: Transport, lab_site: Lab) -> None:
    lab_site.fault("kpro6", "net", "stall")
    with pytest.raises(UnreachableError, match="no end within 1 s"):
        run_script(way, Script("echo a", deadline_s=1.0))


def test_a_host_that_is_silent_from_the_start_is_not_said_to_refuse_keys(
    inventory: Inventory, lab_site: Lab
) -> None:
    host = dataclasses.replace(inventory.one(["kpro6/200"]).host, connect_timeout_s=2.0)
    lab_site.fault("kpro6", "net", "stall")
    with pytest.raises(UnreachableError) as caught:
        connect_host(host)
    assert "keys" not in caught.value.message


@pytest.mark.parametrize(("fault", "value"), [("sshd_kill", "1"), ("net", "cut")])
def test_link_cut_under_a_script_leaves_the_state_unknown(
    way: Transport, lab_site: Lab, fault: str, value: str
) -> None:
    def cut(_: bytes) -> None:
        lab_site.fault("kpro6", fault, value)

    with pytest.raises(StateUnknownError):
        stream_script(way, Script("echo begun; sleep 60", what="launch"), cut)


def test_container_stopped_under_a_script_leaves_the_state_unknown(
    way: Transport, lab_site: Lab
) -> None:
    def stop(_: bytes) -> None:
        lab_site.in_host("kpro6", ["pct", "stop", "200"])

    with pytest.raises(StateUnknownError, match="stopped before its end"):
        stream_script(way, Script("echo begun; sleep 60"), stop)


def test_host_itself_is_reached_beside_its_containers(place: Place, open_way: OpenWay) -> None:
    way = open_way(connect_host(place.host))
    listed = run_script(way, Script("pct list")).stdout.split()
    assert b"200" in listed
    assert way.place == "kpro6"


def test_user_with_a_sudo_rule_enters_by_sudo(
    place: Place, open_way: OpenWay, lab_site: Lab
) -> None:
    if lab_site.in_host("kpro6", ["sudo", "-V"]).returncode != 0:
        assert os.environ.get("CI") != "true", "tools/setup installs sudo"
        pytest.skip("sudo is not installed")
    address = place.host.address.replace("root@", "ops@")
    as_user = dataclasses.replace(place, host=dataclasses.replace(place.host, address=address))
    assert run_script(open_way(connect(as_user)), Script("id -un")).stdout == b"root\n"


def test_user_without_sudo_is_told_that_pct_needs_root(place: Place, open_way: OpenWay) -> None:
    address = place.host.address.replace("root@", "ops@")
    host = dataclasses.replace(place.host, address=address, become="none")
    way = open_way(connect(dataclasses.replace(place, host=host)))
    with pytest.raises(TrustError, match="please run as root") as caught:
        run_script(way, Script("echo a"))
    assert "become: sudo" in caught.value.hint


ATTACH = """
import sys
from pathlib import Path
from dflashctl.inventory import load_inventory
from dflashctl.transport import connect
way = connect(load_inventory(Path(sys.argv[1])).one(["kpro6/200"]))
status = way.interactive(["bash", "-c", "test -t 0 && echo $TERM $(hostname); exit 7"])
way.close()
sys.exit(status)
"""


def test_attach_has_a_terminal_inside_the_container(inventory: Inventory, lab_site: Lab) -> None:
    master, slave = pty.openpty()
    argv = [sys.executable, "-c", ATTACH, str(inventory.path)]
    with subprocess.Popen(argv, stdin=slave, stdout=subprocess.PIPE, stderr=slave) as child:
        shown, _ = child.communicate(timeout=100)
    os.close(slave)
    os.close(master)
    name = lab_site.in_container("kpro6", 200, "hostname").stdout
    assert shown.split() == [b"xterm-256color", *name.split()]
    assert child.returncode == 7


def test_two_hosts_with_the_same_vmid_are_told_apart(
    inventory: Inventory, open_way: OpenWay
) -> None:
    counts = {
        place.label: run_script(open_way(connect(place)), Script("nvidia-smi -L | wc -l")).stdout
        for place in inventory.select(["*/200"])
    }
    assert counts == {"kpro6/200": b"8\n", "kpro7/200": b"2\n"}
