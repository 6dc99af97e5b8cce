"""Which node holds which ranges, and what is to be written about each node.

Source: Cilium 1.17, pkg/ipam/allocator/podcidr. Other than there, a node that found the pools full is looked
        at again whenever a range comes free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

import msgspec

from cells.kubernetes.objects.cilium_node import AllocatedPool, CiliumNode

# Ranges out of pools: which node has which, decided without asking anybody.
#
# Source: Cilium 1.17, pkg/ipam/allocator/clusterpool and cidrset: the pools in their order, the first that is
#         not full; within one the search goes on behind the last range given out, so that a released range is
#         used again only after all the others.

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


class CidrPools:
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
        """Release it; a range outside the pools has no owner."""
        if (pool := self._of(network)) is not None:
            pool.release(network)

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


class PoolsPatch(msgspec.Struct, frozen=True, gc=False):
    """The pools that a CiliumNode is to have, decided upon those that it has."""

    allocated: tuple[AllocatedPool, ...]
    reported: frozenset[tuple[str, str]]
    """The pools and ranges it named then; its agent may have changed them since."""


def reported_ranges(pools: Iterable[AllocatedPool]) -> frozenset[tuple[str, str]]:
    """The pools and ranges that a CiliumNode names."""
    return frozenset((pool.pool, text) for pool in pools for text in pool.cidrs or ())


class NodePatch(msgspec.Struct, frozen=True, gc=False):
    """What a CiliumNode shall say."""

    name: str
    uid: str
    cidrs: tuple[str, ...] | None
    """Its ranges; None leaves them as they are."""
    error: str
    """Why it has none, or not these; empty takes an old error away."""
    error_changed: bool
    """Whether that is news: the node's status differs."""
    pools: PoolsPatch | None = None
    """Its ranges of pools, in mode multi-pool; None leaves them as they are."""


class Ledger:
    """Adopts what nodes hold before it gives out anything; never gives a range twice."""

    def __init__(self, ipv4: CidrPools, ipv6: CidrPools) -> None:
        self._pools = {4: ipv4, 6: ipv6}
        self._held: dict[str, list[Network]] = {}
        self._nodes: dict[str, CiliumNode] = {}
        self._errors: dict[str, str] = {}

    @property
    def held(self) -> Mapping[str, list[Network]]:
        """The ranges of each node."""
        return self._held

    def update(self, changed: Mapping[str, CiliumNode | None]) -> dict[str, NodePatch | None]:
        """Take in nodes that have changed (None: deleted); the plans of all that are concerned.

        None for a patch: that node needs none (any more).
        """
        freed = self._forget(name for name, node in changed.items() if node is None)
        live = {name: node for name, node in changed.items() if node is not None}
        for name, node in live.items():
            old = self._nodes.get(name)
            if old is not None and old.metadata.uid != node.metadata.uid:
                freed |= self._release(name)  # deleted and made again: it has what is in its new object
            self._nodes[name] = node
        waiting = {name: self._nodes[name] for name in self._errors if name in self._nodes} if freed else {}
        concerned = {**waiting, **live}
        for name, node in concerned.items():  # nodes that already have ranges come first
            if node.spec.ipam.pod_cidrs:
                self._settle(name, node)
        for name, node in concerned.items():
            if not node.spec.ipam.pod_cidrs:
                self._settle(name, node)
        removed: dict[str, NodePatch | None] = {name: None for name, node in changed.items() if node is None}
        return removed | {name: self._patch_of(name) for name in concerned}

    def _forget(self, names: Iterable[str]) -> bool:
        freed = False
        for name in names:
            self._nodes.pop(name, None)
            self._errors.pop(name, None)
            freed |= self._release(name)
        return freed

    def _release(self, name: str) -> bool:
        found = self._held.pop(name, [])
        for network in found:
            self._pools[network.version].release(network)
        return bool(found)

    def _settle(self, name: str, node: CiliumNode) -> None:
        try:
            if name in self._held:
                self._compare(name, node)
            elif node.spec.ipam.pod_cidrs:
                self._adopt(name, node.spec.ipam.pod_cidrs)
            self._complete(name)
        except PoolError as error:
            self._errors[name] = str(error)
        else:
            self._errors.pop(name, None)

    def _compare(self, name: str, node: CiliumNode) -> None:
        """Of a known node: its ranges may have been changed by others."""
        held = self._held[name]
        asked = [parsed(text) for text in node.spec.ipam.pod_cidrs or ()]
        if any(one not in held for one in asked):
            raise PoolError(
                f"node has CIDRs allocated ({listed(held)}) that conflict with requested CIDRs"
                f" {listed(asked)}"
            )

    def _adopt(self, name: str, texts: tuple[str, ...]) -> None:
        """All ranges that an unknown node claims, or none."""
        asked = [parsed(text) for text in texts]
        for version in (4, 6):
            if not self._pools[version] and (others := [one for one in asked if one.version == version]):
                raise PoolError(
                    f"unable to allocate CIDR {listed(others)} since allocator for IPv{version} addresses"
                    " does not exist"
                )
        taken: list[Network] = []
        try:
            for one in asked:
                self._pools[one.version].occupy(one)
                taken.append(one)
        except PoolError:
            for one in taken:
                self._pools[one.version].release(one)
            raise
        self._held[name] = asked

    def _complete(self, name: str) -> None:
        """A range of each family that has pools, or none at all for a node that has nothing."""
        held = self._held.get(name, [])
        missing = [
            version
            for version, pools in self._pools.items()
            if pools and all(one.version != version for one in held)
        ]
        if not held and not missing:
            raise PoolError(
                f"Unable to allocate node CIDR for node {name}. IPAMInfo: {{IPv4: [], IPv6: []}}. Please"
                " check that your configuration is correct."
            )
        new: list[Network] = []
        try:
            for version in missing:
                new.append(self._pools[version].allocate())  # noqa: PERF401  # those before a failure count
        except PoolError:
            for one in new:
                self._pools[one.version].release(one)
            raise
        self._held[name] = sorted([*held, *new], key=lambda one: one.version) if new else held

    def _patch_of(self, name: str) -> NodePatch | None:
        node = self._nodes[name]
        error = self._errors.get(name, "")
        has = node.spec.ipam.pod_cidrs or ()
        cidrs: tuple[str, ...] | None = tuple(map(str, self._held.get(name, ())))
        if error or cidrs == has:
            cidrs = None
        error_changed = error != node.status.ipam.operator_status.error
        return (
            NodePatch(name, node.metadata.uid, cidrs, error, error_changed)
            if error_changed or cidrs is not None
            else None
        )
