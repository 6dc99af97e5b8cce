"""Typed records of the keys and values in the maps; a test compares their bytes with the C structs."""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

# Layout declares a C struct once, for packing, size and offsets; a test compares it with the C.
#
# Source: cells/datapath/bpf/lib/maps.h, with the same names of structs and members.

IPAddress = IPv4Address | IPv6Address

IPV4: Final = 1  # family numbers in the maps; not AF_INET
IPV6: Final = 2

LAYOUTS: Final[list["Layout"]] = []
"""All layouts, for the test that compares them with the C."""


class Layout:
    """``struct <name>`` of lib/maps.h: members in order, as codes of the struct module, little endian.

    ``6s2x`` is a MAC in a u64, ``2s`` a number in network byte order, ``x`` padding. A name that begins with
    an underscore is a group of bit fields, which has no offset.
    """

    def __init__(self, name: str, **members: str) -> None:
        packed = struct.Struct("<" + "".join(members.values()))
        self.name = name
        self.size = packed.size
        """In bytes."""
        self.pack = packed.pack
        self.unpack = packed.unpack
        self.iter_unpack = packed.iter_unpack
        self.offsets: dict[str, int] = {}
        """Offsets of the members, in bytes."""
        position = 0
        for member, code in members.items():
            self.offsets[member] = position
            position += struct.calcsize("<" + code)
        LAYOUTS.append(self)


def family_of(ip: IPAddress) -> int:
    """Return the address family as the maps encode it."""
    return IPV4 if ip.version == 4 else IPV6


def address_of(data: bytes, family: int) -> IPAddress:
    """Decode 16 bytes that hold an address of either family; an IPv4 address is the first four."""
    return IPv4Address(data[:4]) if family == IPV4 else IPv6Address(data)
