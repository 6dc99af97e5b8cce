"""Rows of the cluster's nodes."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP


def node(number: int, *cidrs: str, name: str = "", source: Source = Source.CUSTOM_RESOURCE) -> ClusterNode:
    networks = [ip_network(cidr) for cidr in cidrs]
    return ClusterNode(
        cluster="default",
        name=name or f"n{number}",
        source=source,
        addresses=(
            NodeIP(INTERNAL_IP, ip_address(f"192.0.2.{number}")),
            NodeIP(INTERNAL_IP, ip_address(f"2001:db8::{number}")),
            NodeIP(CILIUM_INTERNAL_IP, ip_address(f"10.{number}.0.1")),
        ),
        ipv4_alloc_cidrs=tuple(one for one in networks if one.version == 4),
        ipv6_alloc_cidrs=tuple(one for one in networks if one.version == 6),
    )
