"""What is inside the maps by which clients outside are served.

For:    every cell that reads or writes them. Needs: nothing. Gives: NodePortConfig, its flags.
Source: bpf/nodeport/maps.h; hive_nodeport is our own. Addresses are in network order.
"""

from ipaddress import IPv4Address, IPv6Address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import Layout

NODEPORT_ON: Final = 1
"""Clients outside are served."""
NODEPORT_DSR_TCP: Final = 2
"""Backends on other nodes answer them directly, in TCP."""
NODEPORT_DSR_OTHER: Final = 4
"""The same in other protocols."""
NODEPORT_MAGLEV: Final = 8
"""Backends are chosen by lookup tables."""
NODEPORT_DSR_CHOSEN: Final = 32
"""Whether backends elsewhere answer directly is each service's to say."""
NODEPORT_XDP: Final = 16
"""Programs in devices' drivers have looked at packets before."""

_config = Layout("nodeport_config", ipv4="4s", flags="I", ipv6="16s", seed4="I", seed6="I")
NEIGHBOUR: Final = Layout("nodeport_neighbour", mac="6s", pad="2x").size
"""Bytes of the values of cilium_nodeport_neigh4 and 6: the MAC that a client's packets come from."""


class NodePortConfig(msgspec.Struct, frozen=True):
    """The value of hive_nodeport, 32 bytes: all zero while no clients outside are served."""

    SIZE: ClassVar = _config.size

    flags: int = 0
    """NODEPORT_*."""
    ipv4: IPv4Address = IPv4Address(0)
    """What packets to backends on other nodes come from."""
    ipv6: IPv6Address = IPv6Address(0)
    seeds: tuple[int, int] = (0, 0)
    """Of the hashes of packets, for Maglev, of each family."""

    def pack(self) -> bytes:
        return _config.pack(self.ipv4.packed, self.flags, self.ipv6.packed, *self.seeds)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ipv4, flags, ipv6, *seeds = _config.unpack(data)
        return cls(flags, IPv4Address(ipv4), IPv6Address(ipv6), (seeds[0], seeds[1]))
