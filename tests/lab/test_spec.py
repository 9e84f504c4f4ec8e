"""The description of a site: what JSON says, and what is refused with the key named."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import LabError
from dflashctl.lab.spec import (
    ContainerSpec,
    HostSpec,
    MountSpec,
    SiteSpec,
    default_site,
    dump_site,
    load_site,
    parse_site,
)


def test_the_default_site_is_kpro6_and_kpro7() -> None:
    site = default_site("6g", expose=("/opt/python",))
    assert [(name, h.ip, h.gpus, list(h.containers)) for name, h in site.hosts.items()] == [
        ("kpro6", "10.1.2.6", 8, [200, 201]),
        ("kpro7", "10.1.2.7", 2, [200]),
    ]
    kpro6 = site.hosts["kpro6"].containers
    assert (kpro6[200].workspace, kpro6[201].workspace) == ("6g", "64m")
    assert (kpro6[200].onboot, kpro6[201].onboot) == (True, False)
    assert site.exposed("kpro7", 200) == ("/opt/python",)


def test_what_is_dumped_as_json_is_read_back_the_same() -> None:
    site = default_site("1g", expose=("/opt/a",))
    container = ContainerSpec(
        hostname="x",
        expose=("/opt/b",),
        mounts={"/models": MountSpec("/srv/m", writable=True), "/data": "/srv/data"},
    )
    hosts = {**site.hosts, "three": HostSpec("10.1.2.3", port=2203, containers={300: container})}
    site = replace(site, hosts=hosts)
    assert parse_site(json.loads(json.dumps(dump_site(site))), "lab.json") == site


def test_keys_that_are_left_out_have_their_defaults() -> None:
    site = parse_site({"hosts": {"a": {"ip": "10.1.2.3", "containers": {"100": {}}}}}, "x")
    assert site.hosts["a"] == HostSpec("10.1.2.3", 0, 2, {100: ContainerSpec()})
    assert (site.base, site.expose) == ("/", ())


def host(**changes: Any) -> dict[str, Any]:
    return {"hosts": {"a": {"ip": "10.1.2.3", **changes}}}


def container(**changes: Any) -> dict[str, Any]:
    return host(containers={"100": changes})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "f.json: found [], expected an object"),
        ({}, "f.json: hosts: found None, expected an object"),
        ({"hosts": {}}, "hosts: a site needs at least one host"),
        ({"host": {}}, "f.json: unknown key 'host'; known are base, expose, hosts"),
        ({"hosts": {"A": {"ip": "10.1.2.3"}}}, "hosts.A: a host name has 1 to 32 of a-z"),
        ({"hosts": {"a": {}}}, "f.json: hosts.a: the key 'ip' is missing"),
        (host(prot=1), "f.json: hosts.a: unknown key 'prot'; known are containers, gpus, ip, port"),
        (host(ip="10.1.3.3"), "hosts.a.ip: found '10.1.3.3', expected one of 10.1.2.0/24"),
        (host(ip="10.1.2.1"), "except 10.1.2.1"),
        (host(ip="nine"), "hosts.a.ip: found 'nine'"),
        (host(port="22"), "f.json: hosts.a.port: found '22', expected int"),
        (host(port=True), "f.json: hosts.a.port: found True, expected int"),
        (host(port=65536), "hosts.a.port: found 65536, expected 0 (any free one) to 65535"),
        (host(gpus=-1), "hosts.a.gpus: found -1, expected 0 to 64"),
        (host(containers={"x": {}}), "containers: found 'x', expected a number such as 200"),
        (host(containers={"99": {}}), "hosts.a.containers.99: a VMID is a number from 100"),
        (container(workspace="6 GB"), "containers.100.workspace: found '6 GB', expected a size"),
        (container(hostname="a b"), "containers.100.hostname: found 'a b', expected letters"),
        (
            container(onboot="yes"),
            "hosts.a.containers.100.onboot: found 'yes', expected bool",
        ),
        (container(expose="/opt"), "containers.100.expose: found '/opt', expected a list of paths"),
        (container(expose=["opt"]), "expose: found 'opt', expected an absolute path"),
        (container(expose=["/opt/../etc"]), "expose: found '/opt/../etc', expected an absolute"),
        (container(expose=["/"]), "expose: found '/', expected an absolute path"),
        (container(expose=["/a\nb"]), "expose: '/a\\nb' has a line break"),
        (container(mounts={"/m": 3}), "mounts./m: found 3, expected an object"),
        (container(mounts={"/m": "srv"}), "mounts: found 'srv', expected an absolute path"),
        (
            container(mounts={"/m": {}}),
            "mounts./m: the key 'source' is missing",
        ),
        ({**host(), "base": "/nowhere"}, "base: /nowhere is not a directory"),
    ],
)
def test_a_wrong_site_is_refused_with_its_key(data: object, message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        parse_site(data, "f.json")


def test_two_hosts_cannot_share_an_address_or_a_port() -> None:
    with pytest.raises(LabError, match=r"hosts\.b: 10\.1\.2\.3 is already taken by a"):
        SiteSpec({"a": HostSpec("10.1.2.3"), "b": HostSpec("10.1.2.3")})
    with pytest.raises(LabError, match=r"hosts\.b: 2200 is already taken by a"):
        SiteSpec({"a": HostSpec("10.1.2.3", 2200), "b": HostSpec("10.1.2.4", 2200)})
    both_free = SiteSpec({"a": HostSpec("10.1.2.3"), "b": HostSpec("10.1.2.4")})
    assert len(both_free.hosts) == 2


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    with pytest.raises(LabError, match=r"site\.json: cannot be read: No such file"):
        load_site(path)
    path.write_text("{")
    with pytest.raises(LabError, match=r"site\.json: not JSON: .*line 1 column 2"):
        load_site(path)
    path.write_text(json.dumps(dump_site(default_site())))
    assert load_site(path) == default_site()
