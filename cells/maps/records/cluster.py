"""Records of the maps about the cluster: ipcache, tunnels, nodes, L2 announcements, egress gateways.

Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order. Decoders raise
struct.error on data of another size.
"""

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network, ip_network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records import IPV4, IPV6, IPAddress, Layout, address_of, family_of
from cells.maps.records.endpoints import LxcKey, LxcValue

__all__ = [
    "AGENT_LIVENESS",
    "L2_RESPONDER_VALUE",
    "TUNNEL_GATEWAYS",
    "TUNNEL_NOT_FOR_PODS",
    "TUNNEL_OVER_IPV6",
    "TUNNEL_OWN_IDENTITIES",
    "EgressKey",
    "EgressValue",
    "IpcacheKey",
    "IpcacheValue",
    "L2ResponderKey",
    "NodeKey",
    "NodeValue",
    "TunnelConfig",
    "TunnelKey",
    "TunnelValue",
    "ipcache_key",
    "ipcache_prefix",
    "ipcache_text",
    "row_text",
]


_ipcache_key = Layout("ipcache_key", prefixlen="I", cluster_id="H", pad="B", family="B", ip="16s")
_ipcache_value = Layout("ipcache_info", identity="I", tunnel_endpoint="4s", pad="2x", key="B", flags="B")


class IpcacheKey(msgspec.Struct, frozen=True):
    """Key of cilium_ipcache, 24 bytes: a prefix. Create it with :meth:`host` or :meth:`of`."""

    SIZE: ClassVar = _ipcache_key.size

    ip: IPAddress
    bits: int
    """Length of the address prefix: 32 for one IPv4 address."""
    cluster_id: int = 0

    @classmethod
    def host(cls, ip: IPAddress) -> Self:
        """Return the key of one address."""
        return cls(ip, ip.max_prefixlen)

    @classmethod
    def of(cls, network: IPv4Network | IPv6Network) -> Self:
        """Return the key of a network."""
        return cls(network.network_address, network.prefixlen)

    @property
    def network(self) -> IPv4Network | IPv6Network:
        """The prefix as a network."""
        return ip_network((self.ip, self.bits))

    def pack(self) -> bytes:
        return _ipcache_key.pack(32 + self.bits, self.cluster_id, 0, family_of(self.ip), self.ip.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        length, cluster_id, _, family, ip = _ipcache_key.unpack(data)
        return cls(address_of(ip, family), length - 32, cluster_id)


def ipcache_key(prefix: str) -> bytes:
    """Return the packed key of a prefix given as text, faster than by IpcacheKey."""
    address, _, bits = prefix.partition("/")
    family, kind = (IPV6, AF_INET6) if ":" in address else (IPV4, AF_INET)
    return _ipcache_key.pack(32 + int(bits), 0, 0, family, inet_pton(kind, address))


def ipcache_prefix(key: bytes) -> str:
    """Return the prefix of a packed key as text, as :mod:`ipaddress` formats it."""
    length, _, _, family, ip = _ipcache_key.unpack(key)
    address = inet_ntop(AF_INET, ip[:4]) if family == IPV4 else str(IPv6Address(ip))
    return f"{address}/{length - 32}"


class IpcacheValue(msgspec.Struct, frozen=True):
    """Value of cilium_ipcache, 12 bytes: the identity of a prefix, and how to reach it."""

    SIZE: ClassVar = _ipcache_value.size

    identity: int
    tunnel_endpoint: IPv4Address = IPv4Address(0)
    """The node to tunnel to; 0.0.0.0: local, or no tunnel."""
    encrypt_key: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return _ipcache_value.pack(self.identity, self.tunnel_endpoint.packed, self.encrypt_key, self.flags)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        identity, tunnel_endpoint, encrypt_key, flags = _ipcache_value.unpack(data)
        return cls(identity, IPv4Address(tunnel_endpoint), encrypt_key, flags)


# Maps of the tunnel and of other nodes.
#
# Source: Cilium 1.17 for cilium_tunnel_map and cilium_node_map_v2; hive_tunnel is our own. Little endian, but
#         addresses and ports in network order.

TUNNEL_OWN_IDENTITIES: Final = 1
"""Identities are local to each node, so those that other nodes send are ignored."""
TUNNEL_GATEWAYS: Final = 2
"""Packets to egress gateways use the tunnel."""
TUNNEL_NOT_FOR_PODS: Final = 4
"""Packets to other nodes' pods do not use the tunnel: they are routed natively."""
TUNNEL_OVER_IPV6: Final = 8
"""The outer packets are IPv6."""

_config = Layout(
    "tunnel_config", ifindex="I", mtu="I", port="2s", pad="2x", source="4s", flags="I", source_rest="12s"
)
_tunnel_key = Layout("tunnel_key", network="16s", family="B", pad="x", cluster_id="H")
_tunnel_value = Layout("tunnel_value", node="16s", family="B", key="B", pad="2x")
_node_key = Layout("node_key", pad="2x", pad2="x", family="B", ip="16s")
_node_value = Layout("node_value", id="H", spi="B", pad="x")


class TunnelConfig(msgspec.Struct, frozen=True):
    """The one value of hive_tunnel, 32 bytes: the tunnel device; all zero without a tunnel."""

    SIZE: ClassVar = _config.size

    ifindex: int = 0
    mtu: int = 0
    """MTU of the inner packets."""
    port: int = 0
    """UDP destination port of the outer packets."""
    source: IPAddress = IPv4Address(0)
    """Source address of the outer packets, of the family in ``flags``; unspecified: chosen by routing."""
    flags: int = 0
    """TUNNEL_OWN_IDENTITIES, TUNNEL_GATEWAYS, TUNNEL_NOT_FOR_PODS, TUNNEL_OVER_IPV6."""

    def pack(self) -> bytes:
        source, port = self.source.packed.ljust(16, b"\0"), self.port.to_bytes(2, "big")
        return _config.pack(self.ifindex, self.mtu, port, source[:4], self.flags, source[4:])

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ifindex, mtu, port, first, flags, rest = _config.unpack(data)
        family = IPV6 if flags & TUNNEL_OVER_IPV6 else IPV4
        return cls(ifindex, mtu, int.from_bytes(port, "big"), address_of(first + rest, family), flags)


class TunnelKey(msgspec.Struct, frozen=True):
    """Key of cilium_tunnel_map, 20 bytes: the network address of a node's pod CIDR."""

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
    """Value of cilium_tunnel_map, 20 bytes: the address of the node with these pods."""

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
    """Value of cilium_node_map_v2, 4 bytes: the node's id, 1 to 65535, the same for all its addresses."""

    SIZE: ClassVar = _node_value.size

    id: int
    spi: int = 0

    def pack(self) -> bytes:
        return _node_value.pack(self.id, self.spi)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*_node_value.unpack(data))


