"""What the programs must know of each pod and of the node: the values of hive_endpoints and hive_node.

For:    every cell that reads or writes these maps. Needs: nothing. Gives: EndpointConfig, NodeConfig.
Source: our own, cells/datapath/bpf/lib/maps.h. Little endian, but addresses in network order.

A MAC is 6 bytes, in memory the low 6 of a u64. struct.error on data of another size.
"""

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import Layout

ENDPOINT_PASSES_NEIGHBOURS: Final = 1
"""The host's stack answers the pod's ARP and neighbour discovery, not the datapath."""
ENDPOINT_ANY_SOURCE: Final = 2
"""The pod may send from addresses that are not its own."""
ENDPOINT_REQUIRE_EGRESS_PROG: Final = 4
"""What its link brings is seen by cil_to_container: the stack or a bridge sends it, not the datapath."""
ENDPOINT_ROUTED_BY_HOST: Final = 8
"""What the pod sends goes where the stack or a bridge takes it, also to a pod of this node."""

ENDPOINT_FLAGS: Final = {
    ENDPOINT_PASSES_NEIGHBOURS: "neighbours passed to the host",
    ENDPOINT_ANY_SOURCE: "any source",
    ENDPOINT_REQUIRE_EGRESS_PROG: "egress program",
    ENDPOINT_ROUTED_BY_HOST: "routed by the host",
}
"""In words, for people."""

NODE_NOTIFY_DROP: Final = 1
NODE_NOTIFY_TRACE: Final = 2
NODE_NOTIFY_POLICY_VERDICT: Final = 4
NODE_AUDITS_POLICY: Final = 8
NODE_AUDITS_HOST: Final = 16
NODE_NOTIFY_SOCK: Final = 32
NODE_EVENTS: Final = {
    NODE_NOTIFY_DROP: "drops",
    NODE_NOTIFY_TRACE: "traces",
    NODE_NOTIFY_POLICY_VERDICT: "policy verdicts",
    NODE_AUDITS_POLICY: "policy is audited only",
    NODE_AUDITS_HOST: "the node's own policy is audited only",
    NODE_NOTIFY_SOCK: "sockets",
}
"""In words, for people."""


def flags_text(flags: int, words: Mapping[int, str]) -> str:
    """The flags in words; those that have none as a number."""
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
    """Value of hive_endpoints (key: host side's ifindex), 64 bytes: what the programs must know of a pod."""

    SIZE: ClassVar = _endpoint.size

    ipv4: IPv4Address | None
    endpoint_id: int
    identity: int
    host_mac: bytes
    pod_mac: bytes
    flags: int = 0
    """Of ENDPOINT_*, above."""
    ipv6: IPv6Address | None = None
    netns_cookie: int = 0

    def pack(self) -> bytes:
        ipv4, ipv6 = self.ipv4 or _NO_IPV4, self.ipv6 or _NO_IPV6
        ids = self.endpoint_id, self.flags, self.identity
        macs = self.host_mac, self.pod_mac
        return _endpoint.pack(ipv4.packed, *ids, *macs, ipv6.packed, self.netns_cookie)

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
    """The one value of hive_node, 96 bytes: what the programs must know of the node."""

    SIZE: ClassVar = _node.size

    router_ip: IPv4Address | None
    host_ifindex: int
    """Of cilium_host."""
    host_mac: bytes
    net_ifindex: int
    """Of cilium_net."""
    net_mac: bytes
    pod_cidr: IPv4Network | None
    flags: int = 0
    """NODE_NOTIFY_DROP, _TRACE, _POLICY_VERDICT, _SOCK: which events the programs send.
    NODE_AUDITS_POLICY: what policy refuses is let through, and told; NODE_AUDITS_HOST: the same of the
    node's own policy."""
    router_ip6: IPv6Address | None = None
    pod_cidr6: IPv6Network | None = None
    aggregation: int = 0
    """Of trace events, 0 (none) to 4 (maximum)."""
    host_endpoint: int = 0
    """Whose policy the node itself has; 0: it may do everything."""

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
