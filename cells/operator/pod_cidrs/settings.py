"""The pools that nodes get their ranges from.

Needs: nothing.   Gives: PodCIDRSettings.
"""

from __future__ import annotations

from lifecycle import Settings


class PodCIDRSettings(Settings, frozen=True):
    """Settings of the pod-cidrs cell; they count in IPAM mode cluster-pool."""

    cluster_pool_ipv4_cidr: tuple[str, ...] = ()
    """IPv4 networks that nodes get their ranges from; the first that is not full."""

    cluster_pool_ipv4_mask_size: int = 24
    """Prefix length of a node's IPv4 range."""

    cluster_pool_ipv6_cidr: tuple[str, ...] = ()
    """IPv6 networks that nodes get their ranges from; the first that is not full."""

    cluster_pool_ipv6_mask_size: int = 112
    """Prefix length of a node's IPv6 range."""