# Maps of L2 announcements, with which the node answers ARP requests for services' addresses.
#
# Source: Cilium 1.17 for cilium_l2_responder_v4 and cilium_runtime_config; bpf/netdev/announce.h. Addresses
#         are in network order.

_key = Layout("l2_responder_key", ipv4="4s", ifindex="I")
_value = Layout("l2_responder_value", responses_sent="Q")

L2_RESPONDER_VALUE: Final = _value
"""Value of cilium_l2_responder_v4: number of replies sent; written by the programs."""
AGENT_LIVENESS: Final = 1
"""Index in cilium_runtime_config of the agent's last heartbeat, in nanoseconds of CLOCK_MONOTONIC."""


class L2ResponderKey(msgspec.Struct, frozen=True):
    """Key of cilium_l2_responder_v4, 8 bytes: an address, and the device that answers requests for it."""

    SIZE: ClassVar = _key.size

    ip: IPv4Address
    ifindex: int

    def pack(self) -> bytes:
        return _key.pack(self.ip.packed, self.ifindex)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ip, ifindex = _key.unpack(data)
        return cls(IPv4Address(ip), ifindex)


# Egress gateways.
#
# Source: Cilium 1.17, cilium_egress_gw_policy_v4.

_egress_key = Layout("egress_key", prefixlen="I", saddr="4s", daddr="4s")
_egress_value = Layout("egress_value", egress_ip="4s", gateway_ip="4s")
_SOURCE_BITS: Final = 32


class EgressKey(msgspec.Struct, frozen=True):
    """Key of cilium_egress_gw_policy_v4, 12 bytes: a pod's address, and a destination CIDR.

    The CIDR keeps the host bits that a policy writes (1.1.1.5/24), as Cilium stores them. The trie ignores
    those, so keys that differ only there are equal.
    """

    SIZE: ClassVar = _egress_key.size

    source: IPv4Address
    destination: IPv4Interface

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EgressKey):
            return NotImplemented
        return self.source == other.source and self.destination.network == other.destination.network

    def __hash__(self) -> int:
        return hash((self.source, self.destination.network))

    def pack(self) -> bytes:
        network = self.destination
        return _egress_key.pack(
            _SOURCE_BITS + network.network.prefixlen, self.source.packed, network.ip.packed
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        bits, source, destination = _egress_key.unpack(data)
        return cls(IPv4Address(source), IPv4Interface((destination, bits - _SOURCE_BITS)))


class EgressValue(msgspec.Struct, frozen=True):
    """Value of cilium_egress_gw_policy_v4, 8 bytes."""

    SIZE: ClassVar = _egress_value.size

    egress_ip: IPv4Address
    """The source address for SNAT; 0.0.0.0 if this node is not the gateway or has no such address."""
    gateway_ip: IPv4Address
    """The gateway node; 0.0.0.0: none, packets are dropped; 0.0.0.1: an excluded CIDR, no gateway."""

    def pack(self) -> bytes:
        return _egress_value.pack(self.egress_ip.packed, self.gateway_ip.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        egress_ip, gateway_ip = _egress_value.unpack(data)
        return cls(IPv4Address(egress_ip), IPv4Address(gateway_ip))


# Entries of the maps as text, as Cilium's tools print them.
#
# Source: Cilium 1.17, the text of keys and values of cilium_lxc and cilium_ipcache.


def row_text(name: str, key: bytes, value: bytes | None) -> tuple[str, str]:
    """Return an entry's key and value as text. Maps other than lxc and ipcache are hexadecimal."""
    if name == "cilium_lxc":
        return f"{LxcKey.unpack(key).ip}:0", "" if value is None else _lxc(LxcValue.unpack(value))
    if name == "cilium_ipcache":
        return str(IpcacheKey.unpack(key).network), "" if value is None else ipcache_text(
            IpcacheValue.unpack(value)
        )
    return key.hex(), "" if value is None else value.hex()


def _lxc(row: LxcValue) -> str:
    if row.is_host:
        return "(localhost)"
    mac, node_mac = row.mac.hex(":").upper(), row.node_mac.hex(":").upper()
    return (
        f"id={row.endpoint_id:<5d} sec_id={row.identity:<5d} flags=0x{row.flags:04X} "
        f"ifindex={row.ifindex:<3d} mac={mac} nodemac={node_mac}"
    )


def ipcache_text(row: IpcacheValue) -> str:
    """Return an ipcache value as text."""
    flags = "skiptunnel" if row.flags & 1 else "<none>"
    return (
        f"identity={row.identity} encryptkey={row.encrypt_key} "
        f"tunnelendpoint={row.tunnel_endpoint}, flags={flags}"
    )
