"""rtnetlink messages: pure functions that encode requests for links, addresses, routes and filters.

Formats: rtnetlink(7), linux/if_link.h, linux/rtnetlink.h, linux/pkt_cls.h; the tests compare each message
with pyroute2's encoder byte by byte. Nothing here talks to the kernel; links.py and namespaces.py send the
requests.
"""

import errno
import socket
import struct
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

import msgspec

from cells.netlink.wire import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    text,
    u32,
)

__all__ = ["USUAL_PACKET", "IPAddress", "IPInterface", "IPNetwork", "OffloadLimits", "VethPair"]


RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH = 28
RTM_NEWQDISC = 36
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46

AF_INET, AF_INET6 = 2, 10
IFF_UP = 0x1
IFF_NOARP = 0x80

IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK = 1, 3, 4, 5
IFLA_TXQLEN, IFLA_LINKINFO, IFLA_IFALIAS, IFLA_AF_SPEC = 13, 18, 20, 26
IFLA_GROUP, IFLA_NET_NS_FD, IFLA_EXT_MASK = 27, 28, 29
IFLA_NUM_TX_QUEUES, IFLA_NUM_RX_QUEUES, IFLA_LINK_NETNSID = 31, 32, 37
IFLA_GSO_MAX_SIZE, IFLA_XDP, IFLA_GRO_MAX_SIZE, IFLA_TSO_MAX_SIZE = 41, 43, 58, 59
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64
NLA_F_NESTED = 1 << 15
IFLA_XDP_FD, IFLA_XDP_FLAGS, IFLA_XDP_EXPECTED_FD = 1, 3, 8
IFLA_XDP_DRV_PROG_ID, IFLA_XDP_SKB_PROG_ID = 5, 6
XDP_FLAGS_UPDATE_IF_NOEXIST, XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE, XDP_FLAGS_REPLACE = 1, 2, 4, 16
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
IFLA_INET_CONF = 1
VETH_INFO_PEER = 1
RTEXT_FILTER_SKIP_STATS = 1 << 3
IPV4_DEVCONF_RP_FILTER = 8

IFA_ADDRESS, IFA_LOCAL = 1, 2
IFA_F_NODAD = 0x02
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC = 1, 4, 5, 6, 7
RTA_METRICS, RTA_CACHEINFO, RTA_TABLE = 8, 12, 15
RTNH_F_ONLINK = 4
NDA_DST, NDA_LLADDR = 1, 2
NUD_PERMANENT = 0x80
RTAX_MTU = 2
RT_TABLE_MAIN = 254
RTPROT_KERNEL, RTPROT_BOOT = 2, 3
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK, RT_SCOPE_NOWHERE = 0, 253, 255
RTN_UNICAST = 1

TCA_KIND, TCA_OPTIONS = 1, 2
TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 6, 7, 8, 11
TCA_BPF_FLAG_ACT_DIRECT = 1
TC_H_CLSACT = 0xFFFFFFF1
TC_H_INGRESS = 0xFFFFFFF2
TC_H_EGRESS = 0xFFFFFFF3

TX_QUEUE_LENGTH = 1000

LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, device type, index, flags, changed flags
NEIGHBOUR = struct.Struct("=BBHiHBB")  # ndmsg: family, padding, index, state, flags, type
ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # rtmsg: family, dst and src length, tos, table, protocol, scope, type, flags
TC = struct.Struct("=BxxxiIII")  # tcmsg: family, index, handle, parent, info

_SKIP_STATISTICS = u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
_NO_LINK = LINK.pack(0, 0, 0, 0, 0)
_ONE_QUEUE = u32(IFLA_NUM_TX_QUEUES, 1) + u32(IFLA_NUM_RX_QUEUES, 1)
_NO_REVERSE_PATH_FILTER = attribute(
    IFLA_AF_SPEC, attribute(AF_INET, attribute(IFLA_INET_CONF, u32(IPV4_DEVCONF_RP_FILTER, 0)))
)
_FILTER_PRIORITY_1_ALL = (1 << 16) | 0x0300  # priority in the high half, ETH_P_ALL in network order below
_DIRECT_ACTION = u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT)
_CLSACT = text(TCA_KIND, "clsact")
_BPF = text(TCA_KIND, "bpf")
_VETH = text(IFLA_INFO_KIND, "veth")
_U32 = struct.Struct("=I")


