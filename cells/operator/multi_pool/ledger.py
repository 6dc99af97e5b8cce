"""The ranges that each node holds of each pool, and the pending changes of CiliumNodes.

Source: Cilium 1.17, pkg/ipam/allocator/multipool. Unlike Cilium, an address is never allocated twice, even if
pools overlap. A node keeps its ranges when their pool changes or is deleted, also over restarts. A node that
found a pool exhausted is retried when a range is released.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from typing import Final

from cells.kubernetes.objects.cilium_node import AllocatedPool, CiliumNode
from cells.kubernetes.objects.cilium_pools import CiliumPodIPPool
from cells.operator.pod_cidrs import (
    CidrPools,
    Network,
    NodePatch,
    PoolError,
    PoolsPatch,
    parsed,
    reported_ranges,
)

# Disjoint networks that nodes hold.

Span = tuple[int, int]
"""The first and the last address."""


def span(network: Network) -> Span:
    """Return the first and the last address of a network, as integers."""
    return int(network.network_address), int(network.broadcast_address)


class HeldNetworks:
    """A set of disjoint networks of both families, searchable by overlap."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {4: [], 6: []}

    def overlapping(self, version: int, wanted: Span) -> Span | None:
        """Return the last held network that overlaps the span, or None."""
        spans = self._spans[version]
        at = bisect_right(spans, wanted[1], key=lambda one: one[0])
        found = spans[at - 1] if at else None
        return found if found is not None and found[1] >= wanted[0] else None

    def add(self, network: Network) -> bool:
        """Add a network; return False if it overlaps a held one."""
        wanted = span(network)
        if self.overlapping(network.version, wanted) is not None:
            return False
        insort(self._spans[network.version], wanted)
        return True

    def remove(self, network: Network) -> None:
        """Remove a held network."""
        spans = self._spans[network.version]
        del spans[bisect_left(spans, span(network))]


# One CiliumPodIPPool and its next free range.
#
# Source: Cilium 1.17, pkg/ipam/allocator/multipool and cidrset: the first network with a free range; within a
#         network the search continues after the last allocated range.

_WIDEST_IPV6: Final = 65536
"""Prefix length; of a wider IPv6 network an agent allocates only as many addresses."""


def usable(network: Network) -> int:
    """Return how many addresses an agent allocates of a network.

    Without the first and the last, if there are others.
    """
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
        """Return the next free range, or None."""
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


class PodPool:
    """The networks of a pool, of both families. Raises PoolError for an invalid pool."""

    def __init__(self, row: CiliumPodIPPool) -> None:
        self.name = row.name
        self._masks: dict[int, int] = {}
        self._networks: dict[int, list[_Divided]] = {4: [], 6: []}
        self.follow(row)

    def follow(self, row: CiliumPodIPPool) -> None:
        """Apply a changed definition. Raises PoolError, and is unchanged, if it is invalid."""
        asked = {
            version: (part.mask_size, part.cidrs)
            for version, part in ((4, row.spec.ipv4), (6, row.spec.ipv6))
            if part is not None
        }
        fresh: dict[int, list[_Divided]] = {4: [], 6: []}
        for version, (mask, cidrs) in asked.items():
            if self._masks.get(version, mask) != mask:
                raise PoolError(f'cannot change IPv{version} mask size in existing pool "{self.name}"')
            CidrPools(version, cidrs, mask)  # rejects networks that overlap or are too wide
            before = {one.network: one for one in self._networks[version]}
            networks = map(parsed, cidrs)
            fresh[version] = [before.get(network) or _Divided(network, mask) for network in networks]
        self._networks = fresh
        self._masks |= {version: mask for version, (mask, _) in asked.items()}

    def allocate(self, version: int, held: HeldNetworks) -> Network | None:
        """Return the next free range of a family, or None."""
        found = (one.allocate(held) for one in self._networks[version])
        return next((network for network in found if network is not None), None)

    def has(self, network: Network) -> bool:
        """Whether a range belongs to the pool."""
        networks: Iterable[Network] = (one.network for one in self._networks[network.version])
        return any(network.subnet_of(one) for one in networks)  # type: ignore[arg-type]  # one version


