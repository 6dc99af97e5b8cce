"""Which node holds which ranges of which pools, and what is to be said of each node.

Needs: Pool, HeldNetworks.   Gives: PoolLedger.
Source: Cilium 1.17, pkg/ipam/allocator/multipool. Other than there, an address is never held twice, whatever
        pools overlap; what a node holds stays its own when its pool has changed or gone, over restarts too;
        a node that found a pool empty is looked at again when a range comes free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cells.kubernetes import AllocatedPool, CiliumNode, CiliumPodIPPool
from cells.operator.multi_pool.held import HeldNetworks
from cells.operator.multi_pool.pool import Pool, usable
from cells.operator.pod_cidrs import Network, NodeWish, PoolError, PoolsWish, parsed, ranges_said

Part = tuple[str, Network]
"""A range, and the pool it is of."""
Wishes = dict[str, NodeWish | None]
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
        """What its object said that it has and could not keep."""
        self.error = ""

    def capacity(self, pool: str, version: int) -> int:
        """How many addresses it has of a pool."""
        return sum(usable(one) for name, one in self.parts if name == pool and one.version == version)


class PoolLedger:
    """Adopts what nodes hold before it gives out anything; never gives an address twice."""

    def __init__(self) -> None:
        self.pools: dict[str, Pool] = {}
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

    def define(self, changed: Mapping[str, CiliumPodIPPool | None]) -> Wishes:
        """Take in pools that have changed (None: they are gone); the wishes of nodes that had waited.

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
                    self.pools[name] = Pool(row)
            except PoolError as error:
                self.faults[name] = str(error)
        return self._serve(self._waiting())

    def update(self, changed: Mapping[str, CiliumNode | None]) -> Wishes:
        """Take in nodes that have changed (None: they are gone); the wishes of all that are concerned."""
        live = {name: node for name, node in changed.items() if node is not None}
        freed = False
        for name in changed.keys() - live.keys():
            self._nodes.pop(name, None)
            freed |= self._release_all(name)
        for name, node in live.items():
            if name in self._of and self._of[name].uid != node.metadata.uid:
                freed |= self._release_all(name)  # deleted and made again: it has what its new object says
            freed |= self._release(name, node)
            self._nodes[name] = node
        for name, node in live.items():
            self._adopt(name, node)
        waiting = [name for name in self._waiting() if name not in live] if freed else []
        has = [name for name in live if self._of[name].parts or self._of[name].lost]
        rest = [name for name in live if name not in has]
        gone: Wishes = {name: None for name in changed if name not in live}
        return gone | self._serve([*has, *waiting, *rest])

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
        said = {part for part in map(_part, _said(node)) if part is not None}
        holdings.unseen -= said
        back = [part for part in holdings.parts if part not in said and part not in holdings.unseen]
        for part in back:
            del holdings.parts[part]
            holdings.strays.discard(part)
            self._held.remove(part[1])
        return bool(back)

    def _adopt(self, name: str, node: CiliumNode) -> None:
        """What its object says that it holds."""
        holdings = self._of[name]
        for pool, text in _said(node):
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

    def _serve(self, names: Iterable[str]) -> Wishes:
        return {name: self._wish(name, self._nodes[name], self._of[name]) for name in names}

    def _wish(self, name: str, node: CiliumNode, holdings: _Holdings) -> NodeWish | None:
        errors = [*holdings.lost]
        for part in sorted(holdings.strays, key=str):
            _note(errors, self._stray(part))
        for request in node.spec.ipam.pools.requested or ():
            for version, needed in ((4, request.needed.ipv4), (6, request.needed.ipv6)):
                if why := self._fill(holdings, request.pool, version, needed):
                    text = f'failed to allocate ipv{version} address for node "{name}" from pool'
                    errors.append(f'{text} "{request.pool}": {why}')
        holdings.error = "\n".join(filter(None, errors))
        wanted, said = _allocated(holdings.parts), frozenset(_said(node))
        pools = None if ranges_said(wanted) == said else PoolsWish(wanted, said)
        says = holdings.error != node.status.ipam.operator_status.error
        if pools is None and not says:
            return None
        return NodeWish(name, node.metadata.uid, None, holdings.error, says, pools)

    def _fill(self, holdings: _Holdings, name: str, version: int, needed: int) -> str:
        """Add ranges until there are as many addresses as needed; why that cannot be."""
        have = holdings.capacity(name, version)
        while have < needed:
            pool = self.pools.get(name)
            why = self.faults.get(name, "")
            if pool is None:
                return f"cannot be as it is defined: {why}" if why else f"{_NO_POOL}: {name}"
            network = pool.allocate(version, self._held)
            if network is None:
                return f"pool empty, and its new definition is not in force: {why}" if why else "pool empty"
            self._held.add(network)
            holdings.parts[name, network] = None
            holdings.unseen.add((name, network))
            have += usable(network)
        return ""


def _said(node: CiliumNode) -> list[tuple[str, str]]:
    """The pools and ranges that a node's object names."""
    return [(pool.pool, text) for pool in node.spec.ipam.pools.allocated or () for text in pool.cidrs or ()]


def _part(said: tuple[str, str]) -> Part | None:
    try:
        return said[0], parsed(said[1])
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
