"""SSH through Fabric: it opens and authenticates; host keys and the byte loop are our own.

Left to itself Fabric accepts any host key and reads no known_hosts; here an unknown key is
refused unless it was asked to be recorded, and a changed one always.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflashctl.command import quote
from dflashctl.errors import ConfigurationError, DflashctlError, TrustError, UnreachableError
from dflashctl.inventory import Host
from dflashctl.transport.base import Finished, Sink, Transport
from dflashctl.transport.channel import ChannelRun, Heartbeat
from dflashctl.transport.child import Limits, Sinks
from dflashctl.transport.greeting import NO_GREETING, open_patiently
from dflashctl.transport.known_hosts import (
    KnownKey,
    add_key,
    find_keys,
    fingerprint,
    host_key_name,
)
from dflashctl.transport.ssh_settings import UNRESOLVED_HINT, SshSettings, resolve
from dflashctl.transport.trust import (
    changed_key_error,
    login_error,
    revoked_key_error,
    unknown_key_error,
)

if TYPE_CHECKING:
    import paramiko

_TCP_USER_TIMEOUT_MS = 30_000  # unacknowledged data for so long: the kernel gives the socket up
_MAX_HOPS = 8


class FabricTransport(Transport):
    """Runs argv on a host over one connection that Fabric opened."""

    def __init__(
        self, host: Host, *, accept_new: bool = False, alive_interval_s: float = 15.0
    ) -> None:
        self._host = host
        self._accept_new = accept_new
        self._alive_interval_s = alive_interval_s
        self._hops: list[Any] = []  # fabric.Connection, the host itself last
        self._heartbeat: Heartbeat | None = None
        self._opening = threading.Lock()
        self.place = host.name
        self.round_trips = 0

    def open(self) -> None:
        """Connect through the jump hosts and log in; who comes meanwhile waits for it."""
        with self._opening:
            if self._hops:
                return
            logging.getLogger("paramiko").addHandler(logging.NullHandler())  # it prints tracebacks
            open_patiently(self._open_hops)
            self._heartbeat = Heartbeat(self._link, self._alive_interval_s)

    def execute(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        on_stdout: Sink,
        deadline_s: float | None,
        silence_s: float | None = None,
        on_stderr: Sink | None = None,
    ) -> Finished:
        """Run ``argv`` on a channel of the connection."""
        self.open()
        self.round_trips += 1
        limits = Limits(self.place, deadline_s, silence_s)
        sinks = Sinks(on_stdout, on_stderr)
        return ChannelRun(self._link, self.place, limits).run(quote(argv), stdin, sinks)

    def interactive(self, argv: Sequence[str]) -> int:
        """Run ``argv`` on the user's terminal, by the ssh program."""
        from dflashctl.transport.openssh import ssh_interactive

        return ssh_interactive(self._host, argv, accept_new=self._accept_new)

    def close(self) -> None:
        """Close the connection and its jump hosts."""
        self._close_hops()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    @property
    def _link(self) -> "paramiko.Transport":
        link: paramiko.Transport = self._hops[-1].client.get_transport()
        return link

    def _close_hops(self) -> None:
        while self._hops:
            self._hops.pop().client.close()  # Fabric's close skips a connection that half opened

    def _open_hops(self) -> None:
        # `ssh -G` works in a process of its own meanwhile
        threading.Thread(target=_import_fabric, daemon=True, name="import-fabric").start()
        route = _route(self._host, num_hops=1)
        gateway: Any = route[0][1].proxy_command
        try:
            for host, settings in route:
                self._open_one(host, settings, gateway)
                gateway = self._hops[-1]
        except BaseException:
            self._close_hops()
            raise
        self.user = route[-1][1].user

    def _open_one(self, host: Host, settings: SshSettings, gateway: Any) -> None:
        import fabric
        import paramiko

        keys = find_keys(settings.known_hosts, _known_name(settings))
        connection = fabric.Connection(
            host=settings.hostname,
            user=settings.user,
            port=settings.port,
            gateway=gateway,
            connect_timeout=host.connect_timeout_s,
            # lazy, and an SSHConfig of its own: no ~/.fabric.yaml, and ssh -G has read ssh_config
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            connect_kwargs=_connect_arguments(host, settings, keys),
        )
        self._hops.append(connection)
        policy = _check_policy(host, settings, keys, accept_new=self._accept_new)
        connection.client.set_missing_host_key_policy(policy)
        started_s = time.monotonic()
        try:
            connection.open()
        except DflashctlError:
            raise
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            link = connection.client.get_transport()
            # The host key was accepted: what failed is the login, such as a key file that cannot
            # be read or MaxAuthTries, for which paramiko has a dozen exceptions.
            at_login = link is not None and link.initial_kex_done
            failed = _open_error(error, host, settings, at_login=at_login)
            hung_up = "SSH protocol banner" in str(error) or isinstance(error, ConnectionResetError)
            if hung_up and time.monotonic() - started_s < host.connect_timeout_s:
                failed.code = NO_GREETING
            raise failed from error