Part = tuple[str, Network]
"""A range and the name of its pool."""
NodePatches = dict[str, NodePatch | None]
_NO_POOL = "cannot allocate from non-existing pool"


class _Holdings:
    """The ranges of a node."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.parts: dict[Part, None] = {}
        self.unseen: set[Part] = set()
        """Allocated ranges that its object does not show yet, and so cannot have released."""
        self.unpooled: set[Part] = set()
        """Adopted ranges of no pool."""
        self.lost: list[str] = []
        """Ranges of its object that could not be adopted."""
        self.error = ""

    def capacity(self, pool: str, version: int) -> int:
        """Return the number of its addresses of a pool."""
        return sum(usable(one) for name, one in self.parts if name == pool and one.version == version)


class PoolLedger:
    """Adopts the nodes' existing ranges before it allocates any; never allocates an address twice."""

    def __init__(self) -> None:
        self.pools: dict[str, PodPool] = {}
        self.faults: dict[str, str] = {}
        """Invalid pools, with the error."""
        self._held = HeldNetworks()
        self._nodes: dict[str, CiliumNode] = {}
        self._of: dict[str, _Holdings] = {}

    def held(self) -> dict[str, list[Part]]:
        """The ranges of each node."""
        return {name: list(one.parts) for name, one in self._of.items()}

    def users(self, pool: str) -> list[str]:
        """Return the nodes that hold ranges of a pool."""
        return [name for name, one in self._of.items() if any(part[0] == pool for part in one.parts)]

    def define(self, changed: Mapping[str, CiliumPodIPPool | None]) -> NodePatches:
        """Apply changed pools (None: deleted); return the patches of nodes that waited for a range.

        An invalid definition leaves the pool unchanged.
        """
        for name, row in changed.items():
            self.faults.pop(name, None)
            if row is None:
                self.pools.pop(name, None)
                continue
            try:
                if name in self.pools:
                    self.pools[name].follow(row)
                else:
                    self.pools[name] = PodPool(row)
            except PoolError as error:
                self.faults[name] = str(error)
        return self._serve(self._waiting())

    def update(self, changed: Mapping[str, CiliumNode | None]) -> NodePatches:
        """Apply changed nodes (None: deleted); return the patches of all affected nodes."""
        live = {name: node for name, node in changed.items() if node is not None}
        freed = False
        for name in changed.keys() - live.keys():
            self._nodes.pop(name, None)
            freed |= self._release_all(name)
        for name, node in live.items():
            if name in self._of and self._of[name].uid != node.metadata.uid:
                freed |= self._release_all(name)  # recreated: its allocations are those in the new object
            freed |= self._release(name, node)
            self._nodes[name] = node
        for name, node in live.items():
            self._adopt(name, node)
        waiting = [name for name in self._waiting() if name not in live] if freed else []
        has = [name for name in live if self._of[name].parts or self._of[name].lost]
        rest = [name for name in live if name not in has]
        removed: NodePatches = {name: None for name in changed if name not in live}
        return removed | self._serve([*has, *waiting, *rest])

    def _waiting(self) -> list[str]:
        return [name for name, one in self._of.items() if one.error]

    def _release_all(self, name: str) -> bool:
        holdings = self._of.pop(name, None)
        for _, network in holdings.parts if holdings is not None else ():
            self._held.remove(network)
        return bool(holdings and holdings.parts)

    def _release(self, name: str, node: CiliumNode) -> bool:
        """Release the ranges that the node's object no longer has."""
        holdings = self._of.setdefault(name, _Holdings(node.metadata.uid))
        old = self._nodes.get(name)
        if old is not None and old.spec.ipam.pools.requested != node.spec.ipam.pools.requested:
            holdings.lost = []
        reported = {part for part in map(_part, _reported(node)) if part is not None}
        holdings.unseen -= reported
        back = [part for part in holdings.parts if part not in reported and part not in holdings.unseen]
        for part in back:
            del holdings.parts[part]
            holdings.unpooled.discard(part)
            self._held.remove(part[1])
        return bool(back)

    def _adopt(self, name: str, node: CiliumNode) -> None:
        """Adopt the ranges of the node's object."""
        holdings = self._of[name]
        for pool, text in _reported(node):
            part = _part((pool, text))
            if part is None:
                _note(holdings.lost, f"invalid CIDR address: {text}")
            elif part not in holdings.parts:
                if not self._held.add(part[1]):
                    why = f"unable to reuse from pool {pool}: cidr {part[1]} has already been allocated"
                    _note(holdings.lost, why)
                    continue
                holdings.parts[part] = None
                if self._pool_fault(part):
                    holdings.unpooled.add(part)

    def _pool_fault(self, part: Part) -> str:
        """Return why its pool would not allocate such a range; empty if it would."""
        pool = self.pools.get(part[0])
        if pool is None:
            return f"cannot reuse from non-existing pool: {part[0]}"
        if not pool.has(part[1]):
            return f"unable to reuse from pool {part[0]}: cidr {part[1]} is not part of the requested pool"
        return ""

    def _serve(self, names: Iterable[str]) -> NodePatches:
        return {name: self._patch_of(name, self._nodes[name], self._of[name]) for name in names}

    def _patch_of(self, name: str, node: CiliumNode, holdings: _Holdings) -> NodePatch | None:
        errors = [*holdings.lost]
        for part in sorted(holdings.unpooled, key=str):
            _note(errors, self._pool_fault(part))
        for request in node.spec.ipam.pools.requested or ():
            for version, needed in ((4, request.needed.ipv4), (6, request.needed.ipv6)):
                if why := self._fill(holdings, request.pool, version, needed):
                    text = f'failed to allocate ipv{version} address for node "{name}" from pool'
                    errors.append(f'{text} "{request.pool}": {why}')
        holdings.error = "\n".join(filter(None, errors))
        wanted, reported = _allocated(holdings.parts), frozenset(_reported(node))
        pools = None if reported_ranges(wanted) == reported else PoolsPatch(wanted, reported)
        error_changed = holdings.error != node.status.ipam.operator_status.error
        if pools is None and not error_changed:
            return None
        return NodePatch(name, node.metadata.uid, None, holdings.error, error_changed, pools)

    def _fill(self, holdings: _Holdings, name: str, version: int, needed: int) -> str:
        """Allocate ranges until the node has as many addresses as it needs; return errors."""
        have = holdings.capacity(name, version)
        while have < needed:
            pool = self.pools.get(name)
            why = self.faults.get(name, "")
            if pool is None:
                return f"definition cannot be applied: {why}" if why else f"{_NO_POOL}: {name}"
            network = pool.allocate(version, self._held)
            if network is None:
                return f"pool empty, and its new definition is not in force: {why}" if why else "pool empty"
            self._held.add(network)
            holdings.parts[name, network] = None
            holdings.unseen.add((name, network))
            have += usable(network)
        return ""


def _reported(node: CiliumNode) -> list[tuple[str, str]]:
    """Yield the pools and ranges of a node's object."""
    return [(pool.pool, text) for pool in node.spec.ipam.pools.allocated or () for text in pool.cidrs or ()]


def _part(reported: tuple[str, str]) -> Part | None:
    try:
        return reported[0], parsed(reported[1])
    except PoolError:
        return None


def _note(notes: list[str], text: str) -> None:
    if text and text not in notes:
        notes.append(text)


def _allocated(parts: Iterable[Part]) -> tuple[AllocatedPool, ...]:
    """Return the object's form: pools by name, IPv4 first, sorted strings."""
    by_pool: dict[str, list[Network]] = {}
    for pool, network in parts:
        by_pool.setdefault(pool, []).append(network)
    return tuple(
        AllocatedPool(
            pool, tuple(str(one) for one in sorted(networks, key=lambda one: (one.version, str(one))))
        )
        for pool, networks in sorted(by_pool.items())
    )
