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
    "enter",
    "relay_script",
    "run_script",
    "stream_script",
    "way_to",
]


def connect(place: Place, *, accept_new: bool = False) -> Transport:
    """Return an opened way into the container of ``place`` (or the host, for ``self``).

    ``accept_new`` records the key of a host that known_hosts does not name; a changed key is
    refused all the same.
    Raises: UnreachableError, TrustError, ConfigurationError.
    """
    way = enter(way_to(place.host, accept_new=accept_new), place)
    way.open()
    return way


def enter(node: Transport, place: Place) -> Transport:
    """Return the way from ``node`` into the container of ``place``: the node's own for ``self``.

    Both use one connection, which either of them opens.
    """
    if place.container.vmid is None:
        node.place = place.container.label
        return node
    from dflashctl.transport.pct import PctTransport

    return PctTransport(node, place.container.vmid, place.host.become)


def connect_host(host: Host, *, accept_new: bool = False) -> Transport:
    """Return an opened way to the node itself. Raises: as connect."""
    way = way_to(host, accept_new=accept_new)
    way.open()
    return way


def way_to(host: Host, *, accept_new: bool = False) -> Transport:
    """Return the way to the node itself, not opened yet."""
    if host.backend == "local":
        from dflashctl.transport.local import LocalTransport

        return LocalTransport(host.name)
    if host.backend == "openssh":
        from dflashctl.transport.openssh import OpensshTransport

        return OpensshTransport(host, accept_new=accept_new)
    from dflashctl.transport.fabric_ssh import FabricTransport

    return FabricTransport(host, accept_new=accept_new)
