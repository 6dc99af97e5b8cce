"""Records of the maps about endpoints: lxc, hive_endpoints, hive_node, and the policy maps.

Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order. A MAC is 6 bytes,
in memory the low 6 of a u64. Decoders raise struct.error on data of another size.
"""

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records import IPAddress, Layout, address_of, family_of

__all__ = [
    "ENDPOINT_ANY_SOURCE",
    "ENDPOINT_FLAGS",
    "ENDPOINT_PASSES_NEIGHBOURS",
    "ENDPOINT_REQUIRE_EGRESS_PROG",
    "ENDPOINT_ROUTED_BY_HOST",
    "LXC_HOST",
    "NODE_AUDITS_HOST",
    "NODE_AUDITS_POLICY",
    "NODE_CIDR_MATCHES_PODS",
    "NODE_EVENTS",
    "NODE_NOTIFY_DROP",
    "NODE_NOTIFY_POLICY_VERDICT",
    "NODE_NOTIFY_SOCK",
    "NODE_NOTIFY_TRACE",
    "EndpointConfig",
    "LxcKey",
    "LxcValue",
    "NodeConfig",
    "PolicyEntry",
    "PolicyKey",
    "flags_text",
]


LXC_HOST: Final = 1
"""Flag of a cilium_lxc value: the address is the node's own."""

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
    """Value of cilium_lxc, 48 bytes: the endpoint with an address, or only ``flags=LXC_HOST``."""

    SIZE: ClassVar = _lxc_value.size

    ifindex: int = 0
    """The host side of the pod's veth pair."""
    endpoint_id: int = 0
    mac: bytes = bytes(6)
    """The pod's MAC."""
    node_mac: bytes = bytes(6)
    """The MAC of the host side."""
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


# Configuration of each pod and of the node: the values of hive_endpoints and hive_node.
#
# Source: our own, cells/datapath/bpf/lib/maps.h. Little endian, but addresses in network order.
#
# A MAC is 6 bytes, in memory the low 6 of a u64. struct.error on data of another size.

ENDPOINT_PASSES_NEIGHBOURS: Final = 1
"""The host's stack answers the pod's ARP and neighbour discovery, not the datapath."""
ENDPOINT_ANY_SOURCE: Final = 2
"""The pod may send from any source address."""
ENDPOINT_REQUIRE_EGRESS_PROG: Final = 4
"""Ingress policy is enforced by cil_to_container at the link: the stack or a bridge delivers packets."""
ENDPOINT_ROUTED_BY_HOST: Final = 8
"""The stack or a bridge routes the pod's packets, also to pods of this node."""

ENDPOINT_FLAGS: Final = {
    ENDPOINT_PASSES_NEIGHBOURS: "neighbours passed to the host",
    ENDPOINT_ANY_SOURCE: "any source",
    ENDPOINT_REQUIRE_EGRESS_PROG: "egress program",
    ENDPOINT_ROUTED_BY_HOST: "routed by the host",
}
"""Names of the flags, for display."""

NODE_NOTIFY_DROP: Final = 1
NODE_NOTIFY_TRACE: Final = 2
NODE_NOTIFY_POLICY_VERDICT: Final = 4
NODE_AUDITS_POLICY: Final = 8
NODE_AUDITS_HOST: Final = 16
NODE_NOTIFY_SOCK: Final = 32
NODE_CIDR_MATCHES_PODS: Final = 64
NODE_EVENTS: Final = {
    NODE_NOTIFY_DROP: "drops",
    NODE_NOTIFY_TRACE: "traces",
    NODE_NOTIFY_POLICY_VERDICT: "policy verdicts",
    NODE_AUDITS_POLICY: "policy is audited only",
    NODE_AUDITS_HOST: "the node's own policy is audited only",
    NODE_NOTIFY_SOCK: "sockets",
    NODE_CIDR_MATCHES_PODS: "networks select pods",
}
"""Names of the flags, for display."""


