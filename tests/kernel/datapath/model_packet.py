"""The plain model's parser: header fields of a frame, and the changes that a hop makes."""

import struct
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

Address = IPv4Address | IPv6Address

ETHERNET: Final = 14  # bytes of header
IPV4, IPV6 = 0x0800, 0x86DD
TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

INVALID, TRUNCATED, UNKNOWN_TRANSPORT, BAD_EXTENSION, FRAGMENT = 134, 135, 137, 156, 175
_TRANSPORT_HEADER: Final = {TCP: 20, UDP: 8, ICMP: 8, ICMPV6: 8}
_ICMP_OF: Final = {4: ICMP, 6: ICMPV6}
_HOP_OPTIONS, _ROUTING, _FRAGMENT, _AUTHENTICATION, _NOTHING, _OPTIONS = 0, 43, 44, 51, 59, 60
_MOST_EXTENSIONS: Final = 6
_ANSWERS: Final = frozenset({0, 14, 16, 18})
"""ICMP types that are replies with the identifier of the request."""


class Direction(IntEnum):
    """The direction of a packet, from the pod's view."""

    INGRESS = 1
    EGRESS = 2


@dataclass(frozen=True, slots=True)
class Flow:
    """The fields of a packet that conntrack and policy use."""

    source: Address
    destination: Address
    protocol: int
    hops: int
    """TTL or hop limit."""
    sport: int = 0
    """The source port in conntrack keys: an echo has its id on the requesting side, 0 on the other."""
    dport: int = 0
    policy_port: int = 0
    """The port in policy keys: for ICMP the type."""
    tcp_flags: int = 0
    related: bool = False
    """Whether it is an ICMP error."""
    quote: bytes = b""
    """The packet that an error quotes, possibly truncated, without Ethernet header."""
    plain: bool = True
    """Whether the transport header follows the network header directly."""
    answer_likely: bool = False
    """Whether it looks like a reply: from the lower port, an echo reply, or an error."""


def answered(flow: Flow) -> Flow:
    """Return the flow that this packet answers, with policy's keys."""
    asks = {ICMP: {0: 8}.get(flow.policy_port, flow.policy_port - 1), ICMPV6: 128}
    return replace(flow, policy_port=asks.get(flow.protocol, flow.sport))


def quoted(error: Flow) -> Flow | None:
    """Return the packet that an error quotes, or None if addresses and ports cannot be read.

    Only addresses and ports count, whatever else the quote contains.
    """
    quote = error.quote
    if error.source.version == 4:
        if len(quote) < 20 or quote[0] & 15 < 5 or int.from_bytes(quote[6:8], "big") & 0x1FFF:
            return None
        source: Address = IPv4Address(quote[12:16])
        destination: Address = IPv4Address(quote[16:20])
        protocol, rest = quote[9], quote[4 * (quote[0] & 15) :]
        icmp, request, reply = ICMP, 8, 0
    else:
        if len(quote) < 40:
            return None
        source, destination = IPv6Address(quote[8:24]), IPv6Address(quote[24:40])
        protocol, rest = quote[6], quote[40:]
        icmp, request, reply = ICMPV6, 128, 129
    if protocol == icmp:
        if len(rest) < 8 or rest[0] not in {request, reply}:
            return None
        identifier = int.from_bytes(rest[4:6], "big")
        ends = (identifier, 0) if rest[0] == request else (0, identifier)
        return Flow(source, destination, protocol, 0, *ends, policy_port=request)
    if protocol not in {TCP, UDP} or len(rest) < 4:
        return None
    sport, dport = struct.unpack_from(">HH", rest)
    return Flow(source, destination, protocol, 0, sport, dport, policy_port=dport)


