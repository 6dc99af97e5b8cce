"""Links, addresses, routes and filters as the kernel describes them: what the rows of a dump say."""

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
from cells.netlink.wire import Message, Request, attribute, attributes, chosen

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


# MAC addresses: 6 bytes inside the agent, text at its edges.

_WITHOUT_SEPARATORS = str.maketrans("", "", ":-.")


def mac_text(mac: bytes) -> str:
    """Lower-case, colon separated text of a 6-byte MAC."""
    return mac.hex(":")


_FORMS = re.compile(
    r"[0-9a-f]{2}(:[0-9a-f]{2}){5}|[0-9a-f]{2}(-[0-9a-f]{2}){5}|[0-9a-f]{4}(\.[0-9a-f]{4}){2}", re.IGNORECASE
)


def parse_mac(text: str) -> bytes:
    """The 6 bytes of ``aa:bb:cc:dd:ee:ff``, ``aa-bb-…`` or ``aabb.ccdd.eeff``; ValueError names the text."""
    if not _FORMS.fullmatch(text):
        raise ValueError(f"{text!r} is not a MAC address: expected six hex pairs like 02:00:00:00:00:01")
    return bytes.fromhex(text.translate(_WITHOUT_SEPARATORS))


def parse_unicast_mac(text: str) -> bytes:
    """The same of an address that one interface can have: not of a group, not zero."""
    mac = parse_mac(text)
    if mac[0] & 1 or mac == bytes(6):
        raise ValueError(f"{text!r} is not the MAC address of one interface: it is of a group, or zero")
    return mac


def random_mac() -> bytes:
    """A random locally administered unicast MAC: first byte = (b | 0x02) & 0xfe."""
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
"""Those that are read, of some thirty."""
_KIND = frozenset({m.IFLA_INFO_KIND})


