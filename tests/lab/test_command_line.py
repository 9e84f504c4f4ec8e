"""python -m dflashctl.lab: every verb, as it is typed."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflashctl.lab.site import Lab

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run() -> Run:
    def command(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dflashctl.lab", *map(str, argv)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=25,
        )

    return command


@pytest.fixture
def state(lab_site: Lab) -> Iterator[Path]:
    """A state directory for a lab of the test's own; lab_site has checked the requirements."""
    assert lab_site.status().up
    path = Path(tempfile.mkdtemp(prefix="lab-"))
    yield path
    Lab(path).down()


@pytest.mark.lab
def test_up_status_hosts_fault_run_and_down(run: Run, state: Path) -> None:
    up = run("--state", state, "up", "--workspace", "100m", "--python", sys.executable)
    assert up.stdout.startswith("up in "), up.stderr
    assert f"ssh -F {state}/ssh_config kpro6 pct list" in up.stdout
    status = run("--state", state, "status").stdout.splitlines()
    assert status[0] == "up"
    assert "containers 200 running, 201 stopped; faults none" in status[1]
    assert "identity_file" in run("--state", state, "hosts").stdout
    assert run("--state", state, "fault", "kpro6", "banner", "hi").returncode == 0
    assert "faults banner hi" in run("--state", state, "status").stdout
    ssh = ["ssh", "-F", f"{state}/ssh_config.lan", "kpro7", "hostname; exit 3"]
    there = run("--state", state, "run", "--", *ssh)
    assert (there.returncode, there.stdout) == (3, "kpro7\n")
    assert run("--state", state, "down").returncode == 0
    assert run("--state", state, "status").stdout == "down\n"


@pytest.mark.lab
def test_a_site_file_is_read_and_its_errors_name_it(run: Run, state: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.json"
    site.write_text('{"hosts": {"one": {"ip": "10.1.2.9"}}}')
    assert run("--state", state, "up", "--site", site).returncode == 0
    assert "one: 127.0.0.1:" in run("--state", state, "status").stdout
    site.write_text('{"hosts": {"one": {"ip": "10.1.2.9", "gpu": 1}}}')
    done = run("--state", state, "up", "--site", site)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error[lab]: {site}: hosts.one: unknown key 'gpu'")


def test_an_error_is_one_line_and_the_next_command_never_a_traceback(
    run: Run, tmp_path: Path
) -> None:
    done = run("--state", tmp_path, "fault", "kpro6", "latency", "0,1")
    assert done.returncode == 1
    assert done.stderr == (
        f"error[lab]: there is no lab in {tmp_path}\n  next: dflashctl lab up --state {tmp_path}\n"
    )


def test_the_help_of_fault_lists_the_faults(run: Run) -> None:
    assert "disk_full VMID" in run("fault", "--help").stdout
