"""VXLAN and Geneve devices in collect-metadata mode, their routes, and WireGuard devices.

The tunnel and encryption cells use it. Formats: linux/if_link.h, IFLA_VXLAN_*, IFLA_GENEVE_*; tests compare
them with pyroute2's, byte by byte. Each call is one exchange over a new socket, for a worker thread, and
raises NetlinkError.
"""

import errno
import struct
from typing import Final

import msgspec

from cells.netlink import messages as m
from cells.netlink.connection import NetlinkError, connected
from cells.netlink.rows import read_link
from cells.netlink.wire import NLM_F_CREATE, NLM_F_EXCL, Message, Request, attribute, attributes, text, u32

__all__ = ["FoundOverlay", "OverlayLinks", "create_wireguard"]


IFLA_VXLAN_LEARNING, IFLA_VXLAN_PORT_RANGE, IFLA_VXLAN_PORT, IFLA_VXLAN_COLLECT_METADATA = 7, 10, 15, 25
IFLA_GENEVE_PORT, IFLA_GENEVE_COLLECT_METADATA = 5, 6

_PORT: Final = struct.Struct("!H")
_PORTS: Final = struct.Struct("!HH")


class FoundOverlay(msgspec.Struct, frozen=True):
    """A link; for VXLAN and Geneve devices also their settings, else port 0, (0, 0) and False."""

    ifindex: int
    kind: str
    up: bool
    mtu: int
    port: int
    source_ports: tuple[int, int]
    """The range of UDP source ports; (0, 0) for the kernel's default."""
    metadata: bool
    """Whether it is in collect-metadata mode: each packet's tunnel key names the remote end."""


class OverlayLinks:
    """Tunnel devices of the current namespace; stateless."""

    def find(self, name: str) -> FoundOverlay | None:
        """Return the link of this name, of any kind, or None."""
        try:
            with connected() as connection:
                return read_overlay(connection.run(m.get_link(name))[-1])
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def create(
        self, kind: str, name: str, mtu: int, port: int, source_ports: tuple[int, int] = (0, 0)
    ) -> None:
        """Create a device; it is down. EEXIST: the name is taken; EOPNOTSUPP: no kernel support."""
        with connected() as connection:
            connection.run(new_overlay(kind, name, mtu, port, source_ports))

    def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """Set the MTU and bring the device up; idempotent. EADDRINUSE: another socket has the UDP port."""
        with connected() as connection:
            connection.run(mtu_and_up(ifindex, name, mtu))

    def delete(self, ifindex: int) -> None:
        """Delete a link; a missing one is ignored."""
        with connected() as connection:
            connection.run(m.delete_link(ifindex))

    def set_route(
        self,
        ifindex: int,
        destination: m.IPNetwork,
        gateway: m.IPAddress | None,
        source: m.IPAddress | None,
        mtu: int,
    ) -> None:
        """Add or replace a route with protocol "kernel", as Cilium does.

        Programs that manage routes by protocol, such as systemd-networkd, leave such routes alone.
        """
        request = m.add_route(
            *(ifindex, destination),
            via=gateway,
            source=source,
            mtu=mtu,
            replace=True,
            protocol=m.RTPROT_KERNEL,
        )
        with connected() as connection:
            connection.run(request)

    def remove_route(self, ifindex: int, destination: m.IPNetwork) -> None:
        """Remove a route with protocol "kernel"; a missing one is ignored."""
        with connected() as connection:
            connection.run(m.delete_route(ifindex, destination, m.RTPROT_KERNEL))


def create_wireguard(name: str, mtu: int) -> None:
    """Create a WireGuard device; it is down. EOPNOTSUPP: no kernel support; EEXIST: the name is taken."""
    body = m.LINK.pack(0, 0, 0, 0, 0) + text(m.IFLA_IFNAME, name) + u32(m.IFLA_MTU, mtu)
    body += attribute(m.IFLA_LINKINFO, text(m.IFLA_INFO_KIND, "wireguard"))
    with connected() as connection:
        connection.run(Request(f"create {name}", m.RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body))


def new_overlay(kind: str, name: str, mtu: int, port: int, source_ports: tuple[int, int]) -> Request:
    """Encode the message of :meth:`OverlayLinks.create`: collect-metadata mode, without learning.

    ``kind`` is vxlan or geneve; ``source_ports`` applies to VXLAN only.
    """
    if kind == "geneve":
        data = attribute(IFLA_GENEVE_COLLECT_METADATA, b"") + attribute(IFLA_GENEVE_PORT, _PORT.pack(port))
    else:
        data = attribute(IFLA_VXLAN_COLLECT_METADATA, b"\1") + attribute(IFLA_VXLAN_LEARNING, b"\0")
        data += attribute(IFLA_VXLAN_PORT, _PORT.pack(port))
        if source_ports != (0, 0):
            data += attribute(IFLA_VXLAN_PORT_RANGE, _PORTS.pack(*source_ports))
    body = m.LINK.pack(0, 0, 0, 0, 0) + text(m.IFLA_IFNAME, name) + u32(m.IFLA_MTU, mtu)
    body += attribute(m.IFLA_LINKINFO, text(m.IFLA_INFO_KIND, kind) + attribute(m.IFLA_INFO_DATA, data))
    return Request(f"create {name} on UDP port {port}", m.RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body)


def mtu_and_up(ifindex: int, name: str, mtu: int) -> Request:
    """Encode the message of :meth:`OverlayLinks.set_up`."""
    body = m.LINK.pack(0, 0, ifindex, m.IFF_UP, m.IFF_UP) + u32(m.IFLA_MTU, mtu)
    return Request(f"set up {name}", m.RTM_SETLINK, 0, body)


def read_overlay(message: Message) -> FoundOverlay:
    """Decode an RTM_NEWLINK."""
    link = read_link(message)
    information = dict(attributes(dict(attributes(message.body, m.LINK.size)).get(m.IFLA_LINKINFO, b""), 0))
    data = dict(attributes(information.get(m.IFLA_INFO_DATA, b""), 0))
    port, ports, metadata = bytes(2), bytes(4), False
    if link.kind == "vxlan":
        port = data.get(IFLA_VXLAN_PORT, port)
        ports = data.get(IFLA_VXLAN_PORT_RANGE, ports)
        metadata = any(data.get(IFLA_VXLAN_COLLECT_METADATA, b""))
    elif link.kind == "geneve":
        port = data.get(IFLA_GENEVE_PORT, port)
        metadata = IFLA_GENEVE_COLLECT_METADATA in data  # a flag without a value
    (number,), (low, high) = _PORT.unpack(port), _PORTS.unpack(ports)
    return FoundOverlay(link.ifindex, link.kind, link.up, link.mtu, number, (low, high), metadata)