def flags_text(flags: int, words: Mapping[int, str]) -> str:
    """Return the names of the flags; unknown ones as a number."""
    rest = flags & ~sum(words)
    return ", ".join([*(text for bit, text in words.items() if flags & bit), *([hex(rest)] if rest else [])])


_endpoint = Layout(
    "endpoint_config",
    ipv4="4s",
    id="H",
    flags="H",
    identity="I",
    pad="4x",
    host_mac="6s2x",
    pod_mac="6s2x",
    ipv6="16s",
    netns_cookie="Q",
    reserved="8x",
)
_node = Layout(
    "node_config",
    router_ip="4s",
    host_ifindex="I",
    host_mac="6s2x",
    net_mac="6s2x",
    net_ifindex="I",
    pod_cidr="4s",
    pod_mask="4s",
    flags="I",
    router_ip6="16s",
    pod_cidr6="16s",
    pod_prefix6="I",
    aggregation="I",
    host_endpoint="I",
    pad="12x",
)
_NO_IPV6: Final = IPv6Address(0)
_NO_IPV4: Final = IPv4Address(0)
_NO_NETWORK: Final = IPv4Network("0.0.0.0/0")
_NO_NETWORK6: Final = IPv6Network("::/0")


class EndpointConfig(msgspec.Struct, frozen=True):
    """Value of hive_endpoints (key: the host side's ifindex), 64 bytes: configuration of a pod."""

    SIZE: ClassVar = _endpoint.size

    ipv4: IPv4Address | None
    endpoint_id: int
    identity: int
    host_mac: bytes
    pod_mac: bytes
    flags: int = 0
    """ENDPOINT_* flags."""
    ipv6: IPv6Address | None = None
    netns_cookie: int = 0

    def pack(self) -> bytes:
        ipv4, ipv6 = self.ipv4 or _NO_IPV4, self.ipv6 or _NO_IPV6
        ids = self.endpoint_id, self.flags, self.identity
        macs = self.host_mac, self.pod_mac
        return _endpoint.pack(ipv4.packed, *ids, *macs, ipv6.packed, self.netns_cookie)

    @staticmethod
    def id_in(data: bytes) -> int:
        """Decode only the endpoint id: a DEL waits for it."""
        number: int = _endpoint.unpack(data)[1]
        return number

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ipv4, endpoint_id, flags, identity, host_mac, pod_mac, ipv6, cookie = _endpoint.unpack(data)
        return cls(
            IPv4Address(ipv4) if any(ipv4) else None,
            *(endpoint_id, identity, host_mac, pod_mac, flags),
            IPv6Address(ipv6) if any(ipv6) else None,
            cookie,
        )