def _import_fabric() -> None:
    """Import what opening needs; an import that fails, fails again where it is needed."""
    with suppress(ImportError):
        import fabric  # noqa: F401


def _route(host: Host, num_hops: int) -> list[tuple[Host, SshSettings]]:
    """Return the hosts to connect to one through the other, ``host`` itself last.

    As ssh does: of several jump hosts only the first has its own ProxyJump honoured.
    """
    if num_hops > _MAX_HOPS:
        raise ConfigurationError(
            f"more than {_MAX_HOPS} jump hosts", place=host.name, hint="do they lead in a circle?"
        )
    settings = resolve(host)
    jumps = [jump for jump in (settings.proxy_jump or "").split(",") if jump]
    route: list[tuple[Host, SshSettings]] = []
    for jump in jumps:
        hop = _jump_host(host, jump)
        route += [(hop, resolve(hop))] if route else _route(hop, num_hops + 1)
    return [*route, (host, settings)]


def _jump_host(host: Host, jump: str) -> Host:
    """Return the jump host ``[user@]name[:port]`` as a Host that is resolved in its own right."""
    address, port = jump.removeprefix("ssh://"), None
    name, colon, digits = address.rpartition(":")
    if colon and digits.isdecimal() and (":" not in name or name.endswith("]")):
        address, port = name.replace("[", "").replace("]", ""), int(digits)
    # as for ssh -J: key and known_hosts of the jump host are those of ssh_config
    return replace(
        host, address=address, port=port, jump=None, identity_file=None, known_hosts=None
    )


def _known_name(settings: SshSettings) -> str:
    return settings.host_key_alias or host_key_name(settings.hostname, settings.port)


def _connect_arguments(
    host: Host, settings: SshSettings, keys: Sequence[KnownKey]
) -> dict[str, Any]:
    """Return what paramiko's connect takes beside the address: keys, limits, the transport."""
    return {
        "key_filename": list(settings.identity_files),
        "allow_agent": not settings.identities_only,
        "look_for_keys": False,  # ssh -G names the default ones
        "banner_timeout": host.connect_timeout_s,
        "auth_timeout": max(host.connect_timeout_s, 10.0),
        "channel_timeout": host.connect_timeout_s,
        "transport_factory": _transport_factory(keys),
    }


def _transport_factory(keys: Sequence[KnownKey]) -> Callable[..., "paramiko.Transport"]:
    """Return a maker of transports that ask for a host key of a kind that is on record.

    Without it a host that has several keys offers one that known_hosts lacks.
    """

    def make(sock: Any, **arguments: Any) -> "paramiko.Transport":
        import paramiko

        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, _TCP_USER_TIMEOUT_MS)
            sock = _PromptSocket(sock)
        transport = paramiko.Transport(sock, **arguments)
        known = {key.key_type for key in keys if not key.revoked}
        if "ssh-rsa" in known:
            known |= {"rsa-sha2-512", "rsa-sha2-256"}
        options = transport.get_security_options()
        kinds = list(options.key_types)
        options.key_types = sorted(kinds, key=lambda kind: kind not in known)
        return transport

    return make


