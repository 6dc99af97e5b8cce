"""One CiliumPodIPPool: which range comes next.

Needs: HeldNetworks.   Gives: Pool, usable().
Source: Cilium 1.17, pkg/ipam/allocator/multipool and cidrset: networks in their order, the first that has a
        free range; within one the search goes on behind the last range given out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cells.kubernetes import CiliumPodIPPool
from cells.operator.multi_pool.held import HeldNetworks, Span
from cells.operator.pod_cidrs import Network, PoolError, Pools, parsed

_WIDEST_IPV6: Final = 65536
"""Of a wider IPv6 network an agent hands out only so many addresses."""


def usable(network: Network) -> int:
    """How many addresses an agent hands out of a network: not the first and the last, if there are others."""
    total = network.num_addresses if network.version == 4 else min(network.num_addresses, _WIDEST_IPV6)
    return total - 2 if total > 2 else total


class _Divided:
    """A network of a pool, divided into ranges of one size."""

    def __init__(self, network: Network, mask: int) -> None:
        self.network = network
        self._mask = mask
        self._shift = network.max_prefixlen - mask
        self._size = 2 ** (mask - network.prefixlen) if mask >= network.prefixlen else 0
        self._base = int(network.network_address)
        self._next = 0

    def allocate(self, held: HeldNetworks) -> Network | None:
        """The next range of which nothing is held; None if there is none."""
        index, left = self._next, self._size
        while left > 0:
            taken = held.overlapping(self.network.version, self._span(index))
            if taken is None:
                self._next = (index + 1) % self._size
                return type(self.network)((self._span(index)[0], self._mask))
            step = min(((taken[1] - self._base) >> self._shift) + 1, self._size) - index
            left -= step
            index = (index + step) % self._size
        return None

    def _span(self, index: int) -> Span:
        first = self._base + (index << self._shift)
        return first, first + (1 << self._shift) - 1


class Pool:
    """The networks of a pool, of both families. Raises PoolError for one that cannot be."""

    def __init__(self, row: CiliumPodIPPool) -> None:
        self.name = row.name
        self._masks: dict[int, int] = {}
        self._networks: dict[int, list[_Divided]] = {4: [], 6: []}
        self.follow(row)

    def follow(self, row: CiliumPodIPPool) -> None:
        """Be as the object says now. Raises PoolError, and stays as it was, if that cannot be."""
        asked = {
            version: (part.mask_size, part.cidrs)
            for version, part in ((4, row.spec.ipv4), (6, row.spec.ipv6))
            if part is not None
        }
        fresh: dict[int, list[_Divided]] = {4: [], 6: []}
        for version, (mask, cidrs) in asked.items():
            if self._masks.get(version, mask) != mask:
                raise PoolError(f'cannot change IPv{version} mask size in existing pool "{self.name}"')
            Pools(version, cidrs, mask)  # refuses what overlaps or is too wide
            before = {one.network: one for one in self._networks[version]}
            networks = map(parsed, cidrs)
            fresh[version] = [before.get(network) or _Divided(network, mask) for network in networks]
        self._networks = fresh
        self._masks |= {version: mask for version, (mask, _) in asked.items()}

    def allocate(self, version: int, held: HeldNetworks) -> Network | None:
        """The next range of a family; None when nothing is left."""
        found = (one.allocate(held) for one in self._networks[version])
        return next((network for network in found if network is not None), None)

    def has(self, network: Network) -> bool:
        """Whether a range is the pool's."""
        networks: Iterable[Network] = (one.network for one in self._networks[network.version])
        return any(network.subnet_of(one) for one in networks)  # type: ignore[arg-type]  # one version