class LinkInfo(msgspec.Struct, frozen=True):
    """One link. ``kind`` is "" for devices without one (lo, hardware); ``peer_ifindex`` is 0 for no peer.

    ``link_netnsid`` is this namespace's id of the one the peer is in; None when the peer is here too.
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
    """The link of an RTM_NEWLINK."""
    _, _, ifindex, flags, _ = m.LINK.unpack_from(message.body)
    found = chosen(message.body, m.LINK.size, _LINK_ATTRIBUTES)
    information = chosen(found.get(m.IFLA_LINKINFO, b""), 0, _KIND)
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
    """What a link takes at once; 0 where the kernel does not know such a limit."""

    limits: m.OffloadLimits
    largest: int
    """Bytes of the largest packet that its driver can segment: no GSO limit may be higher."""


def read_offloads(message: Message) -> Offloads:
    """The limits in an RTM_NEWLINK."""
    found = chosen(message.body, m.LINK.size, _OFFLOADS)

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
    """(index, peer's index) of an RTM_NEWLINK, for the path that needs no more."""
    return IndexReader().read(message)


class IndexReader:
    """Reads indexes out of RTM_NEWLINK messages of links that are made alike: a pod waits for it.

    The peer's index comes behind some thirty attributes. Where a message has their headers as the one before
    had, it is at the same place: one comparison instead of thirty steps.
    """

    __slots__ = ("_found", "_heads")

    def __init__(self) -> None:
        self._heads = struct.Struct("")
        """All headers up to that of the peer's index, and this."""
        self._found: tuple[int, ...] = ()
        """What the headers were."""

    def read(self, message: Message) -> tuple[int, int]:
        """(index, peer's index); 0 for a peer that is not named."""
        body, heads = message.body, self._heads
        ifindex: int = m.LINK.unpack_from(body)[2]
        if self._found and len(body) >= heads.size:
            *found, number = heads.unpack_from(body)
            if tuple(found) == self._found:
                return ifindex, number
        return ifindex, self._walk(body)

    def _walk(self, body: bytes) -> int:
        offset, end = m.LINK.size, len(body) - 8
        form, found = [f"={offset}x"], list[int]()
        while offset <= end:
            length, kind, number = _HEAD_AND_U32.unpack_from(body, offset)
            found += length, kind
            if kind == m.IFLA_LINK:
                self._heads, self._found = struct.Struct("".join([*form, "HHI"])), tuple(found)
                return int(number)
            if length < 4:
                break
            size = (length + 3) & ~3
            form.append(f"HH{size - 4}x")
            offset += size
        return 0


def read_name(message: Message) -> str:
    """The name in an RTM_NEWLINK, where the kernel puts it first."""
    for kind, data in attributes(message.body, m.LINK.size):
        if kind == m.IFLA_IFNAME:
            return _text(data)
    return ""


def read_address(message: Message) -> tuple[int, m.IPInterface] | None:
    """(index of its link, address) of an RTM_NEWADDR; of a point-to-point link the local end.

    None for what is neither IPv4 nor IPv6.
    """
    family, prefix, _, _, ifindex = m.ADDRESS.unpack_from(message.body)
    if family not in (m.AF_INET, m.AF_INET6):
        return None
    found = dict(attributes(message.body, m.ADDRESS.size))
    address = int.from_bytes(
        found.get(m.IFA_LOCAL) or found[m.IFA_ADDRESS]
    )  # anything else it prints and reads
    if family == m.AF_INET:
        return ifindex, IPv4Interface((address, prefix))
    return ifindex, IPv6Interface((address, prefix))


def is_link_local6(message: Message) -> bool:
    """Whether an RTM_NEWADDR is of an IPv6 address that means nothing off its link."""
    family, _, _, scope, _ = m.ADDRESS.unpack_from(message.body)
    return bool(family == m.AF_INET6 and scope == m.RT_SCOPE_LINK)


class RouteInfo(NamedTuple):
    """A unicast route of the main table."""

    ifindex: int
    destination: m.IPNetwork
    gateway: m.IPAddress | None
    source: m.IPAddress | None
    """The address of this node that packets on it prefer."""
    by_kernel: bool
    """Whether it has the kernel's protocol: the kernel made it, for an address, or it shall count as such."""
    mtu: int = 0
    """Of its own; 0: that of its link."""


def read_route(message: Message) -> RouteInfo | None:
    """The route of an RTM_NEWROUTE, if it is a unicast route of the main table."""
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
    """The address that an attribute holds; None where there is no attribute."""
    if not packed:
        return None
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


class LinkPrograms(NamedTuple):
    """Kernel ids of the BPF programs a link has where ours are attached; 0 is none."""

    ingress: int = 0
    egress: int = 0


class XdpPrograms(NamedTuple):
    """Kernel ids of the XDP programs a link has: in its driver, and generic, before the stack; 0 is none."""

    native: int = 0
    generic: int = 0


def read_xdp(message: Message) -> XdpPrograms:
    """The XDP programs of an RTM_NEWLINK."""
    found = dict(attributes(dict(attributes(message.body, m.LINK.size)).get(m.IFLA_XDP, b""), 0))
    return XdpPrograms(
        number_at(found.get(m.IFLA_XDP_DRV_PROG_ID, b"")), number_at(found.get(m.IFLA_XDP_SKB_PROG_ID, b""))
    )


def read_program(rows: Iterable[Message]) -> int:
    """The id of the program that a dump of filters has first, where ours are (priority 1, handle 1).

    0 when there is none, or one with an ignored verdict (no direct action).
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
    """The MTU that an RTM_NEWROUTE has of its own; 0 for that of its link."""
    return _mtu_in(dict(attributes(message.body, m.ROUTE.size)).get(m.RTA_METRICS, b""))


def _mtu_in(metrics: bytes) -> int:
    return number_at(dict(attributes(metrics, 0)).get(m.RTAX_MTU, b"")) if metrics else 0


def with_mtu(message: Message, mtu: int) -> bytes | None:
    """The body of an RTM_NEWROUTE with this MTU, to send it back; None if it has that MTU already.

    Other metrics stay, state that is not the route's to say (flags of its hop, ages) does not.
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
    """The number that an attribute holds; 0 where there is no attribute."""
    return int.from_bytes(data, "little")


# Every link, address and route of this network namespace, as ``ip`` shows them, and what
# nftables has: for people who look.
#
# Source: rtnetlink(7), linux/if_link.h, linux/if_addr.h, linux/rtnetlink.h. Each function opens a socket of
#         its own, for a worker thread, and raises NetlinkError or OSError.

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
    """A route of any table; ``ifindex`` is 0 where it leads nowhere, or over several links."""

    table: int
    ifindex: int
    scope: int
    destination: m.IPNetwork
    source: m.IPAddress | None
    gateway: m.IPAddress | None
    metric: int = 0
    """Of several routes to a destination the one with the least counts."""


def list_links() -> list[LinkRow]:
    """Every link, pods' too."""
    return [_link(row) for row in _dump(m.dump_links())]


def list_addresses() -> list[AddressRow]:
    """Every address, link-local ones too, in the kernel's order."""
    return [row for row in map(_address, _dump(m.dump_addresses())) if row is not None]


def list_routes(family: int = socket.AF_UNSPEC) -> list[RouteRow]:
    """Every route of every table, IPv4 and IPv6, or of one family."""
    return [row for row in map(_route, _dump(m.dump_routes(family))) if row is not None]


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


def own_gateways() -> list[tuple[m.IPNetwork, m.IPAddress]]:
    """Destination and gateway of each unicast route of the main table that the agent set for other nodes."""
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
