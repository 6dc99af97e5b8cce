"""Ranges out of pools: which node has which, decided without asking anybody.

Needs: nothing.   Gives: CIDRPool, Pools, PoolError.
Source: Cilium 1.17, pkg/ipam/allocator/clusterpool and cidrset: the pools in their order, the first that is
        not full; within one the search goes on behind the last range given out, so that a released range is
        used again only after all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

Network = IPv4Network | IPv6Network

MOST_BITS: Final = 16
"""An IPv6 pool may be divided into 2 to this many ranges."""
FULL: Final = "allocator full"
TOO_LONG: Final = "SubNetMask is invalid, should be lower or equal to 32 for IPv4 and to 128 for IPv6"


class PoolError(Exception):
    """Pools that cannot be, or what cannot be given out of them; the text is for the node's status."""


class CIDRPool:
    """One pool, divided into ranges of one size."""

    def __init__(self, network: Network, mask: int) -> None:
        if mask > network.max_prefixlen:
            raise PoolError(TOO_LONG)
        if network.version == 6 and mask - network.prefixlen > MOST_BITS:
            raise PoolError("New CIDR set failed; the node CIDR size is too big")
        self.network = network
        self.mask = mask
        self.size = 2 ** (mask - network.prefixlen) if mask >= network.prefixlen else 0
        """How many ranges it has; none when it is smaller than one."""
        self._base = int(network.network_address)
        self._shift = network.max_prefixlen - mask
        self._used: set[int] = set()
        self._next = 0

    @property
    def full(self) -> bool:
        """Whether nothing is left."""
        return len(self._used) >= self.size

    def holds(self, network: Network) -> bool:
        """Whether a network is inside."""
        return network.version == self.network.version and network.subnet_of(self.network)  # type: ignore[arg-type]  # one version

    def allocate(self) -> Network | None:
        """The next free range; None when it is full."""
        if self.full:
            return None
        while self._next in self._used:
            self._next = (self._next + 1) % self.size
        found = self._next
        self._used.add(found)
        self._next = (found + 1) % self.size
        kind = type(self.network)
        return kind((self._base + (found << self._shift), self.mask))

    def occupied(self, network: Network) -> bool:
        """Whether any of it is taken."""
        return not self._used.isdisjoint(self._indexes(network))

    def occupy(self, network: Network) -> None:
        """Take what it covers."""
        self._used.update(self._indexes(network))

    def release(self, network: Network) -> None:
        """Give back what it covers."""
        self._used.difference_update(self._indexes(network))

    def _indexes(self, network: Network) -> range:
        first = (int(network.network_address) - self._base) >> self._shift
        last = (int(network.broadcast_address) - self._base) >> self._shift
        return range(first, last + 1)


class Pools:
    """The pools of one family, in their order."""

    def __init__(self, version: int, cidrs: Sequence[str], mask: int) -> None:
        self.version = version
        self._pools: list[CIDRPool] = []
        for text in cidrs:
            network = parsed(text)
            if network.version != version:
                raise PoolError(f"invalid CIDR address: {text}")
            for other in self._pools:
                if other.network.overlaps(network):
                    raise PoolError(
                        f"requested CIDR {network} collides with clusterCIDR: {other.network},"
                        f" nodeMask: {mask}"
                    )
            self._pools.append(CIDRPool(network, mask))

    def __bool__(self) -> bool:
        return bool(self._pools)

    def allocate(self) -> Network:
        """The next free range. Raises PoolError when every pool is full."""
        for pool in self._pools:
            if (found := pool.allocate()) is not None:
                return found
        raise PoolError(FULL)

    def occupy(self, network: Network) -> None:
        """Take exactly this. Raises PoolError when it is taken, or in no pool."""
        pool = self._of(network)
        if pool is None:
            raise PoolError(f"allocator not configured for the requested CIDR {network}")
        if pool.occupied(network):
            raise PoolError(f"requested CIDR ({network}) is already allocated")
        pool.occupy(network)

    def release(self, network: Network) -> None:
        """Give it back; what is in no pool is nobody's."""
        if (pool := self._of(network)) is not None:
            pool.release(network)

    def free(self) -> int:
        """How many ranges are left."""
        return sum(pool.size - len(pool._used) for pool in self._pools)  # noqa: SLF001  # the same file

    def _of(self, network: Network) -> CIDRPool | None:
        return next((pool for pool in self._pools if pool.size and pool.holds(network)), None)


def parsed(text: str) -> Network:
    """A network, its host bits cut off. Raises PoolError."""
    if "/" not in text:
        raise PoolError(f"invalid CIDR address: {text}")
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise PoolError(f"invalid CIDR address: {text}") from None


def listed(networks: Iterable[Network]) -> str:
    """As Go prints a list."""
    return f"[{' '.join(map(str, networks))}]"