USUAL_PACKET = 65536
"""Bytes of the largest packet by default (GSO_LEGACY_MAX_SIZE and GRO_LEGACY_MAX_SIZE)."""


class OffloadLimits(msgspec.Struct, frozen=True):
    """The size limits of a link's GRO and GSO packets, in bytes.

    0: the kernel does not report the limit; on a write, the limit is left as it is.
    """

    gro: int = USUAL_PACKET
    """For IPv6; also for IPv4 on kernels before 6.3."""
    gso: int = USUAL_PACKET
    gro_ipv4: int = USUAL_PACKET
    gso_ipv4: int = USUAL_PACKET

    def reduced(self, size: int) -> "OffloadLimits":
        """Return the limits, each at most ``size``."""
        return OffloadLimits(*(min(each, size) for each in msgspec.structs.astuple(self)))


_DEFAULT_LIMITS = OffloadLimits()


class VethPair(msgspec.Struct, frozen=True):
    """A veth pair to create; ``netns_fd`` is the pod's network namespace, None for the current one."""

    host_name: str
    host_mac: bytes
    pod_name: str
    pod_mac: bytes
    mtu: int
    netns_fd: int | None
    limits: OffloadLimits = _DEFAULT_LIMITS


def _offloads(limits: OffloadLimits) -> bytes:
    """Encode the limits. The kernel applies the IPv4 ones last: setting the others may overwrite them."""
    sizes = (
        (IFLA_GRO_MAX_SIZE, limits.gro),
        (IFLA_GSO_MAX_SIZE, limits.gso),
        (IFLA_GRO_IPV4_MAX_SIZE, limits.gro_ipv4),
        (IFLA_GSO_IPV4_MAX_SIZE, limits.gso_ipv4),
    )
    return b"".join(u32(kind, size) for kind, size in sizes if size)


def _common_attributes(mtu: int, limits: OffloadLimits) -> bytes:
    """Encode the attributes that both ends of a veth pair share."""
    offloads = b"" if limits == _DEFAULT_LIMITS else _offloads(limits)
    return u32(IFLA_MTU, mtu) + u32(IFLA_TXQLEN, TX_QUEUE_LENGTH) + _ONE_QUEUE + offloads


def _end_attributes(name: str, mac: bytes, pair: VethPair) -> bytes:
    return text(IFLA_IFNAME, name) + attribute(IFLA_ADDRESS, mac) + _common_attributes(pair.mtu, pair.limits)


def _veth_body(pair: VethPair) -> bytes:
    """Encode the body of :func:`create_veth`."""
    peer = _NO_LINK + _end_attributes(pair.pod_name, pair.pod_mac, pair)
    if pair.netns_fd is not None:
        peer += u32(IFLA_NET_NS_FD, pair.netns_fd)
    info = _VETH + attribute(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, peer))
    return _NO_LINK + _end_attributes(pair.host_name, pair.host_mac, pair) + attribute(IFLA_LINKINFO, info)


@lru_cache(maxsize=16)
def _veth_template(
    host_name_size: int, pod_name_size: int, mtu: int, limits: OffloadLimits
) -> tuple[bytes, tuple[int, ...]]:
    """Return a body for names of these lengths, and the offsets of names, MACs and namespace in it."""
    body = _veth_body(VethPair("h" * host_name_size, bytes(6), "p" * pod_name_size, bytes(6), mtu, 0, limits))
    host_name = LINK.size + 4
    host_mac = host_name + _padded(host_name_size + 1) + 4
    netns_fd = len(body) - 4  # the peer comes last
    pod_mac = netns_fd - 4 - len(_common_attributes(mtu, limits)) - _padded(6)
    pod_name = pod_mac - 4 - _padded(pod_name_size + 1)
    return body, (host_name, host_mac, pod_name, pod_mac, netns_fd)


def _padded(size: int) -> int:
    return (size + 3) & ~3


def _fill_template(pair: VethPair, netns_fd: int) -> bytes:
    """Encode the body of a pair from its template, in a fifth of the time of _veth_body()."""
    host_name, pod_name = pair.host_name.encode(), pair.pod_name.encode()
    template, places = _veth_template(len(host_name), len(pod_name), pair.mtu, pair.limits)
    body = bytearray(template)
    fields = host_name, pair.host_mac, pod_name, pair.pod_mac, _U32.pack(netns_fd)
    for place, field in zip(places, fields, strict=True):
        body[place : place + len(field)] = field
    return bytes(body)


