"""Decoders of rtnetlink messages: links, addresses, routes, filters; and lists of all of them.

links.py and namespaces.py use the decoders; node discovery, direct routing and `hive` commands use the lists.
"""

import os
import re
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Final, NamedTuple

import msgspec

from cells.netlink import messages as m
from cells.netlink.connection import connected
from cells.netlink.wire import Message, Request, attribute, attributes, select_attributes

__all__ = [
    "AddressRow",
    "LinkInfo",
    "LinkPrograms",
    "LinkRow",
    "Offloads",
    "RouteInfo",
    "RouteRow",
    "XdpPrograms",
    "foreign_routes",
    "list_addresses",
    "list_links",
    "list_routes",
    "mac_text",
    "own_gateways",
    "parse_mac",
    "parse_unicast_mac",
    "random_mac",
]


# MAC addresses: 6 bytes inside the agent, text in APIs and files.

_WITHOUT_SEPARATORS = str.maketrans("", "", ":-.")


def mac_text(mac: bytes) -> str:
    """Return a 6-byte MAC as lower-case, colon-separated text."""
    return mac.hex(":")


_MAC_FORMATS = re.compile(
    r"[0-9a-f]{2}(:[0-9a-f]{2}){5}|[0-9a-f]{2}(-[0-9a-f]{2}){5}|[0-9a-f]{4}(\.[0-9a-f]{4}){2}", re.IGNORECASE
)


def parse_mac(text: str) -> bytes:
    """Parse ``aa:bb:cc:dd:ee:ff``, ``aa-bb-…`` or ``aabb.ccdd.eeff`` to 6 bytes. Raises ValueError."""
    if not _MAC_FORMATS.fullmatch(text):
        raise ValueError(f"{text!r} is not a MAC address: expected six hex pairs like 02:00:00:00:00:01")
    return bytes.fromhex(text.translate(_WITHOUT_SEPARATORS))


def parse_unicast_mac(text: str) -> bytes:
    """Parse a MAC address that an interface can have. Raises ValueError for multicast and zero."""
    mac = parse_mac(text)
    if mac[0] & 1 or mac == bytes(6):
        raise ValueError(f"{text!r} is not the MAC address of one interface: it is multicast or zero")
    return mac


def random_mac() -> bytes:
    """Return a random locally administered unicast MAC: first byte = (b | 0x02) & 0xfe."""
    mac = os.urandom(6)
    return bytes(((mac[0] | 0x02) & 0xFE,)) + mac[1:]


_FLAGS = struct.Struct("=I")
_HEAD_AND_U32 = struct.Struct("=HHI")
_LINK_ATTRIBUTES = frozenset(
    {
        *(m.IFLA_ADDRESS, m.IFLA_IFNAME, m.IFLA_MTU, m.IFLA_LINK, m.IFLA_TXQLEN, m.IFLA_LINKINFO),
        *(m.IFLA_IFALIAS, m.IFLA_GROUP, m.IFLA_LINK_NETNSID),
    }
)
"""The decoded attributes; a message has about thirty."""
_KIND = frozenset({m.IFLA_INFO_KIND})


class LinkInfo(msgspec.Struct, frozen=True):
    """A link. ``kind`` is "" for devices without one (lo, hardware); ``peer_ifindex`` is 0 without a peer.

    ``link_netnsid`` is this namespace's id of the peer's namespace; None if the peer is in this one.
    """

    ifindex: int
    name: str
    mac: bytes
    mtu: int
    kind: str
    alias: str
    up: bool
    arp: bool
    peer_ifindex: int
    link_netnsid: int | None
    group: int
    tx_queue_length: int


def read_link(message: Message) -> LinkInfo:
    """Decode an RTM_NEWLINK."""
    _, _, ifindex, flags, _ = m.LINK.unpack_from(message.body)
    found = select_attributes(message.body, m.LINK.size, _LINK_ATTRIBUTES)
    information = select_attributes(found.get(m.IFLA_LINKINFO, b""), 0, _KIND)
    netnsid = found.get(m.IFLA_LINK_NETNSID)
    return LinkInfo(
        ifindex=ifindex,
        name=_text(found.get(m.IFLA_IFNAME, b"")),
        mac=found.get(m.IFLA_ADDRESS, b""),
        mtu=number_at(found.get(m.IFLA_MTU, b"")),
        kind=_text(information.get(m.IFLA_INFO_KIND, b"")),
        alias=_text(found.get(m.IFLA_IFALIAS, b"")),
        up=bool(flags & m.IFF_UP),
        arp=not flags & m.IFF_NOARP,
        peer_ifindex=number_at(found.get(m.IFLA_LINK, b"")),
        link_netnsid=None if netnsid is None else int.from_bytes(netnsid, "little", signed=True),
        group=number_at(found.get(m.IFLA_GROUP, b"")),
        tx_queue_length=number_at(found.get(m.IFLA_TXQLEN, b"")),
    )