class RefusedError(Exception):
    """A packet is dropped for this reason. ``source``: its source address, as far as it was read."""

    def __init__(self, reason: int, source: Address | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source


Fragments = MutableMapping[tuple[Address, Address, int, int], tuple[int, int]]
"""Ports of the first fragment, by (source, destination, identifier, protocol)."""


def read(frame: bytes, fragments: Fragments) -> Flow:
    """Return the flow of an IP frame, or raise RefusedError. Ports of a first fragment are stored."""
    if int.from_bytes(frame[12:14], "big") == IPV4:
        return _read_ipv4(frame, fragments)
    return _read_ipv6(frame, fragments)


def _read_ipv4(frame: bytes, fragments: Fragments) -> Flow:
    header = frame[ETHERNET : ETHERNET + 20]
    if len(header) < 20:
        raise RefusedError(INVALID)
    version, words = header[0] >> 4, header[0] & 0xF
    total, identifier, fragment = struct.unpack_from(">HHH", header, 2)
    if version != 4 or words < 5 or not words * 4 <= total <= len(frame) - ETHERNET:
        raise RefusedError(INVALID)
    ends = IPv4Address(header[12:16]), IPv4Address(header[16:20])
    body = frame[ETHERNET + words * 4 :]
    if not fragment & 0x3FFF:
        return _read_transport(*ends, header[9], header[8], body)
    return _read_fragment(*ends, header[9], header[8], body, identifier, not fragment & 0x1FFF, fragments)


def _read_ipv6(frame: bytes, fragments: Fragments) -> Flow:
    header = frame[ETHERNET : ETHERNET + 40]
    if len(header) < 40 or header[0] >> 4 != 6:
        raise RefusedError(INVALID)
    (length,) = struct.unpack_from(">H", header, 4)
    if length + 40 > len(frame) - ETHERNET:
        raise RefusedError(INVALID)
    ends = IPv6Address(header[8:24]), IPv6Address(header[24:40])
    kind, at, seen, part = header[6], ETHERNET + 40, 0, None
    while kind in {_HOP_OPTIONS, _ROUTING, _FRAGMENT, _AUTHENTICATION, _NOTHING, _OPTIONS}:
        extension = frame[at : at + 8]
        if kind == _NOTHING or seen == _MOST_EXTENSIONS or len(extension) < 8:
            raise RefusedError(BAD_EXTENSION, ends[0])
        seen += 1
        if kind == _FRAGMENT:
            if part is not None:
                raise RefusedError(BAD_EXTENSION, ends[0])
            offset, identifier = struct.unpack_from(">HI", extension, 2)
            part = (identifier, not offset & 0xFFF8)
            at += 8
        elif kind == _AUTHENTICATION:
            at += (extension[1] + 2) * 4
        else:
            at += (extension[1] + 1) * 8
        kind = extension[0]
        if part is not None and not part[1]:  # what follows is not in this fragment
            break
    if part is None:
        return _read_transport(*ends, kind, header[7], frame[at:], plain=not seen)
    return _read_fragment(*ends, kind, header[7], frame[at:], *part, fragments)


def _read_fragment(
    source: Address,
    destination: Address,
    protocol: int,
    hops: int,
    body: bytes,
    identifier: int,
    first: bool,
    fragments: Fragments,
) -> Flow:
    """Store the ports of a first fragment, or find them for a later one, which is else refused."""
    datagram = source, destination, identifier, protocol
    if first:
        flow = _read_transport(source, destination, protocol, hops, body, plain=False)
        fragments[datagram] = flow.sport, flow.dport
        return flow
    if datagram not in fragments:
        raise RefusedError(FRAGMENT, source)
    sport, dport = fragments[datagram]
    asks = {ICMP: (8, 0), ICMPV6: (128, 129)}.get(protocol)
    return Flow(
        *(source, destination, protocol, hops, sport, dport),
        policy_port=dport if asks is None else asks[1] if dport else asks[0],
        tcp_flags=ACK if asks is None else 0,
        answer_likely=sport < dport,
        plain=False,
    )


def _read_transport(
    source: Address, destination: Address, protocol: int, hops: int, body: bytes, *, plain: bool = True
) -> Flow:
    needed = _TRANSPORT_HEADER.get(protocol)
    if needed is None or protocol in {ICMP, ICMPV6} - {_ICMP_OF[source.version]}:
        raise RefusedError(UNKNOWN_TRANSPORT, source)
    if len(body) < needed:
        raise RefusedError(TRUNCATED, source)
    if protocol == ICMP:
        return _read_icmp(source, destination, hops, body)
    if protocol == ICMPV6:
        return _read_icmp6(source, destination, hops, body, plain)
    sport, dport = struct.unpack_from(">HH", body)
    flags = body[13] if protocol == TCP else 0
    return Flow(
        *(source, destination, protocol, hops, sport, dport),
        policy_port=dport,
        tcp_flags=flags,
        answer_likely=sport < dport,
        plain=plain,
    )


def _read_icmp(source: Address, destination: Address, hops: int, body: bytes) -> Flow:
    kind, _, _, identifier = struct.unpack_from(">BBHH", body)
    return Flow(
        source,
        destination,
        ICMP,
        hops,
        sport=identifier if kind in {8, 13, 15, 17} else 0,
        dport=identifier if kind in _ANSWERS else 0,
        policy_port=kind,
        related=kind in {3, 11, 12},
        quote=body[8:],
        answer_likely=kind in {3, 11, 12} | _ANSWERS,
    )


def _read_icmp6(source: Address, destination: Address, hops: int, body: bytes, plain: bool) -> Flow:
    kind, _, _, identifier = struct.unpack_from(">BBHH", body)
    return Flow(
        source,
        destination,
        ICMPV6,
        hops,
        sport=identifier if kind == 128 else 0,
        dport=identifier if kind == 129 else 0,
        policy_port=kind,
        related=kind in {1, 2, 3, 4},
        quote=body[8:],
        answer_likely=kind in {129, 1, 2, 3, 4},
        plain=plain,
    )


def hop(frame: bytes, source_mac: bytes, destination_mac: bytes) -> bytes:
    """Return the frame one hop later: new MACs, one hop less, the IPv4 checksum adjusted (RFC 1141)."""
    changed = bytearray(frame)
    changed[:12] = destination_mac + source_mac
    if int.from_bytes(frame[12:14], "big") == IPV6:
        changed[ETHERNET + 7] -= 1
        return bytes(changed)
    changed[ETHERNET + 8] -= 1
    (checksum,) = struct.unpack_from(">H", changed, ETHERNET + 10)
    checksum += 0x0100
    checksum += checksum >= 0xFFFF
    struct.pack_into(">H", changed, ETHERNET + 10, checksum & 0xFFFF)
    return bytes(changed)