def create_veth(pair: VethPair) -> Request:
    """Create a veth pair, with the peer in the other namespace from the start, under its final name.

    One queue per end: veth's default is one per possible CPU, which costs time to create and a transmit hash
    per packet, and does not help a device without NAPI or XDP.
    """
    what = f"create veth {pair.host_name} with peer {pair.pod_name}"
    body = _veth_body(pair) if pair.netns_fd is None else _fill_template(pair, pair.netns_fd)
    return Request(what, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body)


def get_link(name: str) -> Request:
    """Query one link by name, without its statistics."""
    body = _NO_LINK + text(IFLA_IFNAME, name) + _SKIP_STATISTICS
    return Request(f"look up link {name}", RTM_GETLINK, 0, body)


def get_link_at(ifindex: int) -> Request:
    """Query one link by index, without its statistics."""
    body = LINK.pack(0, 0, ifindex, 0, 0) + _SKIP_STATISTICS
    return Request(f"look up link {ifindex}", RTM_GETLINK, 0, body)


def sync_carrier(ifindex: int) -> Request:
    """Query one link by index: the kernel applies a pending carrier change before it answers."""
    body = LINK.pack(0, 0, ifindex, 0, 0) + _SKIP_STATISTICS
    return Request(f"sync carrier of link {ifindex}", RTM_GETLINK, 0, body)


def dump_links() -> Request:
    """Dump all links, without statistics."""
    return Request("list links", RTM_GETLINK, NLM_F_DUMP, _NO_LINK + _SKIP_STATISTICS)


def activate_link(ifindex: int, alias: str) -> Request:
    """Configure a pod's host-side link: no reverse path filter, our alias, up."""
    body = LINK.pack(0, 0, ifindex, IFF_UP, IFF_UP) + text(IFLA_IFALIAS, alias) + _NO_REVERSE_PATH_FILTER
    return Request(f"activate link {ifindex}", RTM_SETLINK, 0, body)


def link_up(ifindex: int, name: str) -> Request:
    """Bring a link up."""
    return Request(f"bring {name} up", RTM_SETLINK, 0, LINK.pack(0, 0, ifindex, IFF_UP, IFF_UP))


def set_mac(ifindex: int, name: str, mac: bytes) -> Request:
    """Set the MAC address of a link, up or down."""
    body = LINK.pack(0, 0, ifindex, 0, 0) + attribute(IFLA_ADDRESS, mac)
    return Request(f"set MAC address of {name}", RTM_SETLINK, 0, body)


def set_device(ifindex: int, name: str, mtu: int) -> Request:
    """Set MTU, queue length 1000 and NOARP, and bring the link up."""
    flags = IFF_UP | IFF_NOARP
    body = LINK.pack(0, 0, ifindex, flags, flags) + u32(IFLA_MTU, mtu) + u32(IFLA_TXQLEN, TX_QUEUE_LENGTH)
    return Request(f"set up {name}", RTM_SETLINK, 0, body)


def set_offloads(ifindex: int, limits: OffloadLimits) -> Request:
    """Set the GSO and GRO limits of a link."""
    body = LINK.pack(0, 0, ifindex, 0, 0) + _offloads(limits)
    return Request(f"set GSO and GRO limits of link {ifindex}", RTM_SETLINK, 0, body)


def set_mtu(ifindex: int, mtu: int) -> Request:
    """Set the MTU of a link."""
    return Request(
        f"set MTU of link {ifindex}", RTM_SETLINK, 0, LINK.pack(0, 0, ifindex, 0, 0) + u32(IFLA_MTU, mtu)
    )


def set_group(ifindex: int, group: int) -> Request:
    """Put a link into a group; a missing link is ignored."""
    body = LINK.pack(0, 0, ifindex, 0, 0) + u32(IFLA_GROUP, group)
    return Request(f"group link {ifindex} for deletion", RTM_SETLINK, 0, body, (errno.ENODEV,))


