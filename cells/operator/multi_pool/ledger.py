"""Which node holds which ranges of which pools, and what is to be written about each node.

Source: Cilium 1.17, pkg/ipam/allocator/multipool. Other than there, an address is never held twice, whatever
        pools overlap; what a node holds stays its own when its pool changes or ends, over restarts too; a
        node that found a pool empty is looked at again when a range comes free.
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

# Networks that nodes hold: none overlaps another.

Span = tuple[int, int]
"""The first and the last address."""


def span(network: Network) -> Span:
    """The first and the last address of a network, as numbers."""
    return int(network.network_address), int(network.broadcast_address)


class HeldNetworks:
    """A set of networks of both families, asked what overlaps with it."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {4: [], 6: []}

    def overlapping(self, version: int, wanted: Span) -> Span | None:
        """The last held network that has an address of the span; None when it is free."""
        spans = self._spans[version]
        at = bisect_right(spans, wanted[1], key=lambda one: one[0])
        found = spans[at - 1] if at else None
        return found if found is not None and found[1] >= wanted[0] else None

    def add(self, network: Network) -> bool:
        """Hold it; False if an address of it is held already."""
        wanted = span(network)
        if self.overlapping(network.version, wanted) is not None:
            return False
        insort(self._spans[network.version], wanted)
        return True

    def remove(self, network: Network) -> None:
        """Hold it no more; it must be held."""
        spans = self._spans[network.version]
        del spans[bisect_left(spans, span(network))]


# One CiliumPodIPPool: which range comes next.
#
# Source: Cilium 1.17, pkg/ipam/allocator/multipool and cidrset: networks in their order, the first that has a
#         free range; within one the search goes on behind the last range given out.

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


class PodPool:
    """The networks of a pool, of both families. Raises PoolError for one that cannot be."""

    def __init__(self, row: CiliumPodIPPool) -> None:
        self.name = row.name
        self._masks: dict[int, int] = {}
        self._networks: dict[int, list[_Divided]] = {4: [], 6: []}
        self.follow(row)

    def follow(self, row: CiliumPodIPPool) -> None:
        """Become what the object has now. Raises PoolError, and stays as it was, if that is impossible."""
        asked = {
            version: (part.mask_size, part.cidrs)
            for version, part in ((4, row.spec.ipv4), (6, row.spec.ipv6))
            if part is not None
        }
        fresh: dict[int, list[_Divided]] = {4: [], 6: []}
        for version, (mask, cidrs) in asked.items():
            if self._masks.get(version, mask) != mask:
                raise PoolError(f'cannot change IPv{version} mask size in existing pool "{self.name}"')
            CidrPools(version, cidrs, mask)  # refuses what overlaps or is too wide
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


Part = tuple[str, Network]
"""A range, and the pool it is of."""
NodePatches = dict[str, NodePatch | None]
_NO_POOL = "cannot allocate from non-existing pool"


class _Holdings:
    """What a node holds."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.parts: dict[Part, None] = {}
        self.unseen: set[Part] = set()
        """Given to it, and not yet seen in its object: only what was seen there can have been given back."""
        self.strays: set[Part] = set()
        """Adopted though no pool has them."""
        self.lost: list[str] = []
        """What its object claims and could not have."""
        self.error = ""

    def capacity(self, pool: str, version: int) -> int:
        """How many addresses it has of a pool."""
        return sum(usable(one) for name, one in self.parts if name == pool and one.version == version)


class PoolLedger:
    """Adopts what nodes hold before it gives out anything; never gives an address twice."""

    def __init__(self) -> None:
        self.pools: dict[str, PodPool] = {}
        self.faults: dict[str, str] = {}
        """Pools that cannot be as they are defined, and why."""
        self._held = HeldNetworks()
        self._nodes: dict[str, CiliumNode] = {}
        self._of: dict[str, _Holdings] = {}

    def held(self) -> dict[str, list[Part]]:
        """The ranges of each node."""
        return {name: list(one.parts) for name, one in self._of.items()}

    def users(self, pool: str) -> list[str]:
        """The nodes that hold ranges of a pool."""
        return [name for name, one in self._of.items() if any(part[0] == pool for part in one.parts)]

    def define(self, changed: Mapping[str, CiliumPodIPPool | None]) -> NodePatches:
        """Take in pools that have changed (None: deleted); the plans of nodes that had waited.

        A pool that cannot be as it is defined stays as it was.
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
        """Take in nodes that have changed (None: deleted); the plans of all that are concerned."""
        live = {name: node for name, node in changed.items() if node is not None}
        freed = False
        for name in changed.keys() - live.keys():
            self._nodes.pop(name, None)
            freed |= self._release_all(name)
        for name, node in live.items():
            if name in self._of and self._of[name].uid != node.metadata.uid:
                freed |= self._release_all(name)  # deleted and made again: it has what is in its new object
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
        """What its agent has given back."""
        holdings = self._of.setdefault(name, _Holdings(node.metadata.uid))
        old = self._nodes.get(name)
        if old is not None and old.spec.ipam.pools.requested != node.spec.ipam.pools.requested:
            holdings.lost = []
        reported = {part for part in map(_part, _reported(node)) if part is not None}
        holdings.unseen -= reported
        back = [part for part in holdings.parts if part not in reported and part not in holdings.unseen]
        for part in back:
            del holdings.parts[part]
            holdings.strays.discard(part)
            self._held.remove(part[1])
        return bool(back)

    def _adopt(self, name: str, node: CiliumNode) -> None:
        """The ranges that its object claims."""
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
                if self._stray(part):
                    holdings.strays.add(part)

    def _stray(self, part: Part) -> str:
        """Why a range is not what its pool would have given; empty if it may be."""
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
        for part in sorted(holdings.strays, key=str):
            _note(errors, self._stray(part))
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
        """Add ranges until there are as many addresses as needed; why that cannot be."""
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
    """The pools and ranges that a node's object names."""
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
    """As the object has them: pools by name, IPv4 first, texts in the order of texts."""
    by_pool: dict[str, list[Network]] = {}
    for pool, network in parts:
        by_pool.setdefault(pool, []).append(network)
    return tuple(
        AllocatedPool(
            pool, tuple(str(one) for one in sorted(networks, key=lambda one: (one.version, str(one))))
        )
        for pool, networks in sorted(by_pool.items())
    )
