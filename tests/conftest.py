"""Fixtures for all tests, one for the whole session: the look-alike site (docs/lab.md), SmolLM2."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from dflashctl.demo.smollm2 import SOURCE_FILE
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import default_site


def _go_without(reason: str) -> NoReturn:
    """Skip what a machine cannot run; in CI everything is there, and a skip would hide its loss."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let --timeout lengthen the limits that tests set for themselves, and shorten none."""
    least_s = config.getoption("timeout", None)
    for item in items:
        own = item.get_closest_marker("timeout")
        if own is not None and least_s is not None and own.args[0] < least_s:
            item.add_marker(pytest.mark.timeout(least_s), append=False)


@pytest.fixture(scope="session")
def lab_site() -> Iterator[Lab]:
    """kpro6 (8 GPUs; container 200 runs, 201 is stopped) and kpro7 (2 GPUs; container 200).

    This Python, with torch, is visible in the containers under its own path. The port numbers and
    the state directory are new ones. After each test marked `lab`, faults, processes in the
    containers and locks of GPUs are gone and the power states restored; files stay.
    """
    missing = Lab.missing_requirements()
    if missing:
        _go_without("no lab on this machine: " + "; ".join(missing))
    # Short, unlike tmp_path: unix sockets live below it. Its end comes with this process's.
    lab = Lab(Path(tempfile.mkdtemp(prefix="lab-")))
    lab.up(default_site("2g", expose=tuple(python_paths(sys.executable))), owner=os.getpid())
    try:
        yield lab
    finally:
        lab.down()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, in .demo/model as `make model` writes it or in DFLASHCTL_SMOLLM2."""
    named = os.environ.get("DFLASHCTL_SMOLLM2")
    directory = Path(named) if named else Path(__file__).parents[1] / ".demo" / "model"
    if not (directory / SOURCE_FILE).is_file():
        _go_without(f"no SmolLM2 in {directory}: make model")
    return directory


@pytest.fixture(autouse=True)
def restored_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the lab: Lab.restore, and no lock of a run on a GPU."""
    uses_lab = request.node.get_closest_marker("lab") and "lab_site" in request.fixturenames
    lab: Lab | None = request.getfixturevalue("lab_site") if uses_lab else None
    yield
    if lab is not None:
        lab.restore()
        for host in ("kpro6", "kpro7"):
            lab.in_host(host, ["rm", "-rf", "/run/lock/dflashctl"])
