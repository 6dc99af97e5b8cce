"""Rows of cilium_lxc: the addresses of this node, and the endpoint behind each.

For:    every cell that reads or writes the map. Needs: nothing. Gives: LxcKey, LxcValue.
Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order.

A MAC is 6 bytes, in memory the low 6 of a u64. struct.error on data of another size.
"""

from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import IPAddress, Layout, address_of, family_of

LXC_HOST: Final = 1
"""Flag of a cilium_lxc row that stands for the node itself."""

_lxc_key = Layout("address_key", ip="16s", family="B", key="B", cluster_id="H")
_lxc_value = Layout(
    "address_info",
    ifindex="I",
    unused="H",
    endpoint_id="H",
    flags="I",
    hole="4x",
    pod_mac="6s2x",
    host_mac="6s2x",
    identity="I",
    pad="12x",
)


class LxcKey(msgspec.Struct, frozen=True):
    """Key of cilium_lxc, 20 bytes: an address of this node."""

    SIZE: ClassVar = _lxc_key.size

    ip: IPAddress
    cluster_id: int = 0

    def pack(self) -> bytes:
        return _lxc_key.pack(self.ip.packed, family_of(self.ip), 0, self.cluster_id)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ip, family, _, cluster_id = _lxc_key.unpack(data)
        return cls(address_of(ip, family), cluster_id)


class LxcValue(msgspec.Struct, frozen=True):
    """Value of cilium_lxc, 48 bytes: the endpoint behind an address, or only ``flags=LXC_HOST``."""

    SIZE: ClassVar = _lxc_value.size

    ifindex: int = 0
    """Of the host side of the pair, on which packets for the pod leave."""
    endpoint_id: int = 0
    mac: bytes = bytes(6)
    """Of the pod."""
    node_mac: bytes = bytes(6)
    """Of the host side."""
    identity: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return _lxc_value.pack(
            self.ifindex, 0, self.endpoint_id, self.flags, self.mac, self.node_mac, self.identity
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ifindex, _, endpoint_id, flags, mac, node_mac, identity = _lxc_value.unpack(data)
        return cls(ifindex, endpoint_id, mac, node_mac, identity, flags)

    @property
    def is_host(self) -> bool:
        """Whether the address is the node's own."""
        return bool(self.flags & LXC_HOST)