class _PromptSocket:
    """A socket that acknowledges at once what it has read.

    sshd tells its host keys after the login, and by Nagle's rule nothing more until that is
    acknowledged, which the kernel here puts off by 40 ms. The option holds for one packet only.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._option = getattr(socket, "TCP_QUICKACK", None)  # Linux only

    def recv(self, size: int) -> bytes:
        """Read as a socket does."""
        data = self._sock.recv(size)
        if data and self._option is not None:
            self._sock.setsockopt(socket.IPPROTO_TCP, self._option, 1)
        return data

    def __getattr__(self, name: str) -> Any:
        """Return what a socket has beside."""
        return getattr(self._sock, name)


def _check_policy(
    host: Host, settings: SshSettings, keys: Sequence[KnownKey], *, accept_new: bool
) -> "paramiko.MissingHostKeyPolicy":
    """Return a policy that decides about every host key: the client itself is given none."""
    import paramiko

    class Check(paramiko.MissingHostKeyPolicy):
        def missing_host_key(
            self, client: "paramiko.SSHClient", hostname: str, key: "paramiko.PKey"
        ) -> None:
            del client, hostname
            _check_key(host, settings, keys, key)
            if not any(known.blob == key.asbytes() for known in keys):
                _accept_unknown(host, settings, key, accept_new=accept_new)

    return Check()


def _check_key(
    host: Host, settings: SshSettings, keys: Sequence[KnownKey], key: "paramiko.PKey"
) -> None:
    """Raise TrustError for a revoked key, and for one that differs from all on record."""
    blob = key.asbytes()
    for known in keys:
        if known.revoked and known.blob == blob:
            raise revoked_key_error(host.name, recorded=f"{fingerprint(blob)} in {known.place}")
    standing = [known for known in keys if not known.revoked]
    if not standing or any(known.blob == blob for known in standing):
        return
    nearest = next((k for k in standing if k.key_type == key.get_name()), standing[0])
    raise changed_key_error(
        host.name,
        recorded=f"{nearest.key_type} {fingerprint(nearest.blob)} ({nearest.place})",
        offered=f"{key.get_name()} {fingerprint(blob)}",
        removal=f"ssh-keygen -f {nearest.file} -R '{_known_name(settings)}'",
    )


def _accept_unknown(
    host: Host, settings: SshSettings, key: "paramiko.PKey", *, accept_new: bool
) -> None:
    offered = f"{key.get_name()} {fingerprint(key.asbytes())}"
    if not accept_new:
        raise unknown_key_error(host.name, offered=offered, ssh_line=host.ssh_line)
    file = settings.known_hosts[0]
    try:
        add_key(file, _known_name(settings), key.get_name(), key.asbytes())
    except OSError as error:
        raise TrustError(
            f"the host key cannot be recorded in {file}: {error.strerror}",
            place=host.name,
            hint="known_hosts in hosts.yaml names another file",
        ) from error


def _open_error(
    error: Exception, host: Host, settings: SshSettings, *, at_login: bool
) -> DflashctlError:
    """Return the error that paramiko's or the system's own stands for."""
    import paramiko

    words = str(error) or type(error).__name__
    if words == "No existing session":  # paramiko's words for MaxAuthTries and for a stalled start
        words = "it hung up after too many keys were tried" if at_login else "it fell silent"
    if at_login or isinstance(error, paramiko.AuthenticationException):
        tried = ", ".join(settings.identity_files) or "no key file"
        agent = "" if settings.identities_only else f" and {_num_agent_keys()} keys of the agent"
        why = f"{words.rstrip('.')} (user {settings.user}; tried {tried}{agent})"
        files = settings.identity_files
        return login_error(host.name, why=why, ssh_line=host.ssh_line, key_files=files)
    where = f"{settings.hostname}:{settings.port}"
    hint = f"try: {host.ssh_line} true"
    if isinstance(error, (socket.gaierror, UnicodeError)):  # UnicodeError: not even a name
        return UnreachableError(
            f"the name {settings.hostname} cannot be resolved",
            place=host.name,
            hint=UNRESOLVED_HINT,
        )
    if isinstance(error, TimeoutError):
        words = f"no answer within {host.connect_timeout_s:g} s"
    elif isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        words = "connection refused, or no route"
    return UnreachableError(f"{where}: {words}", place=host.name, hint=hint)


def _num_agent_keys() -> int:
    import paramiko

    agent = paramiko.Agent()
    try:
        return len(agent.get_keys())
    except paramiko.SSHException:
        return 0
    finally:
        agent.close()
