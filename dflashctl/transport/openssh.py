"""The ssh program as the way: it honours all of ssh_config, and its connection stays open.

`open` brings up a master connection (ControlPersist) that later commands, also of later dflashctl
processes, share; so connection errors appear there, apart from those of commands.
"""

import base64
import binascii
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from dflashctl.command import quote
from dflashctl.errors import (
    ConfigurationError,
    DflashctlError,
    StateUnknownError,
    TrustError,
    UnreachableError,
    UsageError,
)
from dflashctl.inventory import Host
from dflashctl.transport.base import Finished, Sink, Transport, readable
from dflashctl.transport.child import Limits, Sinks, run_child
from dflashctl.transport.greeting import NO_GREETING, open_patiently
from dflashctl.transport.known_hosts import fingerprint
from dflashctl.transport.ssh_settings import UNRESOLVED_HINT, resolve
from dflashctl.transport.trust import (
    changed_key_error,
    login_error,
    revoked_key_error,
    unknown_key_error,
)

PERSIST_S = 60
MAX_SOCKET_PATH_BYTES = 104  # sun_path of macOS; Linux has 108
_TEMPORARY_SUFFIX_BYTES = 17  # ssh makes the socket under PATH.<16 letters> first

_LINK_LOST = re.compile(
    r"closed by remote host|Connection reset|Broken pipe|not responding|Connection to \S+ closed"
    r"|mux_client_\w+: |master .*(exited|died)|Connection timed out|Connection refused"
    r"|kex_exchange_identification|Could not resolve hostname|No route to host"
)


def ssh_options(host: Host, *, accept_new: bool) -> list[str]:
    """Return the arguments of ssh that hosts.yaml asks for, without the destination."""
    strict = "accept-new" if accept_new else "yes"
    options = ["-F", host.ssh_config] if host.ssh_config else []
    options += [
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
        "-o",
        f"StrictHostKeyChecking={strict}",
    ]
    options += ["-o", f"ConnectTimeout={max(1, round(host.connect_timeout_s))}"]
    options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    # what ssh_config may hold for people's own logins
    options += ["-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"]
    options += ["-o", "ForwardAgent=no", "-o", "ForwardX11=no"]
    if host.port:
        options += ["-p", str(host.port)]
    if host.jump:
        options += ["-J", host.jump]
    if host.identity_file:
        # not -i: it looks for the file before it turns %% into %
        options += ["-o", f'IdentityFile="{_no_tokens(host.identity_file)}"']
        options += ["-o", "IdentitiesOnly=yes"]
    if host.known_hosts:
        options += ["-o", f'UserKnownHostsFile="{_no_tokens(host.known_hosts)}"']
    return options


def _no_tokens(path: str) -> str:
    """Keep ssh from expanding %h and the like in ``path``."""
    return path.replace("%", "%%")


def ssh_interactive(host: Host, argv: Sequence[str], *, accept_new: bool) -> int:
    """Run ``argv`` on ``host`` with the user's terminal and return its own exit status.

    Raises: UsageError without ssh; UnreachableError, TrustError, StateUnknownError when ssh failed.
    """
    options = ssh_options(host, accept_new=accept_new)
    with tempfile.NamedTemporaryFile(prefix="dflashctl-ssh-") as log:
        # ssh's own 255 and the command's look alike; its log alone tells them apart. The first
        # value of an option counts, and a master of the user's would do the logging itself.
        telling = ["-E", log.name, "-o", "LogLevel=DEBUG1", "-o", "ControlPath=none"]
        argv = ["ssh", *telling, *options, "-t", "--", host.address, quote(argv)]
        try:
            status = subprocess.call(argv)
        except FileNotFoundError as error:
            raise _no_ssh(host) from error
        told = log.read().decode("utf-8", "replace")
    if status == 255 and not re.search(r"Exit status \d", told):
        raise _interactive_error(told, host)
    return status


def _interactive_error(told: str, host: Host) -> DflashctlError:
    """Return the error of an ssh that ended without the command's exit status."""
    lines = [line for line in told.splitlines() if not line.startswith("debug1:")]
    if "Authenticated to " not in told:
        return connection_error("\n".join(lines), host)
    return StateUnknownError(
        f"the connection was lost: {lines[-1].strip() if lines else 'ssh said nothing'}",
        place=host.name,
        hint=f"the command may go on there; try: {host.ssh_line} true",
    )