_OFFLOADS = frozenset(
    {
        *(m.IFLA_GRO_MAX_SIZE, m.IFLA_GSO_MAX_SIZE, m.IFLA_TSO_MAX_SIZE),
        *(m.IFLA_GRO_IPV4_MAX_SIZE, m.IFLA_GSO_IPV4_MAX_SIZE),
    }
)


class Offloads(NamedTuple):
    """The offload limits of a link; 0 for limits that the kernel does not report."""

    limits: m.OffloadLimits
    largest: int
    """Bytes of the largest packet that the driver can segment (TSO): the upper bound of GSO limits."""


def read_offloads(message: Message) -> Offloads:
    """Decode the limits in an RTM_NEWLINK."""
    found = select_attributes(message.body, m.LINK.size, _OFFLOADS)

    def size(kind: int) -> int:
        return number_at(found.get(kind, b""))

    limits = m.OffloadLimits(
        gro=size(m.IFLA_GRO_MAX_SIZE),
        gso=size(m.IFLA_GSO_MAX_SIZE),
        gro_ipv4=size(m.IFLA_GRO_IPV4_MAX_SIZE),
        gso_ipv4=size(m.IFLA_GSO_IPV4_MAX_SIZE),
    )
    return Offloads(limits, size(m.IFLA_TSO_MAX_SIZE))


def read_indexes(message: Message) -> tuple[int, int]:
    """Decode (index, peer's index) of an RTM_NEWLINK."""
    return IndexReader().read(message)


class IndexReader:
    """Decode indexes of RTM_NEWLINK messages of similar links fast: it is on the path of a pod's ADD.

    The peer's index comes after some thirty attributes. If all attribute headers equal those of the previous
    message, it is at the same offset: one comparison instead of thirty steps.
    """

    __slots__ = ("_found", "_heads")

    def __init__(self) -> None:
        self._heads = struct.Struct("")
        """Unpacks all attribute headers up to IFLA_LINK, and its value."""
        self._found: tuple[int, ...] = ()
        """The headers of the previous message."""

    def read(self, message: Message) -> tuple[int, int]:
        """Return (index, peer's index); 0 if the message has no peer."""
        body, heads = message.body, self._heads
        ifindex: int = m.LINK.unpack_from(body)[2]
        if self._found and len(body) >= heads.size:
            *found, number = heads.unpack_from(body)
            if tuple(found) == self._found:
                return ifindex, number
        return ifindex, self._walk(body)

    def _walk(self, body: bytes) -> int:
        offset, end = m.LINK.size, len(body) - 8
        layout, found = [f"={offset}x"], list[int]()
        while offset <= end:
            length, kind, number = _HEAD_AND_U32.unpack_from(body, offset)
            found += length, kind
            if kind == m.IFLA_LINK:
                self._heads, self._found = struct.Struct("".join([*layout, "HHI"])), tuple(found)
                return int(number)
            if length < 4:
                break
            size = (length + 3) & ~3
            layout.append(f"HH{size - 4}x")
            offset += size
        return 0


def read_name(message: Message) -> str:
    """Decode only the name in an RTM_NEWLINK, which the kernel puts first."""
    for kind, data in attributes(message.body, m.LINK.size):
        if kind == m.IFLA_IFNAME:
            return _text(data)
    return ""


def read_address(message: Message) -> tuple[int, m.IPInterface] | None:
    """Decode (ifindex, address) of an RTM_NEWADDR; the local end on a point-to-point link.

    None for families other than IPv4 and IPv6.
    """
    family, prefix, _, _, ifindex = m.ADDRESS.unpack_from(message.body)
    if family not in (m.AF_INET, m.AF_INET6):
        return None
    found = dict(attributes(message.body, m.ADDRESS.size))
    # The constructor is slow for (bytes, prefix): it formats and parses text.
    address = int.from_bytes(found.get(m.IFA_LOCAL) or found[m.IFA_ADDRESS])
    if family == m.AF_INET:
        return ifindex, IPv4Interface((address, prefix))
    return ifindex, IPv6Interface((address, prefix))


