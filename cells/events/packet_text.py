"""A packet in a few words: addresses, ports, flags.

For:    the text of events. Needs: nothing. Gives: packet_text().
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

_IPV4, _IPV6, _ARP = 0x0800, 0x86DD, 0x0806
_TCP, _UDP, _ICMP, _ICMPV6 = 6, 17, 1, 58
_PROTOCOLS: Final = {_TCP: "tcp", _UDP: "udp", _ICMP: "icmp", _ICMPV6: "icmpv6", 132: "sctp"}
_FLAGS: Final = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")  # RFC 9293, from the lowest bit


def packet_text(packet: bytes) -> str:
    """Like ``10.0.0.1:40000 -> 10.0.0.2:80 tcp SYN, ACK``. Of a cut-off packet, as much as is there."""
    if len(packet) < 14:
        return "no packet" if not packet else f"[{packet.hex()}]"
    (protocol,) = struct.unpack_from(">H", packet, 12)
    body = packet[14:]
    if protocol == _IPV4 and len(body) >= 20:
        header = (body[0] & 0xF) * 4
        later = struct.unpack_from(">H", body, 6)[0] & 0x1FFF
        source, destination = str(IPv4Address(body[12:16])), str(IPv4Address(body[16:20]))
        return _ip_text(source, destination, body[9], b"" if later else body[header:])
    if protocol == _IPV6 and len(body) >= 40:
        source, destination = f"[{IPv6Address(body[8:24])}]", f"[{IPv6Address(body[24:40])}]"
        return _ip_text(source, destination, body[6], body[40:])
    if protocol == _ARP:
        return "arp"
    return f"ethertype 0x{protocol:04x}"


def _ip_text(source: str, destination: str, protocol: int, body: bytes) -> str:
    name = _PROTOCOLS.get(protocol, f"protocol {protocol}")
    if protocol in {_TCP, _UDP} and len(body) >= 4:
        sport, dport = struct.unpack_from(">HH", body)
        source, destination = f"{source}:{sport}", f"{destination}:{dport}"
        if protocol == _TCP and len(body) >= 14:
            flags = ", ".join(flag for bit, flag in enumerate(_FLAGS) if body[13] & 1 << bit)
            name = f"{name} {flags}".rstrip()
    else:
        source, destination = source.strip("[]"), destination.strip("[]")
        if protocol in {_ICMP, _ICMPV6} and len(body) >= 2:
            name = f"{name} type {body[0]} code {body[1]}"
    return f"{source} -> {destination} {name}"
