"""Decodes the headers of a captured packet: Ethernet, IPv4, IPv6, and TCP, UDP, SCTP or ICMP.

Decoding stops at an unknown header without an error. For IP in IP, the inner header is used; VXLAN and Geneve
are not decapsulated.

Source: Cilium 1.17, the gopacket layers of pkg/hubble/parser/threefour.
"""

from __future__ import annotations

import functools
import socket
import struct
from typing import Final

import msgspec

from cells.hubble.codec import share
from cells.hubble.enums import IPVersion
from cells.hubble.flow import IP, SCTP, TCP, UDP, Ethernet, ICMPv4, ICMPv6, Layer4, TCPFlags

IPV4, IPV6 = 0x0800, 0x86DD
_IPIP, _TCP, _UDP, _6IN4, _ICMPV6, _IPIP_94, _SCTP, _ICMPV4, _HOP_BY_HOP = 4, 6, 17, 41, 58, 94, 132, 1, 0

_NOP = 1
"""The one-byte NOP option, which pads a TCP header."""

_ports = struct.Struct(">HH")
_ipv4 = struct.Struct(">BxHxxHxBxx4s4s")
_ipv6 = struct.Struct(">4xHBx16s16s")

ICMPV4_TYPES: Final = {
    0: "EchoReply",
    3: "DestinationUnreachable",
    4: "SourceQuench",
    5: "Redirect",
    8: "EchoRequest",
    9: "RouterAdvertisement",
    10: "RouterSolicitation",
    11: "TimeExceeded",
    12: "ParameterProblem",
    13: "TimestampRequest",
    14: "TimestampReply",
    15: "InfoRequest",
    16: "InfoReply",
    17: "AddressMaskRequest",
    18: "AddressMaskReply",
}
ICMPV4_CODES: Final = {
    3: (
        *("Net", "Host", "Protocol", "Port", "FragmentationNeeded", "SourceRoutingFailed", "NetUnknown"),
        *("HostUnknown", "SourceIsolated", "NetAdminProhibited", "HostAdminProhibited", "NetTOS", "HostTOS"),
        *("CommAdminProhibited", "HostPrecedence", "PrecedenceCutoff"),
    ),
    5: ("Net", "Host", "TOS+Net", "TOS+Host"),
    11: ("TTLExceeded", "FragmentReassemblyTimeExceeded"),
    12: ("PointerIndicatesError", "MissingOption", "BadLength"),
}
ICMPV6_TYPES: Final = {
    1: "DestinationUnreachable",
    2: "PacketTooBig",
    3: "TimeExceeded",
    4: "ParameterProblem",
    128: "EchoRequest",
    129: "EchoReply",
    133: "RouterSolicitation",
    134: "RouterAdvertisement",
    135: "NeighborSolicitation",
    136: "NeighborAdvertisement",
    137: "Redirect",
}
ICMPV6_CODES: Final = {
    1: (
        *("NoRouteToDst", "AdminProhibited", "BeyondScopeOfSrc", "AddressUnreachable", "PortUnreachable"),
        *("SrcAddressFailedPolicy", "RejectRouteToDst"),
    ),
    3: ("HopLimitExceeded", "FragmentReassemblyTimeExceeded"),
    4: ("ErroneousHeaderField", "UnrecognizedNextHeader", "UnrecognizedIPv6Option"),
}
FLAGS: Final = ("SYN", "ACK", "RST", "FIN", "PSH", "URG", "ECE", "CWR", "NS")
"""TCP flags in the order of Cilium's output."""
_BITS: Final = {
    name: 1 << bit for bit, name in enumerate(("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR", "NS"))
}


class PacketError(ValueError):
    """Raised for a truncated or inconsistent header."""


class Headers(msgspec.Struct, gc=False):
    """Decoded headers. Instances are shared and must not be changed."""

    ethernet: Ethernet | None = None
    ip: IP | None = None
    l4: Layer4 | None = None
    source_port: int = 0
    destination_port: int = 0
    protocol: int = 0
    """The IP protocol number; 0 unless the L4 header was decoded."""
    summary: str = ""


