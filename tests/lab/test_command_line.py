"""dflashctl lab: every verb, as it is typed."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflashctl.cli import main
from dflashctl.lab.site import Lab

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


def arguments(*argv: str | Path) -> list[str]:
    return [*map(str, argv)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(state, *argv) -> exit status, stdout, stderr of ``dflashctl lab ARGV``."""

    def command(state: Path, *argv: str | Path) -> tuple[int, str, str]:
        status = main(arguments("lab", *argv, "--state", state))
        return status, *capsys.readouterr()

    return command


@pytest.fixture
def state(lab_site: Lab) -> Iterator[Path]:
    """A state directory for a lab of the test's own; lab_site has checked the requirements."""
    assert lab_site.status().up
    path = Path(tempfile.mkdtemp(prefix="lab-"))
    yield path
    Lab(path).down()


@pytest.mark.lab
def test_up_status_hosts_fault_and_down(run: Run, state: Path) -> None:
    up = run(state, "up", "--workspace", "100m", "--python", sys.executable)
    assert up[0] == 0
    assert up[1].startswith("up: kpro6, kpro7\nnext:\n")
    assert f"ssh -F {state}/ssh_config kpro6 pct list" in up[1]
    status = run(state, "status")[1].splitlines()
    assert status[0] == "up"
    assert status[1].endswith("containers: 200 running, 201 stopped  faults: none")
    assert "identity_file" in run(state, "hosts")[1]
    assert run(state, "fault", "kpro6", "banner", "hi") == (0, "", "")
    assert "faults: banner hi" in run(state, "status")[1]
    assert run(state, "down") == (0, "down\n", "")
    assert run(state, "status") == (0, "down\n", "")


@pytest.mark.lab
def test_run_has_the_terminal_and_the_exit_status_of_its_command(lab_site: Lab) -> None:
    ssh = ["ssh", "-F", lab_site.lan_ssh_config, "kpro7", "cat; exit 3"]
    argv = arguments("-m", "dflashctl", "lab", "run", "--state", lab_site.state, "--", *ssh)
    command = [sys.executable, *argv]
    done = subprocess.run(
        command, cwd=ROOT, input=b"typed", capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"typed", b"")


@pytest.mark.lab
def test_a_site_file_is_read_and_its_errors_name_it(run: Run, state: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.json"
    site.write_text('{"hosts": {"one": {"ip": "10.1.2.9"}}}')
    assert run(state, "up", "--site", site, "--expose", tmp_path)[0] == 0
    assert "one  127.0.0.1:" in run(state, "status")[1]
    site.write_text('{"hosts": {"one": {"ip": "10.1.2.9", "gpu": 1}}}')
    status, _, error = run(state, "up", "--site", site)
    assert status == 1
    assert error.startswith(f"error[lab]: {site}: hosts.one: unknown key 'gpu'")


def test_an_error_is_one_line_and_the_next_command_never_a_traceback(
    run: Run, tmp_path: Path
) -> None:
    assert run(tmp_path, "fault", "kpro6", "latency", "0,1") == (
        1,
        "",
        f"error[lab]: there is no lab in {tmp_path}\n  hint: dflashctl lab up --state {tmp_path}\n",
    )
