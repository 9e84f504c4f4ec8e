"""The lab from the command line, without dflashctl's own: python -m dflashctl.lab --help."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflashctl.errors import DflashctlError
from dflashctl.lab.faults import describe_faults
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import SiteSpec, default_site, load_site


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(Lab(arguments.state), arguments)
    except DflashctlError as error:
        sys.stderr.write(f"{error}\n" + (f"  next: {error.hint}\n" if error.hint else ""))
        return int(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflashctl.lab", description=__doc__)
    parser.add_argument(
        "--state", type=Path, default=Path(".lab"), help="state directory (default: .lab)"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a site")
    up.add_argument("--site", type=Path, help="JSON file with other hosts than the default ones")
    up.add_argument("--workspace", default="64m", help="size of kpro6/200's /workspace (64m)")
    up.add_argument("--python", help="make this interpreter visible in all containers")
    up.add_argument("--expose", action="append", default=[], help="a path to show, read-only")
    verbs.add_parser("down", help="end it and remove its files")
    verbs.add_parser("status", help="what runs")
    hosts = verbs.add_parser("hosts", help="print a hosts.yaml for this lab")
    hosts.add_argument("--python", default="/usr/bin/python3")
    hosts.add_argument("--cpu", action="store_true", help="roles are threads on the CPU")
    fault = verbs.add_parser(
        "fault",
        help="break something",
        epilog="faults:\n" + describe_faults(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fault.add_argument("host")
    fault.add_argument("name")
    fault.add_argument("value", nargs="?", default="")
    run = verbs.add_parser("run", help="run a command on the lab's LAN: run -- CMD ...")
    run.add_argument("argv", nargs="+")
    return parser


def _run(lab: Lab, arguments: argparse.Namespace) -> int:
    if arguments.verb == "up":
        return _up(lab, arguments)
    if arguments.verb == "down":
        lab.down()
    elif arguments.verb == "status":
        return _status(lab)
    elif arguments.verb == "hosts":
        sys.stdout.write(lab.hosts_yaml(python=arguments.python, cpu=arguments.cpu))
    elif arguments.verb == "fault":
        lab.fault(arguments.host, arguments.name, arguments.value)
    else:
        argv = lab.lan_command(arguments.argv)
        os.execvp(argv[0], argv)  # noqa: S606  the terminal and the exit status are the command's
    return 0


def _up(lab: Lab, arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    site = load_site(arguments.site) if arguments.site else default_site(arguments.workspace)
    lab.up(_with_exposed(site, arguments))
    took_s = time.monotonic() - started
    first = next(iter(site.hosts))
    sys.stdout.write(f"up in {took_s:.2f} s: ssh -F {lab.ssh_config} {first} pct list\n")
    return 0


def _with_exposed(site: SiteSpec, arguments: argparse.Namespace) -> SiteSpec:
    paths = [*map(os.path.abspath, arguments.expose)]
    if arguments.python:
        paths += python_paths(arguments.python)
    return replace(site, expose=(*site.expose, *paths))


def _status(lab: Lab) -> int:
    status = lab.status()
    sys.stdout.write("up\n" if status.up else "down\n")
    for host in status.hosts:
        containers = ", ".join(f"{vmid} {what}" for vmid, what in host.containers.items())
        faults = ", ".join(f"{name} {value}" for name, value in host.faults.items()) or "none"
        sys.stdout.write(
            f"{host.name}: 127.0.0.1:{host.port} or {host.ip}:22, pid {host.pid}; "
            f"containers {containers or 'none'}; faults {faults}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
