"""A packet taken apart: addresses, ports, flags; and the same in a few words.

For:    those who show or filter events. Needs: nothing. Gives: Packet, dissect(), protocol_text().
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

_IPV4, _IPV6, _ARP = 0x0800, 0x86DD, 0x0806
_TCP, _UDP, _ICMP, _ICMPV6 = 6, 17, 1, 58
_PROTOCOLS: Final = {_TCP: "tcp", _UDP: "udp", _ICMP: "icmp", _ICMPV6: "icmpv6", 132: "sctp"}
_FLAGS: Final = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")  # RFC 9293, from the lowest bit


class Packet(msgspec.Struct, frozen=True):
    """What could be read of a packet, which may be cut off anywhere."""

    source_mac: str
    destination_mac: str
    source: IPv4Address | IPv6Address | None = None
    """None: it is no IP packet."""
    destination: IPv4Address | IPv6Address | None = None
    protocol: str = ""
    """``tcp``, ``udp``, ``icmp``, ``icmpv6``, ``sctp``, ``protocol 47``; ``arp``; ``ethertype 0x88cc``."""
    ports: tuple[int, int] | None = None
    """Source and destination; None where there are none, as in a later fragment."""
    detail: str = ""
    """Flags of TCP, type and code of ICMP."""


def dissect(packet: bytes) -> Packet | None:
    """The packet from its Ethernet header on; None where even that is not whole."""
    if len(packet) < 14:
        return None
    source_mac, destination_mac = packet[6:12].hex(":"), packet[:6].hex(":")
    (protocol,) = struct.unpack_from(">H", packet, 12)
    body = packet[14:]
    source: IPv4Address | IPv6Address
    destination: IPv4Address | IPv6Address
    if protocol == _IPV4 and len(body) >= 20:
        source, destination = IPv4Address(body[12:16]), IPv4Address(body[16:20])
        later = struct.unpack_from(">H", body, 6)[0] & 0x1FFF
        number, body = body[9], b"" if later else body[(body[0] & 0xF) * 4 :]
    elif protocol == _IPV6 and len(body) >= 40:
        source, destination = IPv6Address(body[8:24]), IPv6Address(body[24:40])
        number, body = body[6], body[40:]
    else:
        name = "arp" if protocol == _ARP else f"ethertype 0x{protocol:04x}"
        return Packet(source_mac, destination_mac, protocol=name)
    name = _PROTOCOLS.get(number, f"protocol {number}")
    ports, detail = _transport(number, body)
    return Packet(source_mac, destination_mac, source, destination, name, ports, detail)


def _transport(protocol: int, body: bytes) -> tuple[tuple[int, int] | None, str]:
    if protocol in {_TCP, _UDP} and len(body) >= 4:
        bits = body[13] if protocol == _TCP and len(body) >= 14 else 0
        flags = (flag for bit, flag in enumerate(_FLAGS) if bits & 1 << bit)
        return struct.unpack_from(">HH", body), ", ".join(flags)
    if protocol in {_ICMP, _ICMPV6} and len(body) >= 2:
        return None, f"type {body[0]} code {body[1]}"
    return None, ""


def protocol_text(packet: bytes) -> str:
    """Like ``tcp SYN, ACK``. Of a cut-off packet, as much as is there."""
    found = dissect(packet)
    if found is None:
        return "no packet" if not packet else f"[{packet.hex()}]"
    return f"{found.protocol} {found.detail}".rstrip()
