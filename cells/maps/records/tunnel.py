"""What is inside the maps of the tunnel and of the other nodes.

For:    every cell that reads or writes them. Needs: nothing.
Gives:  TunnelConfig, TunnelKey, TunnelValue, NodeKey, NodeValue.
Source: Cilium 1.17 for cilium_tunnel_map and cilium_node_map_v2; hive_tunnel is our own. Little endian, but
        addresses and ports in network order.
"""

from ipaddress import IPv4Address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import IPAddress, Layout, address_of, family_of

TUNNEL_OWN_IDENTITIES: Final = 1
"""Each node gives its pods numbers of its own: another's mean nothing here."""

_config = Layout(
    "tunnel_config", ifindex="I", mtu="I", port="2s", pad="2x", source="4s", flags="I", reserved="12x"
)
_tunnel_key = Layout("tunnel_key", network="16s", family="B", pad="x", cluster_id="H")
_tunnel_value = Layout("tunnel_value", node="16s", family="B", key="B", pad="2x")
_node_key = Layout("node_key", pad="2x", pad2="x", family="B", ip="16s")
_node_value = Layout("node_value", id="H", spi="B", pad="x")


class TunnelConfig(msgspec.Struct, frozen=True):
    """The one value of hive_tunnel, 32 bytes: the tunnel's device; all zero without a tunnel."""

    SIZE: ClassVar = _config.size

    ifindex: int = 0
    mtu: int = 0
    """Of the packets inside."""
    port: int = 0
    """UDP, of the packets outside."""
    source: IPv4Address = IPv4Address(0)
    """Of the packets outside; 0.0.0.0: whichever routing chooses."""
    flags: int = 0
    """TUNNEL_OWN_IDENTITIES."""

    def pack(self) -> bytes:
        return _config.pack(
            self.ifindex, self.mtu, self.port.to_bytes(2, "big"), self.source.packed, self.flags
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ifindex, mtu, port, source, flags = _config.unpack(data)
        return cls(ifindex, mtu, int.from_bytes(port, "big"), IPv4Address(source), flags)


class TunnelKey(msgspec.Struct, frozen=True):
    """Key of cilium_tunnel_map, 20 bytes: the network address of a node's pods."""

    SIZE: ClassVar = _tunnel_key.size

    network: IPAddress
    cluster_id: int = 0

    def pack(self) -> bytes:
        return _tunnel_key.pack(self.network.packed, family_of(self.network), self.cluster_id)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        network, family, cluster_id = _tunnel_key.unpack(data)
        return cls(address_of(network, family), cluster_id)


class TunnelValue(msgspec.Struct, frozen=True):
    """Value of cilium_tunnel_map, 20 bytes: the node that has the pods."""

    SIZE: ClassVar = _tunnel_value.size

    node: IPAddress
    encrypt_key: int = 0

    def pack(self) -> bytes:
        return _tunnel_value.pack(self.node.packed, family_of(self.node), self.encrypt_key)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        node, family, key = _tunnel_value.unpack(data)
        return cls(address_of(node, family), key)


class NodeKey(msgspec.Struct, frozen=True):
    """Key of cilium_node_map_v2, 20 bytes: an address of another node."""

    SIZE: ClassVar = _node_key.size

    ip: IPAddress

    def pack(self) -> bytes:
        return _node_key.pack(family_of(self.ip), self.ip.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        family, ip = _node_key.unpack(data)
        return cls(address_of(ip, family))


class NodeValue(msgspec.Struct, frozen=True):
    """Value of cilium_node_map_v2, 4 bytes: the number of the node, 1 to 65535, one for all its addresses."""

    SIZE: ClassVar = _node_value.size

    id: int
    spi: int = 0

    def pack(self) -> bytes:
        return _node_value.pack(self.id, self.spi)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*_node_value.unpack(data))
