"""The frames of the self-check: small, and right in every byte that counts.

For:    the self-check. Needs: nothing. Gives: functions that build Ethernet frames.
Source: RFC 791, 826, 8200, 4443, 4861.
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

ARP: Final = 0x0806
IPV4: Final = 0x0800
IPV6: Final = 0x86DD
_UDP: Final = 17
_ICMPV6: Final = 58
_SOLICITATION, _ADVERTISEMENT = 135, 136
_SOLICITED_OVERRIDE: Final = 0x60000000


def ethernet(destination: bytes, source: bytes, protocol: int) -> bytes:
    """An Ethernet II header."""
    return destination + source + struct.pack(">H", protocol)


def checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    words = sum(struct.unpack(f">{len(data) // 2}H", data))
    words = (words & 0xFFFF) + (words >> 16)
    return struct.pack(">H", ~(words + (words >> 16)) & 0xFFFF)


def udp(source: IPv4Address, destination: IPv4Address) -> bytes:
    """A small datagram in IPv4, its UDP checksum left out as RFC 768 allows."""
    header = struct.pack(">BBHIBBH4s4s", 0x45, 0, 36, 0, 64, _UDP, 0, source.packed, destination.packed)
    header = header[:10] + checksum(header) + header[12:]
    return header + struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)


def udp6(source: IPv6Address, destination: IPv6Address) -> bytes:
    """The same in IPv6, where the checksum is needed."""
    body = struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)
    full = checksum(_pseudo(source, destination, _UDP, len(body)) + body)
    return _ipv6(source, destination, _UDP, 64, body[:6] + full + body[8:])


def arp(operation: int, sender: tuple[bytes, IPv4Address], target: tuple[bytes, IPv4Address]) -> bytes:
    """An ARP message about IPv4 over Ethernet."""
    ends = sender[0] + sender[1].packed + target[0] + target[1].packed
    return struct.pack(">HHBBH", 1, IPV4, 6, 4, operation) + ends


def solicitation(source: IPv6Address, mac: bytes, target: IPv6Address) -> bytes:
    """Who has ``target``? Asked of its solicited-node group."""
    group = IPv6Address(int(IPv6Address("ff02::1:ff00:0")) | (int(target) & 0xFFFFFF))
    return _neighbour(_SOLICITATION, 0, (source, group), target, b"\x01\x01" + mac)


def advertisement(target: IPv6Address, mac: bytes, destination: IPv6Address) -> bytes:
    """The answer: ``target`` is at ``mac``."""
    ends = target, destination
    return _neighbour(_ADVERTISEMENT, _SOLICITED_OVERRIDE, ends, target, b"\x02\x01" + mac)


def _neighbour(
    kind: int, flags: int, ends: tuple[IPv6Address, IPv6Address], target: IPv6Address, option: bytes
) -> bytes:
    body = struct.pack(">BBHI", kind, 0, 0, flags) + target.packed + option
    full = checksum(_pseudo(*ends, _ICMPV6, len(body)) + body)
    return _ipv6(*ends, _ICMPV6, 255, body[:2] + full + body[4:])


def _ipv6(source: IPv6Address, destination: IPv6Address, following: int, hops: int, body: bytes) -> bytes:
    return (
        struct.pack(">IHBB", 6 << 28, len(body), following, hops) + source.packed + destination.packed + body
    )


def _pseudo(source: IPv6Address, destination: IPv6Address, following: int, length: int) -> bytes:
    return source.packed + destination.packed + struct.pack(">II", length, following)
