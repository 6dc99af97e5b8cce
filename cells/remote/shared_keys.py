"""The kvstore's JSON values of pod addresses and nodes.

Source: Cilium 1.17, IPIdentityPair below ip/v1/default/: the key is an address or a prefix. And
       pkg/node/types.Node below nodes/v1/, where a network is Go's net.IPNet, with its mask in base64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix, Source, tunnel_endpoint_of
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.cluster.nodes.parse import parse_ip
from cells.endpoint import Endpoint
from cells.kvstore.model import IPS, NODES
from cells.kvstore.own_keys import OwnKey

__all__ = [
    "IPIdentityPair",
    "Network",
    "SharedAddress",
    "SharedPort",
    "UInt32",
    "WireNode",
    "address_keys",
    "node_key",
    "node_of",
    "optional_ip",
    "read_address",
    "read_node",
]


class SharedPort(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """A named port of a pod."""

    name: str = ""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    protocol: str = ""


UInt8 = Annotated[int, Meta(ge=0, lt=1 << 8)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]


class IPIdentityPair(msgspec.Struct, frozen=True, rename="pascal"):
    """The value of an address."""

    ip: str = msgspec.field(name="IP", default="")
    mask: bytes | None = None
    host_ip: str | None = msgspec.field(name="HostIP", default=None)
    id: UInt32 = msgspec.field(name="ID", default=0)
    key: UInt8 = 0
    metadata: str = ""
    namespace: str = msgspec.field(name="K8sNamespace", default="")
    pod_name: str = msgspec.field(name="K8sPodName", default="")
    named_ports: list[SharedPort] | UnsetType | None = UNSET


class SharedAddress(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``shared-addresses``: an address of a pod, as its node publishes it."""

    address: str
    """The table's key: an address or a prefix."""
    prefix: Prefix
    identity: int
    node: str
    """The address of its node; empty if unknown."""
    value: str
    """The undecoded value."""
    encrypt_key: int = 0
    namespace: str = ""
    pod: str = ""
    ports: tuple[SharedPort, ...] = ()

    @property
    def resource(self) -> str:
        """The resource of the claim in the ipcache."""
        return f"kvstore//{self.address}"

    @property
    def claim(self) -> IpcacheEntry:
        """The claim in the ipcache, with the node as tunnel endpoint."""
        return IpcacheEntry(
            prefix=self.prefix,
            identity=self.identity,
            source=Source.KVSTORE,
            resource=self.resource,
            tunnel_endpoint=tunnel_endpoint_of(self.node),
            encrypt_key=self.encrypt_key,
        )


_ENCODE_ADDRESS = msgspec.json.Encoder()
_DECODE_ADDRESS = msgspec.json.Decoder(IPIdentityPair)


def read_address(key: str, value: bytes) -> SharedAddress | None:
    """Parse an address and its value.

    Returns None if the value is invalid, has no identity, or is that of another address.
    """
    try:
        text = value.decode()
        decoded = _DECODE_ADDRESS.decode(text)
        optional_ip(decoded.host_ip)
        prefix = ip_network(key)
        same = decoded.ip == key or _network_of(decoded) == prefix
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if not decoded.id or not same:
        return None
    return SharedAddress(
        address=key,
        prefix=str(prefix),
        identity=decoded.id,
        node=decoded.host_ip or "",
        value=text,
        encrypt_key=decoded.key,
        namespace=decoded.namespace,
        pod=decoded.pod_name,
        ports=tuple(decoded.named_ports) if decoded.named_ports else (),
    )


def _network_of(pair: IPIdentityPair) -> IPNetwork | None:
    return Network(pair.ip, pair.mask).network if pair.mask else ip_network(pair.ip)


def address_keys(
    endpoint: Endpoint, node: str, host: IPAddress | None, ports: Iterable[SharedPort], key: int
) -> Iterator[OwnKey]:
    """Yield a key for each address of an endpoint that has an identity."""
    for ip in endpoint.addresses:
        pair = IPIdentityPair(
            ip=str(ip),
            host_ip=str(host) if host is not None else None,
            id=endpoint.identity,
            key=key,
            metadata=f"cilium-global:default:{node}:{endpoint.id}",
            namespace=endpoint.pod_namespace,
            pod_name=endpoint.pod_name,
            named_ports=list(ports) or UNSET,
        )
        yield OwnKey(f"{IPS}{ip}", _ENCODE_ADDRESS.encode(pair).decode())


# Nodes.


class Network(msgspec.Struct, frozen=True):
    """A network as Go's net.IPNet."""

    ip: str = msgspec.field(name="IP", default="")
    mask: bytes = msgspec.field(name="Mask", default=b"")

    @classmethod
    def of(cls, network: IPNetwork) -> Network:
        """Convert a network."""
        return cls(str(network.network_address), network.netmask.packed)

    @property
    def network(self) -> IPNetwork | None:
        """The network; None if address or mask is invalid."""
        bits = "".join(f"{byte:08b}" for byte in self.mask)
        if "01" in bits:
            return None
        try:
            found = ip_network(f"{self.ip}/{bits.count('1')}", strict=False)
        except ValueError:
            return None
        return found if found.max_prefixlen == len(bits) else None


class SharedNodeAddress(msgspec.Struct, frozen=True):
    """An address of a node, with its type."""

    type: str = msgspec.field(name="Type", default="")
    ip: str = msgspec.field(name="IP", default="")


