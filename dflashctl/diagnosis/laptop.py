"""The checks of the laptop itself: the ssh program, keys, known_hosts and hosts.yaml."""

import os
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dflashctl import __version__
from dflashctl.diagnosis.check import Check, Checks
from dflashctl.errors import DflashctlError
from dflashctl.inventory import Host
from dflashctl.transport.known_hosts import find_keys, host_key_name
from dflashctl.transport.ssh_settings import SshSettings, resolve

PLACE = "laptop"
_MAX_AUTH_TRIES = 6  # sshd's default; each key that the agent offers counts as a try
_ASK_S = 10.0


def judge_laptop(inventory: Path, hosts: Sequence[Host]) -> list[Check]:
    """Return the checks of this machine for ``hosts``, which ``inventory`` was read for."""
    checks = Checks(PLACE)
    checks.ok("dflashctl", f"{__version__}, Python {platform.python_version()}")
    containers = sum(len(host.containers) for host in hosts)
    checks.ok("hosts.yaml", f"{inventory}: hosts {len(hosts)}, containers {containers}")
    remote = [host for host in hosts if host.backend != "local"]
    if not remote:
        checks.skip("ssh", "no host is reached by ssh")
        return checks.noted
    _program(checks, remote)
    settings = {host.name: _settings(checks, host) for host in remote}
    keys = _agent_keys(checks)
    for host in remote:
        found = settings[host.name]
        if found is not None:
            _known(checks, host, found)
            _keys(checks, host, found, keys)
    return checks.noted


def _program(checks: Checks, hosts: Sequence[Host]) -> None:
    ssh = shutil.which("ssh")
    if ssh is not None:
        said = _ask([ssh, "-V"])
        checks.ok("ssh", f"{ssh}: {said.stderr.strip() if said else 'no answer'}")
        return
    fix = "install openssh-client"
    needing = [host.name for host in hosts if host.backend == "openssh"]
    if needing:
        checks.fail("ssh", f"there is no ssh program, which {', '.join(needing)} needs", fix)
    else:
        checks.warn("ssh", "there is no ssh program: `attach` fails, Include is not read", fix)


def _settings(checks: Checks, host: Host) -> SshSettings | None:
    name = f"ssh config {host.name}"
    try:
        found = resolve(host)
    except DflashctlError as error:
        checks.fail(name, error.message, error.hint)
        return None
    jump = f" over {found.proxy_jump}" if found.proxy_jump else ""
    checks.ok(name, f"{found.user}@{found.hostname} port {found.port}{jump}")
    return found


def _agent_keys(checks: Checks) -> list[str]:
    """Return the types of the agent's keys; empty without an agent."""
    if not os.environ.get("SSH_AUTH_SOCK") or shutil.which("ssh-add") is None:
        checks.skip("ssh agent", "none runs (SSH_AUTH_SOCK is not set)")
        return []
    said = _ask(["ssh-add", "-L"])
    if said is None or said.returncode == 2:
        why = said.stderr.strip() if said else f"no answer within {_ASK_S:g} s"
        checks.warn("ssh agent", f"it cannot be asked: {why}", "eval $(ssh-agent); ssh-add")
        return []
    keys = [line.split()[0] for line in said.stdout.splitlines() if said.returncode == 0]
    checks.ok("ssh agent", f"{len(keys)} keys")
    return keys


def _known(checks: Checks, host: Host, settings: SshSettings) -> None:
    name = settings.host_key_alias or host_key_name(settings.hostname, settings.port)
    keys = find_keys(settings.known_hosts, name)
    title = f"host key {host.name}"
    if any(key.revoked for key in keys):
        checks.fail(title, f"marked @revoked ({keys[0].place})", "ask who revoked it")
    elif keys:
        checks.ok(title, f"{len(keys)} known for {name} ({keys[0].place})")
    else:
        fix = f"compare it with the host's own, then once: dflashctl doctor -l {host.name}"
        files = ", ".join(map(str, settings.known_hosts))
        checks.warn(title, f"none known for {name} ({files})", f"{fix} --accept-new")


def _keys(checks: Checks, host: Host, settings: SshSettings, agent: list[str]) -> None:
    title = f"keys {host.name}"
    fix = f"name the key of {host.name} in hosts.yaml: identity_file: ~/.ssh/NAME"
    if not settings.identities_only and len(agent) >= _MAX_AUTH_TRIES:
        found = f"the agent offers {len(agent)} keys, and sshd hangs up after {_MAX_AUTH_TRIES}"
        checks.warn(title, found, fix)
        return
    if not agent and not settings.identity_files:
        checks.warn(title, "no key file, and none in an agent: only a password could log in", fix)
        return
    for file in settings.identity_files:
        if open_to_others(Path(file)):
            found = f"{file} can be read by others; ssh does not use such a key"
            checks.fail(title, found, f"chmod 0600 {shlex.quote(file)}", ("chmod", "0600", file))
            return
    checks.ok(title, ", ".join(settings.identity_files) or "those of the agent")


def open_to_others(file: Path) -> bool:
    """Say whether others than the owner may do anything with a key file."""
    return bool(stat.S_IMODE(file.stat().st_mode) & 0o077)


def _ask(argv: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