def is_link_local6(message: Message) -> bool:
    """Return whether an RTM_NEWADDR has an IPv6 link-local address."""
    family, _, _, scope, _ = m.ADDRESS.unpack_from(message.body)
    return bool(family == m.AF_INET6 and scope == m.RT_SCOPE_LINK)


class RouteInfo(NamedTuple):
    """A unicast route of the main table."""

    ifindex: int
    destination: m.IPNetwork
    gateway: m.IPAddress | None
    source: m.IPAddress | None
    """The preferred source address of packets that this node sends."""
    by_kernel: bool
    """Whether the protocol is RTPROT_KERNEL: added by the kernel for an address, or by the agent."""
    mtu: int = 0
    """MTU metric; 0 for the link's MTU."""


def read_route(message: Message) -> RouteInfo | None:
    """Decode an RTM_NEWROUTE; None unless it is a unicast route of the main table."""
    family, prefix, _, _, _, protocol, _, kind, _ = m.ROUTE.unpack_from(message.body)
    found = dict(attributes(message.body, m.ROUTE.size))
    if family not in (m.AF_INET, m.AF_INET6) or kind != m.RTN_UNICAST:
        return None
    if number_at(found.get(m.RTA_TABLE, b"")) != m.RT_TABLE_MAIN:
        return None
    network: m.IPNetwork
    if family == m.AF_INET:
        network = IPv4Network((found.get(m.RTA_DST) or bytes(4), prefix))
    else:
        network = IPv6Network((found.get(m.RTA_DST) or bytes(16), prefix))
    return RouteInfo(
        number_at(found.get(m.RTA_OIF, b"")),
        network,
        address_at(found.get(m.RTA_GATEWAY)),
        address_at(found.get(m.RTA_PREFSRC)),
        protocol == m.RTPROT_KERNEL,
        _mtu_in(found.get(m.RTA_METRICS, b"")),
    )


def address_at(packed: bytes | None) -> m.IPAddress | None:
    """Decode an address attribute; None if it is missing."""
    if not packed:
        return None
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


class LinkPrograms(NamedTuple):
    """Kernel ids of the BPF programs at our clsact hooks; 0 for none."""

    ingress: int = 0
    egress: int = 0


class XdpPrograms(NamedTuple):
    """Kernel ids of a link's XDP programs in driver (native) and generic mode; 0 for none."""

    native: int = 0
    generic: int = 0


def read_xdp(message: Message) -> XdpPrograms:
    """Decode the XDP programs of an RTM_NEWLINK."""
    found = dict(attributes(dict(attributes(message.body, m.LINK.size)).get(m.IFLA_XDP, b""), 0))
    return XdpPrograms(
        number_at(found.get(m.IFLA_XDP_DRV_PROG_ID, b"")), number_at(found.get(m.IFLA_XDP_SKB_PROG_ID, b""))
    )


def read_program(rows: Iterable[Message]) -> int:
    """Return the id of the first program with priority 1 and handle 1 in a dump of filters.

    0 if there is none, or if it is not in direct-action mode, so that its verdict is ignored.
    """
    for row in rows:
        _, _, handle, _, info = m.TC.unpack_from(row.body)
        if handle != 1 or info >> 16 != 1:
            continue
        options = dict(attributes(dict(attributes(row.body, m.TC.size)).get(m.TCA_OPTIONS, b""), 0))
        if number_at(options.get(m.TCA_BPF_FLAGS, b"")) & m.TCA_BPF_FLAG_ACT_DIRECT:
            return number_at(options.get(m.TCA_BPF_ID, b""))
    return 0


def mtu_of(message: Message) -> int:
    """Return the MTU metric of an RTM_NEWROUTE; 0 without one."""
    return _mtu_in(dict(attributes(message.body, m.ROUTE.size)).get(m.RTA_METRICS, b""))


def _mtu_in(metrics: bytes) -> int:
    return number_at(dict(attributes(metrics, 0)).get(m.RTAX_MTU, b"")) if metrics else 0


