"""Which paths make a Python visible, and what the lab asks of the machine."""

import shutil
import sys
from pathlib import Path

import pytest

from dflashctl.errors import LabError
from dflashctl.lab.container import Container
from dflashctl.lab.interpreter import outermost, python_paths
from dflashctl.lab.layer import hidden, is_hidden, mount_points
from dflashctl.lab.requirements import missing_requirements
from dflashctl.lab.spec import ContainerSpec, HostSpec, MountSpec, SiteSpec


def test_paths_below_another_one_are_left_out() -> None:
    assert outermost(["/a/b/c", "/a/b", "/a/bc", "/d/", "/d"]) == ["/a/b", "/a/bc", "/d"]
    assert outermost([]) == []


def test_an_environment_needs_itself_and_the_installation_below_it() -> None:
    paths = python_paths(sys.executable)
    for needed in (sys.prefix, sys.base_prefix, Path(sys.executable).resolve()):
        assert any(Path(needed).is_relative_to(p) for p in paths), needed
    assert paths == outermost(paths)


def test_every_link_on_the_way_to_the_interpreter_is_among_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two/python").symlink_to(sys.executable)
    (tmp_path / "one/python").symlink_to("../two/python")
    paths = python_paths(str(tmp_path / "one/python"))
    assert {str(tmp_path / "one"), str(tmp_path / "two")} <= set(paths)


def test_this_project_in_editable_mode_is_not_among_them() -> None:
    root = Path(__file__).parents[2]
    assert str(root) not in python_paths(sys.executable)


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
def test_what_is_no_interpreter_is_named(program: str) -> None:
    with pytest.raises(LabError, match=f"{program} does not work as a Python interpreter"):
        python_paths(program)


def test_only_hidden_paths_are_bound_into_a_container_each_tree_once() -> None:
    spec = ContainerSpec(
        expose=("/opt/py", "/usr/lib", "/home/u/venv"), mounts={"/models": MountSpec("/srv/m")}
    )
    hosts = {"a": HostSpec("10.1.2.3", containers={100: spec})}
    site = SiteSpec(hosts, expose=("/opt/py/lib", "/etc"))
    container = Container(site, "a", 100, "cgroup")
    assert [(b.source, b.target, b.writable) for b in container.binds] == [
        ("/home/u/venv", "/home/u/venv", False),
        ("/opt/py", "/opt/py", False),
        ("/srv/m", "/models", False),
    ]


def test_a_path_on_another_file_system_is_hidden_too() -> None:
    mounts = ["/", "/builds", "/proc"]
    assert is_hidden("/builds/project/.venv", mounts)
    assert is_hidden("/builds", mounts)
    assert not is_hidden("/buildsystem", mounts)
    assert not is_hidden("/usr/lib", mounts)
    assert is_hidden("/home/u", mounts)
    assert {"/", "/proc"} <= set(mount_points())


def test_a_machine_that_runs_the_lab_lacks_nothing_and_another_names_packages() -> None:
    missing = missing_requirements()
    assert any("lxc-start" in reason for reason in missing) == (
        shutil.which("lxc-start", path="/usr/bin:/bin:/usr/local/bin") is None
    )
    assert all(": apt-get install " in m or "sudo" in m or "modprobe" in m for m in missing)


def test_of_the_top_of_a_machine_only_the_system_shows(tmp_path: Path) -> None:
    for name in ("usr", "var", "home", "builds"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    found = hidden(tmp_path)
    assert {"builds", "home", "workspace", "etc/ssh"} <= set(found)
    assert found.count("home") == 1
    assert {"usr", "var", "bin"}.isdisjoint(found)