class OpensshTransport(Transport):
    """Runs argv on a host through the ssh program and a shared master connection."""

    def __init__(self, host: Host, *, accept_new: bool = False) -> None:
        self._host = host
        self._accept_new = accept_new
        self._options = ssh_options(host, accept_new=accept_new)
        self._socket = _socket_path([*self._options, host.address])
        self._is_open = False
        self._opening = threading.Lock()
        self.place = host.name
        self.round_trips = 0

    def open(self) -> None:
        """Bring up the master connection, or find it alive; who comes meanwhile waits for it."""
        with self._opening:
            if self._is_open:
                return
            self.user = resolve(self._host).user
            if self._ssh("-O", "check").returncode != 0:
                open_patiently(self._start_master)
            self._is_open = True

    def _start_master(self) -> None:
        persist = ["-o", "ControlMaster=auto", "-o", f"ControlPersist={PERSIST_S}"]
        answer = self._ssh(*persist, "-n", "-T", command="true")
        if answer.returncode == 255:
            raise connection_error(answer.stderr.decode("utf-8", "replace"), self._host)

    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` over the master connection, or a new one should that have ended."""
        self.open()
        self.round_trips += 1
        command = [*self._argv("-o", "ControlMaster=no", "-T"), "--", self._host.address]
        limits = Limits(self.place, deadline_s, silence_s)
        sinks = Sinks(on_stdout, on_stderr)
        finished = run_child([*command, quote(argv)], stdin, sinks, limits, _environment())
        text = readable(finished.stderr)
        if finished.status == 255 and _LINK_LOST.search(text[-2000:]):
            raise UnreachableError(
                f"the connection was lost: {text[-300:]}",
                place=self.place,
                code="link-lost",
                hint=f"try: {self._host.ssh_line} true",
            )
        return finished

    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` on the user's terminal."""
        return ssh_interactive(self._host, argv, accept_new=self._accept_new)

    def close(self) -> None:
        """Leave the master to end by itself after ControlPersist: the next command is faster."""
        self._is_open = False

    def end_master(self) -> None:
        """End the shared master connection now."""
        self._ssh("-O", "exit")
        self._is_open = False

    def _argv(self, *options: str) -> list[str]:
        return ["ssh", *self._options, "-S", _no_tokens(str(self._socket)), *options]

    def _ssh(self, *options: str, command: str = "") -> subprocess.CompletedProcess[bytes]:
        argv = [*self._argv(*options), "--", self._host.address, *([command] if command else [])]
        limit_s = self._host.connect_timeout_s + 20
        try:
            return subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
                check=False,
                env=_environment(),
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise _no_ssh(self._host) from error
        except subprocess.TimeoutExpired:
            raise UnreachableError(
                f"ssh gave no answer within {limit_s:g} s",
                place=self.place,
                code="timeout",
                hint=f"try: {self._host.ssh_line} true",
            ) from None


def connection_error(stderr: str, host: Host) -> DflashctlError:
    """Return the error that ssh's own stderr stands for when it could not connect."""
    lines = [line for line in readable(stderr.encode()).splitlines() if line.strip(" @")]
    last = lines[-1].strip() if lines else "ssh ended with status 255 and said nothing"
    place, try_it = host.name, f"try: {host.ssh_line} true"
    if "IDENTIFICATION HAS CHANGED" in stderr:
        return _changed_key(stderr, host)
    if "REVOKED" in stderr:
        return revoked_key_error(place, recorded=last)
    if "host key is known" in stderr or "Host key verification failed" in stderr:
        return unknown_key_error(place, offered=lines[0].strip(), ssh_line=host.ssh_line)
    if "Permission denied (" in stderr or "Too many authentication failures" in stderr:
        files = resolve(host).identity_files
        return login_error(place, why=last, ssh_line=host.ssh_line, key_files=files)
    if re.search(r"Bad configuration option|Can't open user config|terminating, .* bad", stderr):
        return ConfigurationError(
            f"ssh cannot read its configuration: {last}",
            place=place,
            hint=f"try: {host.ssh_line} -G",
        )
    if "Could not resolve hostname" in stderr:
        try_it = UNRESOLVED_HINT
    code = NO_GREETING if "kex_exchange_identification" in stderr else None
    return UnreachableError(last, place=place, hint=try_it, code=code)


def _changed_key(stderr: str, host: Host) -> TrustError:
    sent = re.search(r"SHA256:[A-Za-z0-9+/]+", stderr)
    offending = re.search(r"^Offending .*key in (.+):(\d+)\s*$", stderr, re.MULTILINE)
    removal = re.search(r"ssh-keygen -f .*", stderr)
    recorded = "unknown"
    if offending:
        file, line = Path(offending[1]), int(offending[2])
        recorded = f"{_fingerprint_at(file, line)} ({file}:{line})"
    return changed_key_error(
        host.name,
        recorded=recorded,
        offered=sent[0] if sent else "unknown",
        removal=removal[0].strip() if removal else f"ssh-keygen -R {resolve(host).hostname}",
    )


def _fingerprint_at(file: Path, line: int) -> str:
    try:
        fields = file.read_text("utf-8", "replace").splitlines()[line - 1].split()
        return fingerprint(base64.b64decode(fields[2]))
    except (OSError, IndexError, binascii.Error):
        return "unknown"


def _socket_path(identity: Sequence[str]) -> Path:
    """Return a short path for the master's socket, one for each set of options.

    Every option counts: a master made with other known_hosts must not be taken for this one.
    """
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "dflashctl" if runtime else None
    room = MAX_SOCKET_PATH_BYTES - _TEMPORARY_SUFFIX_BYTES - len(f"/{digest}") - 1
    if directory is None or len(os.fsencode(directory)) > room or not _is_ours(directory):
        directory = Path(f"/tmp/dflashctl-{os.geteuid()}")  # noqa: S108 - owner and mode checked
        if not _is_ours(directory):
            raise UsageError(f"{directory} belongs to another user", hint="set XDG_RUNTIME_DIR")
    return directory / digest


def _is_ours(directory: Path) -> bool:
    """Make ``directory`` for us alone; false when it is someone else's or cannot be made."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_mode & 0o170077 == 0o040000


def _environment() -> dict[str, str]:
    """Without the laptop's locale, which ssh would send and the host may lack."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("LANG", "LANGUAGE") and not name.startswith("LC_")
    }


def _no_ssh(host: Host) -> UsageError:
    return UsageError(
        "the ssh program is not installed",
        place=host.name,
        hint="install openssh-client, or set `backend: fabric` in hosts.yaml",
    )
