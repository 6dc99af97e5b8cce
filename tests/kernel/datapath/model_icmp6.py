"""The plain model's ICMPv6: messages that the node itself sends to a pod.

Source: RFC 4861 (neighbour discovery), RFC 4443 (errors).
"""

import struct
from ipaddress import IPv6Address
from typing import Final

_ALL_NODES: Final = IPv6Address("ff02::1")
_SHORTEST: Final = 14 + 40 + 24
QUOTED: Final = 48
"""Bytes of a packet that an error quotes: an IPv6 header and 8 more."""
QUOTED_TCP: Final = 60
"""Bytes quoted of a TCP packet: its whole header."""


def solicited(frame: bytes) -> IPv6Address | None:
    """Return the target address of a solicitation, or None if it is truncated."""
    return IPv6Address(frame[62:78]) if len(frame) >= _SHORTEST else None


def advertisement(
    frame: bytes, target: IPv6Address, mac: bytes, sender: IPv6Address, *, router: bool
) -> bytes:
    """Return the advertisement of the link's MAC; without a source address it goes to all nodes."""
    asker = IPv6Address(frame[22:38])
    anonymous = asker == IPv6Address("::")
    flags = 0x20 | (0 if anonymous else 0x40) | (0x80 if router else 0)
    message = struct.pack(">BBHB3x16sBB6s", 136, 0, 0, flags, target.packed, 2, 1, mac)
    header = bytearray(frame[14:54])
    struct.pack_into(">HBB", header, 4, len(message), 58, 255)
    header[8:24] = sender.packed
    header[24:40] = (_ALL_NODES if anonymous else asker).packed
    return frame[6:12] + mac + frame[12:14] + bytes(header) + checked(bytes(header), message)


def link_local(mac: bytes) -> IPv6Address:
    """Return the link-local address of an interface (RFC 4291, appendix A)."""
    return IPv6Address(
        bytes.fromhex("fe80000000000000") + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
    )


def hops_used_up(frame: bytes, host_mac: bytes, router: IPv6Address, pod: IPv6Address, quoted: int) -> bytes:
    """Return a Time Exceeded error from the link's gateway that quotes the packet."""
    message = struct.pack(">BBHI", 3, 0, 0, 0) + frame[14 : 14 + quoted]
    header = struct.pack(">IHBB16s16s", 6 << 28, len(message), 58, 1, router.packed, pod.packed)
    return frame[6:12] + host_mac + frame[12:14] + header + checked(header, message)


def checked(header: bytes, message: bytes) -> bytes:
    """Return the message with its checksum, over the pseudo-header and itself."""
    data = header[8:40] + struct.pack(">II", len(message), 58) + message
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return message[:2] + struct.pack(">H", ~total & 0xFFFF) + message[4:]