class WireNode(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=False):
    """The value of a node."""

    name: str = ""
    cluster: str = ""
    addresses: list[SharedNodeAddress] | None = msgspec.field(name="IPAddresses", default=None)
    ipv4_alloc_cidr: Network | None = msgspec.field(name="IPv4AllocCIDR", default=None)
    ipv4_more: list[Network] | None = msgspec.field(name="IPv4SecondaryAllocCIDRs", default=None)
    ipv6_alloc_cidr: Network | None = msgspec.field(name="IPv6AllocCIDR", default=None)
    ipv6_more: list[Network] | None = msgspec.field(name="IPv6SecondaryAllocCIDRs", default=None)
    ipv4_health: str | None = msgspec.field(name="IPv4HealthIP", default="")
    ipv6_health: str | None = msgspec.field(name="IPv6HealthIP", default="")
    ipv4_ingress: str | None = msgspec.field(name="IPv4IngressIP", default="")
    ipv6_ingress: str | None = msgspec.field(name="IPv6IngressIP", default="")
    cluster_id: UInt32 = msgspec.field(name="ClusterID", default=0)
    source: str = "local"
    encryption_key: UInt8 = 0
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    node_identity: UInt32 = 0
    wireguard_key: str = msgspec.field(name="WireguardPubKey", default="")
    boot_id: str = msgspec.field(name="BootID", default="")


_ENCODE_NODE = msgspec.json.Encoder()
_DECODE_NODE = msgspec.json.Decoder(WireNode)


def node_key(node: ClusterNode, cluster_id: int) -> OwnKey:
    """Return the key of this node."""
    return OwnKey(f"{NODES}{node.full_name}", _ENCODE_NODE.encode(_wire_node(node, cluster_id)).decode())


def _wire_node(node: ClusterNode, cluster_id: int) -> WireNode:
    ipv4, ipv6 = node.ipv4_alloc_cidrs, node.ipv6_alloc_cidrs
    return WireNode(
        name=node.name,
        cluster=node.cluster,
        cluster_id=cluster_id,
        addresses=[SharedNodeAddress(each.type, str(each.ip)) for each in node.addresses],
        ipv4_alloc_cidr=Network.of(ipv4[0]) if ipv4 else None,
        ipv4_more=[Network.of(each) for each in ipv4[1:]] or None,
        ipv6_alloc_cidr=Network.of(ipv6[0]) if ipv6 else None,
        ipv6_more=[Network.of(each) for each in ipv6[1:]] or None,
        ipv4_health=_first_of_family(node.health, Family.IPV4),
        ipv6_health=_first_of_family(node.health, Family.IPV6),
        ipv4_ingress=_first_of_family(node.ingress, Family.IPV4),
        ipv6_ingress=_first_of_family(node.ingress, Family.IPV6),
        encryption_key=node.encryption_key,
        labels=dict(node.labels) or None,
        annotations=dict(node.annotations) or None,
        node_identity=node.node_identity,
        wireguard_key=node.wireguard_key,
        boot_id=node.boot_id,
    )


def _first_of_family(addresses: Iterable[IPAddress], family: Family) -> str:
    return next((str(ip) for ip in addresses if Family.of(ip) is family), "")


def read_node(key: str, value: bytes) -> ClusterNode | None:
    """Parse the value of the key ``cluster/name``.

    Returns None if the value is invalid or has another cluster or name.
    """
    try:
        decoded = _DECODE_NODE.decode(value)
    except (ValueError, RecursionError):
        return None
    if f"{decoded.cluster}/{decoded.name}" != key:
        return None
    try:
        return node_of(decoded, Source.KVSTORE)
    except ValueError:
        return None


def optional_ip(text: str | None) -> IPAddress | None:
    """Parse an address; None if empty. Raises ValueError, so that the whole value is invalid, as in Go."""
    if not text:
        return None
    if (ip := parse_ip(text)) is None:
        raise ValueError(f"invalid IP address: {text!r}")
    return ip


def node_of(decoded: WireNode, source: Source) -> ClusterNode:
    """Convert a parsed value to a row. Raises ValueError for an invalid address."""
    return ClusterNode(
        cluster=decoded.cluster,
        name=decoded.name,
        source=source,
        addresses=tuple(
            NodeIP(each.type, ip)
            for each in decoded.addresses or ()
            if (ip := optional_ip(each.ip)) is not None
        ),
        ipv4_alloc_cidrs=_cidrs(IPv4Network, decoded.ipv4_alloc_cidr, decoded.ipv4_more),
        ipv6_alloc_cidrs=_cidrs(IPv6Network, decoded.ipv6_alloc_cidr, decoded.ipv6_more),
        health=_ips(decoded.ipv4_health, decoded.ipv6_health),
        ingress=_ips(decoded.ipv4_ingress, decoded.ipv6_ingress),
        encryption_key=decoded.encryption_key,
        wireguard_key=decoded.wireguard_key,
        labels=decoded.labels or {},
        annotations=decoded.annotations or {},
        boot_id=decoded.boot_id,
        node_identity=decoded.node_identity,
    )


def _cidrs(kind: type[Any], first: Network | None, more: list[Network] | None) -> tuple[IPNetwork, ...]:
    decoded = [each for each in (first, *(more or ())) if each is not None]
    return tuple(found for each in decoded if isinstance(found := each.network, kind))


def _ips(*texts: str | None) -> tuple[IPAddress, ...]:
    return tuple(ip for text in texts if (ip := optional_ip(text)) is not None)
