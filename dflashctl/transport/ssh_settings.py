"""What the user's ssh_config says about a host: asked of `ssh -G`, the only complete reader.

paramiko's reader knows no Include and half of the keywords, so it serves only where there is no
ssh program.
"""

import functools
import getpass
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import ConfigurationError, UnreachableError
from dflashctl.inventory import Host

UNRESOLVED_HINT = (
    "correct the name in hosts.yaml (address, jump) or ssh_config (HostName); or is a VPN down?"
)
_ASK_S = 15.0  # ssh -G may run a `Match exec`


@dataclass(frozen=True)
class SshSettings:
    """One hop, resolved: where to connect, as whom, with which keys and known_hosts files."""

    hostname: str
    user: str
    port: int
    identity_files: tuple[str, ...]  # that exist
    identities_only: bool
    proxy_jump: str | None
    proxy_command: str | None
    known_hosts: tuple[Path, ...]  # the first one takes new keys
    host_key_alias: str | None


def split_address(address: str) -> tuple[str | None, str]:
    """Split ``user@name``."""
    user, at, name = address.rpartition("@")
    return (user if at else None), name


def resolve(host: Host) -> SshSettings:
    """Return the settings of ``host``; hosts.yaml wins over ssh_config.

    Raises: ConfigurationError when ssh_config cannot be read or a named key file is missing.
    """
    found = _lookup(host.address, host.port, host.ssh_config, host.name)
    user, name = split_address(host.address)
    hostname = _first(found, "hostname") or name
    remote_user = user or _first(found, "user") or getpass.getuser()
    tokens = {"%": "%", "d": str(Path.home()), "h": hostname, "r": remote_user}
    tokens |= {"u": getpass.getuser(), "n": name}

    def path(text: str) -> str:
        expanded = re.sub("%([%dhrun])", lambda match: tokens[match[1]], text)
        return os.path.expanduser(expanded)  # noqa: PTH111 - pathlib fails on an unknown ~user

    identities = [path(item) for item in found.get("identityfile", [])]
    if host.identity_file is not None:
        if not Path(host.identity_file).is_file():
            raise ConfigurationError(
                f"the identity_file {host.identity_file} does not exist",
                place=host.name,
                hint="correct identity_file in hosts.yaml, or leave it out",
            )
        identities = [host.identity_file]
    known = _words(found, "userknownhostsfile") or ["~/.ssh/known_hosts"]
    known = [host.known_hosts] if host.known_hosts else [path(item) for item in known]
    known += [path(item) for item in _words(found, "globalknownhostsfile")]
    jump = host.jump or _first(found, "proxyjump")
    command = None if jump else _first(found, "proxycommand")
    return SshSettings(
        hostname=hostname,
        user=remote_user,
        port=host.port or int(_first(found, "port") or 22),
        identity_files=tuple(item for item in identities if Path(item).is_file()),
        identities_only=host.identity_file is not None or _first(found, "identitiesonly") == "yes",
        proxy_jump=None if jump == "none" else jump,
        proxy_command=None if command == "none" else command,
        known_hosts=tuple(Path(item) for item in known),
        host_key_alias=_first(found, "hostkeyalias"),
    )


def _first(found: dict[str, list[str]], key: str) -> str | None:
    return found[key][0] if found.get(key) else None


def _words(found: dict[str, list[str]], key: str) -> list[str]:
    return [word for line in found.get(key, []) for word in line.split() if word != "none"]


@functools.lru_cache(maxsize=64)
def _lookup(
    address: str, port: int | None, ssh_config: str | None, place: str
) -> dict[str, list[str]]:
    """Return keyword (lower case) -> values of the host's ssh_config."""
    if shutil.which("ssh") is None:
        return _lookup_paramiko(address, ssh_config)
    argv = ["ssh", "-G", *(["-F", ssh_config] if ssh_config else [])]
    argv += ["-p", str(port)] if port else []
    try:
        answer = subprocess.run(
            [*argv, "--", address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"`ssh -G {address}` gave no answer within {_ASK_S:g} s",
            place=place,
            code="timeout",
            hint="does a `Match exec` of ssh_config hang?",
        ) from None
    if answer.returncode != 0:
        raise ConfigurationError(
            f"ssh cannot read its configuration: {answer.stderr.strip()}",
            place=place,
            hint=f"try: {shlex.join([*argv, address])}",
        )
    found: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value)
    return found


def _lookup_paramiko(address: str, ssh_config: str | None) -> dict[str, list[str]]:
    import paramiko

    config = paramiko.SSHConfig()
    names = [ssh_config] if ssh_config else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    for file in (Path(name).expanduser() for name in names):
        if file.is_file():
            config.parse(file.read_text("utf-8", "replace").splitlines())
    answer = config.lookup(split_address(address)[1])
    return {key: value if isinstance(value, list) else [value] for key, value in answer.items()}