def delete_group(group: int) -> Request:
    """Delete all links of a group; an empty group is ignored."""
    body = _NO_LINK + u32(IFLA_GROUP, group)
    return Request(f"delete links of group {group:#x}", RTM_DELLINK, 0, body, (errno.ENODEV,))


def delete_link(ifindex: int) -> Request:
    """Delete one link by index; a missing one is ignored."""
    body = LINK.pack(0, 0, ifindex, 0, 0)
    return Request(f"delete link {ifindex}", RTM_DELLINK, 0, body, (errno.ENODEV,))


def delete_link_named(name: str) -> Request:
    """Delete one link by name."""
    return Request(f"delete link {name}", RTM_DELLINK, 0, _NO_LINK + text(IFLA_IFNAME, name))


IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network
IPInterface = IPv4Interface | IPv6Interface


def family_of(address: IPAddress | IPNetwork | IPInterface) -> int:
    """Return the address family number (AF_INET, AF_INET6)."""
    return AF_INET if address.version == 4 else AF_INET6


def network_of(address: IPAddress) -> IPNetwork:
    """Return the address as a /32 or /128 network."""
    return IPv4Network(address) if isinstance(address, IPv4Address) else IPv6Network(address)


def add_address(ifindex: int, name: str, address: IPAddress) -> Request:
    """Add an address to a link as /32 or /128; EEXIST if the link has it.

    IFA_F_NODAD makes an IPv6 address usable at once: no other host on the link can have it (RFC 4862, section
    5.4).
    """
    packed = address.packed
    family, length, flags = (AF_INET, 32, 0) if len(packed) == 4 else (AF_INET6, 128, IFA_F_NODAD)
    body = (
        ADDRESS.pack(family, length, flags, RT_SCOPE_UNIVERSE, ifindex)
        + attribute(IFA_LOCAL, packed)
        + attribute(IFA_ADDRESS, packed)
    )
    what = f"add address {socket.inet_ntop(family, packed)}/{length} to {name}"
    return Request(what, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body)


def delete_address(ifindex: int, name: str, address: IPInterface) -> Request:
    """Remove an address from a link; a missing one is ignored."""
    body = ADDRESS.pack(family_of(address), address.network.prefixlen, 0, RT_SCOPE_UNIVERSE, ifindex)
    body += attribute(IFA_LOCAL, address.packed)
    return Request(f"remove address {address} from {name}", RTM_DELADDR, 0, body, (errno.EADDRNOTAVAIL,))


def dump_addresses() -> Request:
    """Dump all addresses of all families: a kernel without IPv6 answers an AF_INET6 dump with IPv4."""
    return Request("list addresses", RTM_GETADDR, NLM_F_DUMP, ADDRESS.pack(0, 0, 0, 0, 0))


def add_route(
    ifindex: int,
    destination: IPNetwork,
    *,
    via: IPAddress | None = None,
    source: IPAddress | None = None,
    mtu: int = 0,
    replace: bool = False,
    protocol: int = RTPROT_BOOT,
) -> Request:
    """Add a unicast route to the main table: through ``via``, or on-link if None.

    An existing equal route is accepted. ``replace`` also changes one with other attributes.
    """
    body = ROUTE.pack(
        family_of(destination),
        destination.prefixlen,
        0,
        0,
        RT_TABLE_MAIN,
        protocol,
        RT_SCOPE_LINK if via is None else RT_SCOPE_UNIVERSE,
        RTN_UNICAST,
        0,
    )
    if destination.prefixlen:
        body += attribute(RTA_DST, destination.network_address.packed)
    if via is not None:
        body += attribute(RTA_GATEWAY, via.packed)
    if source is not None:
        body += attribute(RTA_PREFSRC, source.packed)
    body += u32(RTA_OIF, ifindex)
    if mtu:
        body += attribute(RTA_METRICS, u32(RTAX_MTU, mtu))
    if replace:
        return Request(f"set route {destination}", RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body)
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Request(f"add route {destination}", RTM_NEWROUTE, flags, body, (errno.EEXIST,))


def dump_routes(family: int, ifindex: int = 0) -> Request:
    """Dump the routes of a family, in all tables; over one link only on a strict socket."""
    selected = u32(RTA_OIF, ifindex) if ifindex else b""
    return Request("list routes", RTM_GETROUTE, NLM_F_DUMP, ROUTE.pack(family, *[0] * 8) + selected)


