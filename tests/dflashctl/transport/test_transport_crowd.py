"""Many containers on one host whose sshd takes few connections at once."""

from pathlib import Path

from dflashctl.inventory import Container, Place
from dflashctl.run_status import read_statuses
from dflashctl.transport import connect
from tests.dflashctl.transport.conftest import SshServer


def test_twelve_containers_of_a_host_are_asked_under_a_low_max_startups(  # F16
    own_server: SshServer, tmp_path: Path
) -> None:
    own_server.stop()
    own_server.settings = "MaxStartups 2:100:3\n"
    own_server.start()
    host = own_server.host()
    places = []
    for number in range(12):
        run_dir = tmp_path / f"ws{number}/runs/t{number}"
        run_dir.mkdir(parents=True)
        (run_dir / "manifest.json").write_text('{"run_id": "r"}')
        places.append(Place(host, Container("near", None, workspace=str(tmp_path / f"ws{number}"))))
    found = read_statuses(places, connect)
    assert found.failures == ()
    assert [run.tag for run in found.runs] == [f"t{number}" for number in range(12)]
