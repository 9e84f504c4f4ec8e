"""What the host, sudo, pct or lxc-attach mean when they refuse, told by their stderr text.

Their exit statuses say nothing: 255, 2 and 1 are shared by many causes (pct dies with errno).
"""

import re
from collections.abc import Callable

from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    RefusedError,
    StateUnknownError,
    TrustError,
    UsageError,
)
from dflashctl.transport.base import Finished, readable

_SUDOERS = "allow it on the host: echo 'USER ALL=(root) NOPASSWD: /usr/sbin/pct' > /etc/sudoers.d/"


def refusal(finished: Finished, place: str) -> DflashctlError | None:
    """Return the error that the stderr of a command that never began stands for, or None."""
    text = readable(finished.stderr)
    for pattern, make in _REFUSALS:
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            return make(found.group(0).strip(), place)
    return None


def _host(place: str) -> str:
    return place.split("/", 1)[0]


def _vmid(place: str) -> str:
    return place.partition("/")[2] or "VMID"


def _down(line: str, place: str) -> DflashctlError:
    return ContainerDownError(
        f"the container is not running ({line})",
        place=place,
        hint=f"start it, on {_host(place)}: pct start {_vmid(place)}",
    )


def _unknown_container(line: str, place: str) -> DflashctlError:
    return UsageError(
        f"there is no such container on this host ({line})",
        place=place,
        code="no-container",
        hint=f"on {_host(place)}, see `pct list`, and correct the vmid in hosts.yaml; in a cluster "
        "the container may stand on another node",
    )


def _locked(line: str, place: str) -> DflashctlError:
    return RefusedError(
        f"the container is locked ({line})",
        place=place,
        code="container-locked",
        hint="a backup, snapshot or migration holds it; wait and run the command again",
    )


def _bad_arguments(line: str, place: str) -> DflashctlError:
    return UsageError(
        f"pct does not accept the command ({line})",
        place=place,
        code="pct-usage",
        hint=f"on {_host(place)}, see `pct help exec`; is the vmid in hosts.yaml right?",
    )


def _not_root(line: str, place: str) -> DflashctlError:
    return TrustError(
        f"pct needs root ({line})",
        place=place,
        code="become",
        hint=f"log in as root, or set `become: sudo` in hosts.yaml and {_SUDOERS}dflashctl",
    )


def _sudo_refused(line: str, place: str) -> DflashctlError:
    return TrustError(
        f"sudo does not allow pct without a password ({line})",
        place=place,
        code="become",
        hint=f"{_SUDOERS}dflashctl (who may run pct is root there), or log in as root",
    )


def _no_sudo(line: str, place: str) -> DflashctlError:
    return TrustError(
        f"there is no sudo on the host ({line})",
        place=place,
        code="become",
        hint="log in as root (address: root@...), or install sudo on the host",
    )


def _no_pct(line: str, place: str) -> DflashctlError:
    return UsageError(
        f"the host has no pct ({line})",
        place=place,
        code="no-pct",
        hint="it is no Proxmox VE node; for a machine without containers name the container "
        "`self` in hosts.yaml",
    )


def _no_program(line: str, place: str) -> DflashctlError:
    return UsageError(
        f"a program that every script needs is missing there ({line})",
        place=place,
        code="no-program",
        hint="bash and coreutils must be installed in the container: apt install bash coreutils",
    )


def _cut_short(line: str, place: str) -> DflashctlError:
    return StateUnknownError(
        f"the script did not arrive whole and was not run ({line})",
        place=place,
        hint="run the same command again",
    )


_REFUSALS: tuple[tuple[str, Callable[[str, str], DflashctlError]], ...] = (
    (r"^.*(not running!|Failed to get init pid|is not running).*$", _down),
    (r"^.*Configuration file '.*' does not exist.*$", _unknown_container),
    (r"^.*(CT is locked|can't lock file).*$", _locked),
    (r"^please run as root.*$", _not_root),
    (
        r"^.*(a password is required|must have a tty|is not allowed to (run|execute)).*$",
        _sudo_refused,
    ),
    (r"^.*(is not in the sudoers file|may not run sudo).*$", _sudo_refused),
    (r"^.*sudo: (command )?not found.*$", _no_sudo),
    (r"^.*(/usr/sbin/pct: (No such file|not found)|/usr/sbin/pct: command not found).*$", _no_pct),
    (r"^.*sudo: /usr/sbin/pct: command not found.*$", _no_pct),
    (r"^.*unable to parse.*$", _bad_arguments),
    (r"^.*(400 \S.*|missing command at .*)$", _bad_arguments),
    (r"^dflashctl: script cut short$", _cut_short),
    (r"^.*(bash|env|head)\W?: (No such file|(command )?not found).*$", _no_program),
    (r"^.*lxc-attach: .*(No such file or directory).*$", _no_program),
)
