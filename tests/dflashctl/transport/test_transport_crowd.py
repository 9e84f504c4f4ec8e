"""Many containers on one host whose sshd takes few connections at once."""

from pathlib import Path

import pytest

from dflashctl.inventory import Container, Place
from dflashctl.run_status import read_statuses
from dflashctl.transport import way_to
from tests.dflashctl.transport.conftest import SshServer


@pytest.mark.parametrize("settings", ["MaxStartups 2:100:3\n", "MaxSessions 1\n"])
def test_twelve_containers_of_a_host_are_asked_although_it_allows_little_at_once(  # F16
    own_server: SshServer, tmp_path: Path, settings: str
) -> None:
    own_server.stop()
    own_server.settings = settings
    own_server.start()
    host = own_server.host()
    places = []
    for number in range(12):
        run_dir = tmp_path / f"ws{number}/runs/t{number}"
        run_dir.mkdir(parents=True)
        (run_dir / "manifest.json").write_text('{"run_id": "r"}')
        places.append(Place(host, Container("near", None, workspace=str(tmp_path / f"ws{number}"))))
    found = read_statuses(places, way_to)
    assert found.failures == ()
    assert [run.tag for run in found.runs] == [f"t{number}" for number in range(12)]
