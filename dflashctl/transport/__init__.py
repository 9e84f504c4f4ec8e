"""Ways to a place: SSH by Fabric or OpenSSH, the machine itself, and into containers by pct.

paramiko and fabric are imported only when a connection of that kind is opened.
"""

from dflashctl.inventory import Host, Place
from dflashctl.transport.base import Script, ScriptResult, Sink, Transport
from dflashctl.transport.frame import relay_script, run_script, stream_script

__all__ = [
    "Script",
    "ScriptResult",
    "Sink",
    "Transport",
    "connect",
    "connect_host",
    "relay_script",
    "run_script",
    "stream_script",
]


def connect(place: Place, *, accept_new: bool = False) -> Transport:
    """Return an opened way into the container of ``place`` (or the host, for ``self``).

    ``accept_new`` records the key of a host that known_hosts does not name; a changed key is
    refused all the same. One call a thread: a transport is never shared.
    Raises: UnreachableError, TrustError, ConfigurationError.
    """
    way = _way(place.host, accept_new=accept_new)
    if place.container.vmid is None:
        way.place = place.container.label
    else:
        from dflashctl.transport.pct import PctTransport

        way = PctTransport(way, place.container.vmid, place.host.become)
    way.open()
    return way


def connect_host(host: Host, *, accept_new: bool = False) -> Transport:
    """Return an opened way to the node itself. Raises: as connect."""
    way = _way(host, accept_new=accept_new)
    way.open()
    return way


def _way(host: Host, *, accept_new: bool) -> Transport:
    if host.backend == "local":
        from dflashctl.transport.local import LocalTransport

        return LocalTransport(host.name)
    if host.backend == "openssh":
        from dflashctl.transport.openssh import OpensshTransport

        return OpensshTransport(host, accept_new=accept_new)
    from dflashctl.transport.fabric_ssh import FabricTransport

    return FabricTransport(host, accept_new=accept_new)
