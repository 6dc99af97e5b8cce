"""Every link, address and route of this network namespace, as ``ip`` shows them, and what
nftables has: for people who look.

Source: rtnetlink(7), linux/if_link.h, linux/if_addr.h, linux/rtnetlink.h.
Each function opens a socket of its own, for a worker thread, and raises NetlinkError or OSError.
"""

import os
import socket
import struct
from ipaddress import IPv4Network, IPv6Network
from typing import Final, NamedTuple

from cells.node.netlink import messages as m
from cells.node.netlink.connection import Connection, open_socket
from cells.node.netlink.rows import address_at, mtu_of, number_at, read_address, read_link, read_route
from cells.node.netlink.wire import NLM_F_DUMP, Message, Request, attributes

_IFLA_MASTER: Final = 10
_IFA_F_SECONDARY: Final = 0x01
_NETLINK_NETFILTER: Final = 12
_NFTABLES: Final = 10  # NFNL_SUBSYS_NFTABLES
_NFGENMSG: Final = struct.Struct(">BBH")  # family, version, resource


class LinkRow(NamedTuple):
    """A link. ``flags`` are those of linux/if.h; ``master`` is the index of its bridge or bond, or 0."""

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    flags: int
    master: int


class AddressRow(NamedTuple):
    """An address of a link, with its scope as in linux/rtnetlink.h."""

    ifindex: int
    address: m.IPAddress
    scope: int
    secondary: bool


class RouteRow(NamedTuple):
    """A route of any table; ``ifindex`` is 0 where it leads nowhere, or over several links."""

    table: int
    ifindex: int
    scope: int
    destination: m.IPNetwork
    source: m.IPAddress | None
    gateway: m.IPAddress | None


def list_links() -> list[LinkRow]:
    """Every link, pods' too."""
    return [_link(row) for row in _dump(m.dump_links())]


def list_addresses() -> list[AddressRow]:
    """Every address, link-local ones too, in the kernel's order."""
    return [row for row in map(_address, _dump(m.dump_addresses())) if row is not None]


def list_routes() -> list[RouteRow]:
    """Every route of every table, IPv4 and IPv6."""
    return [row for row in map(_route, _dump(m.dump_routes(socket.AF_UNSPEC))) if row is not None]


def foreign_routes() -> dict[m.IPNetwork, str]:
    """Destinations of unicast routes of the main table that the agent did not set for other nodes, and how
    each goes on. Its own have the kernel's protocol and a gateway or an MTU, as no route of the kernel has.
    """
    found: dict[m.IPNetwork, str] = {}
    for message in _dump(m.dump_routes(socket.AF_UNSPEC)):
        route = read_route(message)
        if route is None or (route.by_kernel and (route.gateway is not None or mtu_of(message))):
            continue
        device = f"over link {route.ifindex}" if route.ifindex else "over several links"
        found[route.destination] = f"via {route.gateway}" if route.gateway is not None else device
    return found


def _dump(request: Request) -> list[Message]:
    fd = open_socket(strict=True)
    try:
        return Connection(fd).dump(request)
    finally:
        os.close(fd)


def _link(message: Message) -> LinkRow:
    link = read_link(message)
    _, _, _, flags, _ = m.LINK.unpack_from(message.body)
    master = dict(attributes(message.body, m.LINK.size)).get(_IFLA_MASTER, b"")
    return LinkRow(link.ifindex, link.name, link.kind, link.mac, link.mtu, flags, number_at(master))


def _address(message: Message) -> AddressRow | None:
    found = read_address(message)
    if found is None:
        return None
    ifindex, interface = found
    _, _, flags, scope, _ = m.ADDRESS.unpack_from(message.body)
    return AddressRow(ifindex, interface.ip, scope, bool(flags & _IFA_F_SECONDARY))


def _route(message: Message) -> RouteRow | None:
    family, prefix, _, _, table, _, scope, _, _ = m.ROUTE.unpack_from(message.body)
    if family not in (m.AF_INET, m.AF_INET6):
        return None
    found = dict(attributes(message.body, m.ROUTE.size))
    network: m.IPNetwork
    if family == m.AF_INET:
        network = IPv4Network((found.get(m.RTA_DST) or bytes(4), prefix))
    else:
        network = IPv6Network((found.get(m.RTA_DST) or bytes(16), prefix))
    return RouteRow(
        number_at(found[m.RTA_TABLE]) if m.RTA_TABLE in found else table,
        number_at(found.get(m.RTA_OIF, b"")),
        scope,
        network,
        address_at(found.get(m.RTA_PREFSRC)),
        address_at(found.get(m.RTA_GATEWAY)),
    )


def nftables_rows(kind: int, family: int) -> list[dict[int, bytes]]:
    """The attributes of all that nftables has of a kind (NFT_MSG_GET*) in a family. Raises NetlinkError."""
    request = Request(
        "read tables of nftables", _NFTABLES << 8 | kind, NLM_F_DUMP, _NFGENMSG.pack(family, 0, 0)
    )
    descriptor = open_socket(protocol=_NETLINK_NETFILTER)
    try:
        rows = Connection(descriptor).dump(request)
    finally:
        os.close(descriptor)
    return [dict(attributes(row.body, _NFGENMSG.size)) for row in rows]
