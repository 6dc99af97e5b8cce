"""The pools that nodes get their ranges from.

Needs: nothing.   Gives: PodCIDRSettings.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.operator.pod_cidrs.allocator import PoolError, Pools
from lifecycle import Settings, refuse


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

    def validate(self) -> None:
        """Refuse pools that cannot be, in Cilium's words; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for version, cidrs, mask in (
            (4, self.cluster_pool_ipv4_cidr, self.cluster_pool_ipv4_mask_size),
            (6, self.cluster_pool_ipv6_cidr, self.cluster_pool_ipv6_mask_size),
        ):
            try:
                Pools(version, cidrs, mask)
            except PoolError as error:
                yield f"cluster-pool-ipv{version}-cidr: unable to initialize IPv{version} allocator: {error}"
