"""The ranges that each node holds, and the pending changes of CiliumNodes.

Source: Cilium 1.17, pkg/ipam/allocator/podcidr. Unlike Cilium, a node that found the pools exhausted is
retried when a range is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

import msgspec

from cells.kubernetes.objects.cilium_node import AllocatedPool, CiliumNode

# Allocates ranges of pools to nodes, without I/O.
#
# Source: Cilium 1.17, pkg/ipam/allocator/clusterpool and cidrset: the first pool with a free range; within a
#         pool the search continues after the last allocated range, so that a released range is reused last.

Network = IPv4Network | IPv6Network

MOST_BITS: Final = 16
"""Binary logarithm of the maximum number of ranges in an IPv6 pool."""
FULL: Final = "allocator full"
TOO_LONG: Final = "SubNetMask is invalid, should be lower or equal to 32 for IPv4 and to 128 for IPv6"


class PoolError(Exception):
    """An invalid pool, or a failed allocation; the message is written to the node's status."""


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
        """Number of ranges; 0 if the pool is smaller than one."""
        self._base = int(network.network_address)
        self._shift = network.max_prefixlen - mask
        self._used: set[int] = set()
        self._next = 0

    @property
    def full(self) -> bool:
        """Whether no range is free."""
        return len(self._used) >= self.size

    def holds(self, network: Network) -> bool:
        """Whether the pool contains a network."""
        return network.version == self.network.version and network.subnet_of(self.network)  # type: ignore[arg-type]  # one version

    def allocate(self) -> Network | None:
        """Return the next free range, or None."""
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
        """Whether a network overlaps allocated ranges."""
        return not self._used.isdisjoint(self._indexes(network))

    def occupy(self, network: Network) -> None:
        """Mark the ranges that a network covers as allocated."""
        self._used.update(self._indexes(network))

    def release(self, network: Network) -> None:
        """Release the ranges that a network covers."""
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
        """Return the next free range. Raises PoolError if all pools are exhausted."""
        for pool in self._pools:
            if (found := pool.allocate()) is not None:
                return found
        raise PoolError(FULL)

    def occupy(self, network: Network) -> None:
        """Allocate this range. Raises PoolError if it is allocated, or in no pool."""
        pool = self._of(network)
        if pool is None:
            raise PoolError(f"allocator not configured for the requested CIDR {network}")
        if pool.occupied(network):
            raise PoolError(f"requested CIDR ({network}) is already allocated")
        pool.occupy(network)

    def release(self, network: Network) -> None:
        """Release a range; ranges outside the pools are ignored."""
        if (pool := self._of(network)) is not None:
            pool.release(network)

    def _of(self, network: Network) -> CIDRPool | None:
        return next((pool for pool in self._pools if pool.size and pool.holds(network)), None)


def parsed(text: str) -> Network:
    """Parse a network, without host bits. Raises PoolError."""
    if "/" not in text:
        raise PoolError(f"invalid CIDR address: {text}")
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise PoolError(f"invalid CIDR address: {text}") from None


def listed(networks: Iterable[Network]) -> str:
    """Format a list like Go."""
    return f"[{' '.join(map(str, networks))}]"


class PoolsPatch(msgspec.Struct, frozen=True, gc=False):
    """The desired pools of a CiliumNode, and those the decision was based on."""

    allocated: tuple[AllocatedPool, ...]
    reported: frozenset[tuple[str, str]]
    """The pools and ranges the object had then; its agent may have changed them since."""


def reported_ranges(pools: Iterable[AllocatedPool]) -> frozenset[tuple[str, str]]:
    """Return the pools and ranges of a CiliumNode."""
    return frozenset((pool.pool, text) for pool in pools for text in pool.cidrs or ())


class NodePatch(msgspec.Struct, frozen=True, gc=False):
    """The pending change of a CiliumNode."""

    name: str
    uid: str
    cidrs: tuple[str, ...] | None
    """Its ranges; None leaves them unchanged."""
    error: str
    """Why it has no ranges, or other ones; empty clears the error."""
    error_changed: bool
    """Whether the error differs from the node's status."""
    pools: PoolsPatch | None = None
    """Its ranges of pools, in mode multi-pool; None leaves them unchanged."""


class Ledger:
    """Adopts the nodes' existing ranges before it allocates any; never allocates a range twice."""

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
        """Apply changed nodes (None: deleted); return the patches of all affected nodes.

        A patch of None: no change is pending (any more).
        """
        freed = self._forget(name for name, node in changed.items() if node is None)
        live = {name: node for name, node in changed.items() if node is not None}
        for name, node in live.items():
            old = self._nodes.get(name)
            if old is not None and old.metadata.uid != node.metadata.uid:
                freed |= self._release(name)  # recreated: its allocations are those in the new object
            self._nodes[name] = node
        waiting = {name: self._nodes[name] for name in self._errors if name in self._nodes} if freed else {}
        concerned = {**waiting, **live}
        for name, node in concerned.items():  # nodes with existing ranges come first
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
        """Compare a node's object with its ranges, which other writers may have changed."""
        held = self._held[name]
        asked = [parsed(text) for text in node.spec.ipam.pod_cidrs or ()]
        if any(one not in held for one in asked):
            raise PoolError(
                f"node has CIDRs allocated ({listed(held)}) that conflict with requested CIDRs"
                f" {listed(asked)}"
            )

    def _adopt(self, name: str, texts: tuple[str, ...]) -> None:
        """Adopt all ranges of a new node's object, or none."""
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
        """Allocate a range of each family that has pools; for a node without ranges all or none."""
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