def with_mtu(message: Message, mtu: int) -> bytes | None:
    """Return the body of an RTM_NEWROUTE with this MTU metric, to send it back; None if it has it already.

    Other metrics stay; kernel state (next hop flags except onlink, cache information) is removed.
    """
    head = bytearray(message.body[: m.ROUTE.size])
    (flags,) = _FLAGS.unpack_from(head, m.ROUTE.size - _FLAGS.size)
    _FLAGS.pack_into(head, m.ROUTE.size - _FLAGS.size, flags & m.RTNH_F_ONLINK)
    found = list(attributes(message.body, m.ROUTE.size))
    metrics = dict(attributes(dict(found).get(m.RTA_METRICS, b""), 0))
    if number_at(metrics.get(m.RTAX_MTU, b"")) == mtu:
        return None
    metrics[m.RTAX_MTU] = _FLAGS.pack(mtu)
    remaining = [(kind, data) for kind, data in found if kind not in {m.RTA_METRICS, m.RTA_CACHEINFO}]
    nested = b"".join(attribute(kind, data) for kind, data in metrics.items())
    return bytes(head) + b"".join(attribute(*each) for each in [*remaining, (m.RTA_METRICS, nested)])


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def number_at(data: bytes) -> int:
    """Decode an integer attribute; 0 if it is missing."""
    return int.from_bytes(data, "little")


# Lists of all links, addresses and routes of this network namespace, as ``ip`` shows them.
#
# Each function opens its own socket, for a worker thread, and raises NetlinkError or OSError.
# Source: rtnetlink(7), linux/if_link.h, linux/if_addr.h, linux/rtnetlink.h.

_IFLA_MASTER: Final = 10
_IFA_F_SECONDARY: Final = 0x01


class LinkRow(msgspec.Struct, frozen=True):
    """A link. ``flags`` are those of linux/if.h; ``master`` is the index of its bridge or bond, or 0."""

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    flags: int
    master: int


class AddressRow(msgspec.Struct, frozen=True):
    """An address of a link, with its scope as in linux/rtnetlink.h."""

    ifindex: int
    address: m.IPAddress
    scope: int
    secondary: bool


class RouteRow(msgspec.Struct, frozen=True):
    """A route of any table; ``ifindex`` is 0 without an output device or with several next hops."""

    table: int
    ifindex: int
    scope: int
    destination: m.IPNetwork
    source: m.IPAddress | None
    gateway: m.IPAddress | None
    metric: int = 0
    """The route with the lowest metric wins."""


def list_links() -> list[LinkRow]:
    """Return all links, including pods'."""
    return [_link(row) for row in _dump(m.dump_links())]


def list_addresses() -> list[AddressRow]:
    """Return all addresses, including link-local ones, in the kernel's order."""
    return [row for row in map(_address, _dump(m.dump_addresses())) if row is not None]


def list_routes(family: int = socket.AF_UNSPEC) -> list[RouteRow]:
    """Return all routes of all tables, of one family or of both."""
    return [row for row in map(_route, _dump(m.dump_routes(family))) if row is not None]


def foreign_routes() -> dict[m.IPNetwork, str]:
    """Return the unicast routes of the main table that the agent did not add for other nodes.

    The result maps destinations to next hops as text. The agent's own routes have RTPROT_KERNEL and a gateway
    or an MTU; routes that the kernel adds have neither.
    """
    found: dict[m.IPNetwork, str] = {}
    for message in _dump(m.dump_routes(socket.AF_UNSPEC)):
        route = read_route(message)
        if route is None or (route.by_kernel and (route.gateway is not None or mtu_of(message))):
            continue
        device = f"over link {route.ifindex}" if route.ifindex else "over several links"
        found[route.destination] = f"via {route.gateway}" if route.gateway is not None else device
    return found


def own_gateways() -> list[tuple[m.IPNetwork, m.IPAddress]]:
    """Return (destination, gateway) of the routes that the agent added for other nodes."""
    read = (read_route(message) for message in _dump(m.dump_routes(socket.AF_UNSPEC)))
    return [
        (route.destination, route.gateway)
        for route in read
        if route is not None and route.by_kernel and route.gateway is not None
    ]


def _dump(request: Request) -> list[Message]:
    with connected(strict=True) as connection:
        return connection.dump(request)


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
        number_at(found.get(m.RTA_PRIORITY, b"")),
    )