@functools.lru_cache(maxsize=4096)
def ip_text(packed: bytes) -> str:
    """Format an address as Go's net.IP does: IPv4-mapped IPv6 addresses as IPv4."""
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    if packed[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    text = socket.inet_ntop(socket.AF_INET6, packed)
    if "." in text:  # glibc prints ::7f00:1 as ::127.0.0.1
        high, low = struct.unpack(">HH", packed[12:])
        text = f"::{high:x}:{low:x}"
    return text


@functools.cache
def tcp_flags(bits: int) -> tuple[TCPFlags, str]:
    """Return the TCP flags of the nine bits, and their text."""
    names = [name for name in FLAGS if bits & _BITS[name]]
    return share(TCPFlags(**dict.fromkeys(names, True))), "TCP Flags: " + ", ".join(names)


@functools.lru_cache(maxsize=1024)
def _ethernet(addresses: bytes) -> Ethernet:
    return share(Ethernet(source=addresses[6:].hex(":"), destination=addresses[:6].hex(":")))


@functools.lru_cache(maxsize=4096)
def _ip(source: bytes, destination: bytes) -> IP:
    version = IPVersion.IPv4 if len(source) == 4 else IPVersion.IPv6
    return share(IP(source=ip_text(source), destination=ip_text(destination), ipVersion=version))


@functools.lru_cache(maxsize=4096)
def _tcp(ports: bytes, bits: bytes) -> tuple[Layer4, str, int, int]:
    source, destination = _ports.unpack(ports)
    flags, summary = tcp_flags((bits[0] & 1) << 8 | bits[1])
    header = TCP(source_port=source, destination_port=destination, flags=flags)
    return share(Layer4(TCP=header)), summary, source, destination


def read_packet(data: bytes) -> Headers:
    """Decode a packet that starts with Ethernet; an empty one has no headers. Raises PacketError."""
    if not data:
        return Headers()
    if len(data) < 14:
        raise PacketError("Ethernet packet too small")
    headers = Headers(ethernet=_ethernet(data[:12]), summary="Ethernet")
    kind = data[12] << 8 | data[13]
    if len(data) > 14:
        if kind == IPV4:
            _read_ipv4(headers, data[14:])
        elif kind == IPV6:
            _read_ipv6(headers, data[14:])
    return headers


def _read_ipv4(headers: Headers, data: bytes) -> None:
    if len(data) < 20:
        raise PacketError(f"Invalid ip4 header. Length {len(data)} less than 20")
    first, total, fragment, protocol, source, destination = _ipv4.unpack_from(data)
    header = (first & 0xF) * 4
    total = total or len(data)
    if total < 20:
        raise PacketError(f"Invalid (too small) IP length ({total} < 20)")
    if header < 20:
        raise PacketError(f"Invalid (too small) IP header length ({header // 4} < 5)")
    if header > min(total, len(data)):
        raise PacketError(f"Invalid IP header length {header}: more than there are bytes")
    headers.ip = _ip(source, destination)
    headers.summary = "IPv4"
    if not fragment & 0x3FFF:  # a fragment: MF flag or fragment offset
        _read_next(headers, protocol, data[header:total])


def _read_ipv6(headers: Headers, data: bytes) -> None:
    if len(data) < 40:
        raise PacketError(f"Invalid ip6 header. Length {len(data)} less than 40")
    length, protocol, source, destination = _ipv6.unpack_from(data)
    start = 40
    if protocol == _HOP_BY_HOP:
        if len(data) < 48 or len(data) < (start := 48 + data[41] * 8):
            raise PacketError("Invalid IPv6 hop-by-hop header: truncated")
        protocol = data[40]
    elif not length:
        raise PacketError("IPv6 length 0, but the next header is not hop-by-hop")
    headers.ip = _ip(source, destination)
    headers.summary = "IPv6"
    _read_next(headers, protocol, data[start : 40 + length] if length else data[start:])


def _read_next(headers: Headers, protocol: int, data: bytes) -> None:
    if (reader := _READERS.get(protocol)) and data:
        reader(headers, data)


def _read_tcp(headers: Headers, data: bytes) -> None:
    if len(data) < 20:
        raise PacketError(f"Invalid TCP header. Length {len(data)} less than 20")
    if (offset := data[12] >> 4) < 5:
        raise PacketError(f"Invalid TCP data offset {offset} < 5")
    if offset > 5:
        _check_tcp_options(data, offset * 4)
    headers.l4, headers.summary, headers.source_port, headers.destination_port = _tcp(data[:4], data[12:14])
    headers.protocol = _TCP


def _check_tcp_options(data: bytes, end: int) -> None:
    if end > len(data):
        raise PacketError("TCP data offset greater than packet length")
    at = 20
    while at < end and data[at]:
        length = 1 if data[at] == _NOP else data[at + 1] if at + 1 < end else 0
        if length < (1 if data[at] == _NOP else 2) or at + length > end:
            raise PacketError(f"Invalid TCP option length {length} of {end - at} bytes")
        at += length


def _read_udp(headers: Headers, data: bytes) -> None:
    if len(data) < 8:
        raise PacketError(f"Invalid UDP header. Length {len(data)} less than 8")
    source, destination = _ports.unpack_from(data)
    if 0 < (length := data[4] << 8 | data[5]) < 8:
        raise PacketError(f"UDP packet too small: {length} bytes")
    headers.l4 = Layer4(UDP=UDP(source_port=source, destination_port=destination))
    headers.source_port, headers.destination_port, headers.protocol = source, destination, _UDP
    headers.summary = "UDP"


def _read_sctp(headers: Headers, data: bytes) -> None:
    if len(data) < 12:
        raise PacketError("Invalid SCTP common header length")
    source, destination = _ports.unpack_from(data)
    headers.l4 = Layer4(SCTP=SCTP(source_port=source, destination_port=destination))
    headers.source_port, headers.destination_port, headers.protocol = source, destination, _SCTP
    headers.summary = "SCTP"


def _read_icmpv4(headers: Headers, data: bytes) -> None:
    if len(data) < 8:
        raise PacketError("ICMP layer less than 8 bytes for ICMPv4 packet")
    kind, code = data[0], data[1]
    headers.l4 = Layer4(ICMPv4=ICMPv4(type=kind, code=code))
    headers.protocol = _ICMPV4
    headers.summary = "ICMPv4 " + icmp_text(kind, code, ICMPV4_TYPES, ICMPV4_CODES)


def _read_icmpv6(headers: Headers, data: bytes) -> None:
    if len(data) < 4:
        raise PacketError("ICMP layer less than 4 bytes for ICMPv6 packet")
    kind, code = data[0], data[1]
    headers.l4 = Layer4(ICMPv6=ICMPv6(type=kind, code=code))
    headers.protocol = _ICMPV6
    headers.summary = "ICMPv6 " + icmp_text(kind, code, ICMPV6_TYPES, ICMPV6_CODES)


def icmp_text(kind: int, code: int, types: dict[int, str], codes: dict[int, tuple[str, ...]]) -> str:
    """Format type and code as gopacket does: ``EchoRequest``, ``DestinationUnreachable(Port)``, ``42(0)``."""
    if kind not in types:
        return f"{kind}({code})"
    known = codes.get(kind, ())
    if not code and not known:
        return types[kind]
    return f"{types[kind]}({known[code] if code < len(known) else f'Code: {code}'})"


_READERS: Final = {
    _TCP: _read_tcp,
    _UDP: _read_udp,
    _SCTP: _read_sctp,
    _ICMPV4: _read_icmpv4,
    _ICMPV6: _read_icmpv6,
    _IPIP: _read_ipv4,
    _IPIP_94: _read_ipv4,
    _6IN4: _read_ipv6,
}
