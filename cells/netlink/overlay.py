"""VXLAN and Geneve devices in collect-metadata mode: made, found, changed, removed. WireGuard's: made.

Formats: linux/if_link.h, IFLA_VXLAN_*, IFLA_GENEVE_*; tests compare them with pyroute2's, byte by byte.
Each call is one exchange over a socket of its own, for a worker thread. Calls raise NetlinkError.
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
    """A link, and what there is to it if it is a VXLAN or Geneve device; else port 0, (0, 0) and False."""

    ifindex: int
    kind: str
    up: bool
    mtu: int
    port: int
    source_ports: tuple[int, int]
    """The range that it sends from; (0, 0): the kernel's choice."""
    metadata: bool
    """Whether it takes the other end from each packet."""


class OverlayLinks:
    """The devices of a namespace; no state of its own."""

    def find(self, name: str) -> FoundOverlay | None:
        """The link of that name, whatever its kind."""
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
        """Make a device, down. EEXIST: the name is taken; EOPNOTSUPP: the kernel has none of the kind."""
        with connected() as connection:
            connection.run(new_overlay(kind, name, mtu, port, source_ports))

    def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """The MTU, and up; repeating it changes nothing. EADDRINUSE: another socket has the device's port."""
        with connected() as connection:
            connection.run(mtu_and_up(ifindex, name, mtu))

    def delete(self, ifindex: int) -> None:
        """Remove a link; a missing one is fine."""
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
        """A route in place of another one to there. Of the kernel's protocol, as Cilium's.

        What manages routes by their protocol, like systemd-networkd, leaves these alone.
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
        """Remove a route of that protocol; a missing one is fine."""
        with connected() as connection:
            connection.run(m.delete_route(ifindex, destination, m.RTPROT_KERNEL))


def create_wireguard(name: str, mtu: int) -> None:
    """Make a WireGuard device, down. EOPNOTSUPP: the kernel has none; EEXIST: the name is taken."""
    body = m.LINK.pack(0, 0, 0, 0, 0) + text(m.IFLA_IFNAME, name) + u32(m.IFLA_MTU, mtu)
    body += attribute(m.IFLA_LINKINFO, text(m.IFLA_INFO_KIND, "wireguard"))
    with connected() as connection:
        connection.run(Request(f"create {name}", m.RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body))


def new_overlay(kind: str, name: str, mtu: int, port: int, source_ports: tuple[int, int]) -> Request:
    """The message of :meth:`OverlayLinks.create`: it learns nothing, packets carry their destination.

    ``kind``: vxlan or geneve; ``source_ports`` are VXLAN's alone.
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
    """The message of :meth:`OverlayLinks.set_up`."""
    body = m.LINK.pack(0, 0, ifindex, m.IFF_UP, m.IFF_UP) + u32(m.IFLA_MTU, mtu)
    return Request(f"set up {name}", m.RTM_SETLINK, 0, body)


def read_overlay(message: Message) -> FoundOverlay:
    """The link of an RTM_NEWLINK."""
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