def replace_route(what: str, body: bytes) -> Request:
    """Add or replace a route from ``body``: an rtmsg with attributes, as in a dump."""
    return Request(f"set route {what}", RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body)


def set_neighbour(ifindex: int, address: IPAddress, mac: bytes) -> Request:
    """Add a permanent neighbour entry for an address and its MAC address on a link."""
    body = NEIGHBOUR.pack(family_of(address), 0, 0, ifindex, NUD_PERMANENT, 0, 0)
    body += attribute(NDA_DST, address.packed) + attribute(NDA_LLADDR, mac)
    return Request(f"set neighbour {address}", RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, body)


def delete_route(ifindex: int, destination: IPNetwork, protocol: int = 0) -> Request:
    """Remove a route of the main table over this link; a missing one is ignored.

    ``protocol`` 0 matches any.
    """
    head = (family_of(destination), destination.prefixlen, 0, 0)
    body = ROUTE.pack(*head, RT_TABLE_MAIN, protocol, RT_SCOPE_NOWHERE, 0, 0)
    body += attribute(RTA_DST, destination.network_address.packed) + u32(RTA_OIF, ifindex)
    return Request(f"remove route {destination}", RTM_DELROUTE, 0, body, (errno.ESRCH, errno.ENODEV))


def add_clsact(ifindex: int) -> Request:
    """Add the clsact qdisc; an existing one keeps its filters."""
    body = TC.pack(0, ifindex, 0xFFFF0000, TC_H_CLSACT, 0) + _CLSACT
    return Request(f"add clsact to link {ifindex}", RTM_NEWQDISC, NLM_F_CREATE, body)


@lru_cache(maxsize=16)
def _filter(program_fd: int, name: str) -> bytes:
    """Encode kind and options of a direct-action filter: the same for every pod."""
    options = u32(TCA_BPF_FD, program_fd) + text(TCA_BPF_NAME, name) + _DIRECT_ACTION
    return _BPF + attribute(TCA_OPTIONS, options)


def replace_filter(ifindex: int, parent: int, program_fd: int, name: str) -> Request:
    """Add or replace a direct-action BPF filter (handle 1, priority 1, all protocols)."""
    body = TC.pack(0, ifindex, 1, parent, _FILTER_PRIORITY_1_ALL) + _filter(program_fd, name)
    return Request(f"attach {name} to link {ifindex}", RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, body)


def delete_filter(ifindex: int, parent: int) -> Request:
    """Delete the filter of :func:`replace_filter`; a missing filter, clsact or link is ignored."""
    body = TC.pack(0, ifindex, 1, parent, _FILTER_PRIORITY_1_ALL) + _BPF
    missing = errno.ENOENT, errno.EINVAL, errno.ENODEV
    return Request(f"detach from link {ifindex}", RTM_DELTFILTER, 0, body, missing)


def dump_filters(ifindex: int, parent: int) -> Request:
    """Dump the filters of one direction of a link; none for a missing link or one without clsact."""
    body = TC.pack(0, ifindex, 0, parent, 0)
    return Request(f"list filters of link {ifindex}", RTM_GETTFILTER, NLM_F_DUMP, body)


def set_xdp(ifindex: int, program_fd: int, *, generic: bool, instead_of: int | None) -> Request:
    """Attach an XDP program in driver or generic mode; -1 detaches.

    ``instead_of`` is a descriptor of the program expected to be attached, None for none; the kernel refuses
    otherwise.
    """
    flags = XDP_FLAGS_SKB_MODE if generic else XDP_FLAGS_DRV_MODE
    nested = attribute(IFLA_XDP_FD, struct.pack("=i", program_fd))
    if instead_of is None:
        flags |= XDP_FLAGS_UPDATE_IF_NOEXIST
    else:
        flags |= XDP_FLAGS_REPLACE
        nested += u32(IFLA_XDP_EXPECTED_FD, instead_of)
    nested += u32(IFLA_XDP_FLAGS, flags)
    body = LINK.pack(0, 0, ifindex, 0, 0) + attribute(IFLA_XDP | NLA_F_NESTED, nested)
    what = "take XDP off" if program_fd < 0 else "attach XDP to"
    return Request(f"{what} link {ifindex}", RTM_SETLINK, 0, body)