class NodeConfig(msgspec.Struct, frozen=True):
    """The one value of hive_node, 96 bytes: configuration of the node."""

    SIZE: ClassVar = _node.size

    router_ip: IPv4Address | None
    host_ifindex: int
    """Index of cilium_host."""
    host_mac: bytes
    net_ifindex: int
    """Index of cilium_net."""
    net_mac: bytes
    pod_cidr: IPv4Network | None
    flags: int = 0
    """Events that the programs send, and audit modes.

    NODE_NOTIFY_DROP, _TRACE, _POLICY_VERDICT, _SOCK select events. NODE_AUDITS_POLICY forwards and reports
    packets that policies deny; NODE_AUDITS_HOST does so for the host policy.
    """
    router_ip6: IPv6Address | None = None
    pod_cidr6: IPv6Network | None = None
    aggregation: int = 0
    """Aggregation level of trace events, 0 (none) to 4 (maximum)."""
    host_endpoint: int = 0
    """The endpoint of the host policy; 0: no host policy."""

    def pack(self) -> bytes:
        cidr, cidr6 = self.pod_cidr or _NO_NETWORK, self.pod_cidr6 or _NO_NETWORK6
        links = self.host_ifindex, self.host_mac, self.net_mac, self.net_ifindex
        return _node.pack(
            (self.router_ip or _NO_IPV4).packed,
            *links,
            *(cidr.network_address.packed, cidr.netmask.packed, self.flags),
            *((self.router_ip6 or _NO_IPV6).packed, cidr6.network_address.packed, cidr6.prefixlen),
            *(self.aggregation, self.host_endpoint),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ip4, host_ifindex, host_mac, net_mac, net_ifindex, cidr4, mask, flags, *rest = _node.unpack(data)
        ip6, cidr6, bits6, aggregation, host_endpoint = rest
        return cls(
            IPv4Address(ip4) if any(ip4) else None,
            *(host_ifindex, host_mac, net_ifindex, net_mac),
            IPv4Network((cidr4, IPv4Address(mask).compressed)) if any(mask) else None,
            flags,
            IPv6Address(ip6) if any(ip6) else None,
            IPv6Network((cidr6, bits6)) if bits6 else None,
            *(aggregation, host_endpoint),
        )


# Entries of an endpoint's policy map: a peer and its ports, and the verdict.
#
# Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order.
#
# struct.error on data of another size.

_policy_key = Layout("policy_key", prefixlen="I", identity="I", egress="B", protocol="B", port="2s")
_policy_entry = Layout(
    "policy_entry", proxy_port="2s", bits="B", auth_type="B", pad="4x", packets="Q", bytes="Q"
)


class PolicyKey(msgspec.Struct, frozen=True):
    """Key of a policy map, 12 bytes: identity, direction, protocol and port. By default any port."""

    SIZE: ClassVar = _policy_key.size

    identity: int
    """The peer's identity; 0: any."""
    egress: bool
    protocol: int = 0
    """IP protocol; 0: any, which requires any port."""
    port: int = 0
    """Destination port, or the first of an aligned range."""
    port_bits: int = 0
    """Prefix length of the port: 16 for one port, 0 for any."""

    def pack(self) -> bytes:
        """Encode the key. Raises ValueError for a port without a protocol or with bits beyond its prefix."""
        if (self.port_bits and not self.protocol) or self.port & (0xFFFF >> self.port_bits):
            raise ValueError(f"{self}: a port needs a protocol and no bits beyond its port_bits")
        length = 48 + self.port_bits if self.protocol else 40
        return _policy_key.pack(
            length, self.identity, self.egress, self.protocol, self.port.to_bytes(2, "big")
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        length, identity, direction, protocol, port = _policy_key.unpack(data)
        return cls(identity, bool(direction & 1), protocol, int.from_bytes(port, "big"), max(length - 48, 0))


class PolicyEntry(msgspec.Struct, frozen=True):
    """Value of a policy map, 24 bytes: the verdict and its counters."""

    SIZE: ClassVar = _policy_entry.size

    deny: bool = False
    proxy_port: int = 0
    auth_type: int = 0
    packets: int = 0
    octets: int = 0
    only_by_proxy: bool = False
    """Whether packets are dropped if no proxy listens on the port; else they pass without it."""

    def pack(self, key: PolicyKey) -> bytes:
        """Encode the value for ``key``: it repeats the key's wildcard protocol and port."""
        flags = self.deny | (not key.protocol) << 1 | (not key.port_bits) << 2 | self.only_by_proxy << 7
        proxy_port = self.proxy_port.to_bytes(2, "big")
        return _policy_entry.pack(proxy_port, flags, self.auth_type, self.packets, self.octets)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        proxy_port, flags, auth_type, packets, total = _policy_entry.unpack(data)
        port = int.from_bytes(proxy_port, "big")
        return cls(bool(flags & 1), port, auth_type, packets, total, bool(flags & 0x80))

    def same_verdict(self, other: "PolicyEntry") -> bool:
        """Return whether both are equal apart from the counters."""
        return self.verdict == other.verdict

    @property
    def conditional(self) -> bool:
        """Whether it is an allow that requires a proxy or authentication."""
        return bool(self.proxy_port or self.auth_type)

    @property
    def verdict(self) -> tuple[object, ...]:
        """The fields that decide, without the counters."""
        return self.deny, self.proxy_port, self.auth_type, self.only_by_proxy
