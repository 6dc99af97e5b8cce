"""The plain model's view of a frame: what its headers say, and how a hop changes it.

Needs: nothing.   Gives: Flow, RefusedError, read_ipv4(), hop_ipv4(), protocols and flags by name.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

Address = IPv4Address | IPv6Address

ETHERNET: Final = 14  # bytes of header
TCP, UDP, ICMP = 6, 17, 1
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

INVALID, TRUNCATED, UNKNOWN_TRANSPORT, FRAGMENT = 134, 135, 137, 157
_TRANSPORT_HEADER: Final = {TCP: 20, UDP: 8, ICMP: 8}


class Direction(IntEnum):
    """Which way a packet goes, seen from the pod."""

    INGRESS = 1
    EGRESS = 2


@dataclass(frozen=True, slots=True)
class Flow:
    """What conntrack and policy need to know of a packet."""

    source: Address
    destination: Address
    protocol: int
    hops: int
    """How many it may still take."""
    sport: int = 0
    """As conntrack keys it: an echo has its id on the side that asks, and nothing on the other."""
    dport: int = 0
    policy_port: int = 0
    """As policy keys it: for ICMP the type."""
    tcp_flags: int = 0
    related: bool = False
    """An ICMP error: it belongs to whatever flow the two addresses have."""
    frag_needed: bool = False
    """The one error that no policy may stop: path MTU discovery needs it (RFC 1191)."""
    answer_likely: bool = False
    """Whether it looks like an answer: from the lower port, an echo's reply, or an error."""


class RefusedError(Exception):
    """The packet cannot be used for this reason. ``source``: of the address, as far as it could be read."""

    def __init__(self, reason: int, source: Address | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source


def read_ipv4(frame: bytes) -> Flow:
    """The flow of an IPv4 frame, or RefusedError."""
    header = frame[ETHERNET : ETHERNET + 20]
    if len(header) < 20:
        raise RefusedError(INVALID)
    version, words = header[0] >> 4, header[0] & 0xF
    total, identifier, fragment = struct.unpack_from(">HHH", header, 2)
    del identifier
    if version != 4 or words < 5 or not words * 4 <= total <= len(frame) - ETHERNET:
        raise RefusedError(INVALID)
    source, destination = IPv4Address(header[12:16]), IPv4Address(header[16:20])
    if fragment & 0x1FFF:
        raise RefusedError(FRAGMENT, source)
    return _read_transport(source, destination, header[9], header[8], frame[ETHERNET + words * 4 :])


def _read_transport(source: Address, destination: Address, protocol: int, hops: int, body: bytes) -> Flow:
    needed = _TRANSPORT_HEADER.get(protocol)
    if needed is None:
        raise RefusedError(UNKNOWN_TRANSPORT, source)
    if len(body) < needed:
        raise RefusedError(TRUNCATED, source)
    if protocol == ICMP:
        return _read_icmp(source, destination, hops, body)
    sport, dport = struct.unpack_from(">HH", body)
    flags = body[13] if protocol == TCP else 0
    return Flow(
        *(source, destination, protocol, hops, sport, dport),
        policy_port=dport,
        tcp_flags=flags,
        answer_likely=sport < dport,
    )


def _read_icmp(source: Address, destination: Address, hops: int, body: bytes) -> Flow:
    kind, code, _, identifier = struct.unpack_from(">BBHH", body)
    return Flow(
        source,
        destination,
        ICMP,
        hops,
        sport=identifier if kind == 8 else 0,
        dport=identifier if kind == 0 else 0,
        policy_port=kind,
        related=kind in {3, 11, 12},
        frag_needed=(kind, code) == (3, 4),
        answer_likely=kind in {0, 3, 11, 12},
    )


def hop_ipv4(frame: bytes, source_mac: bytes, destination_mac: bytes) -> bytes:
    """The frame one hop further: new MACs, one hop less, the checksum adjusted (RFC 1141)."""
    changed = bytearray(frame)
    changed[:12] = destination_mac + source_mac
    changed[ETHERNET + 8] -= 1
    (checksum,) = struct.unpack_from(">H", changed, ETHERNET + 10)
    checksum += 0x0100
    checksum += checksum >= 0xFFFF
    struct.pack_into(">H", changed, ETHERNET + 10, checksum & 0xFFFF)
    return bytes(changed)
