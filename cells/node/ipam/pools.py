"""The pools of this node in IPAM mode multi-pool: their ranges, requests and releases.

The operator only adds ranges; only this node releases them. A released range is not used again before the
CiliumNode has been observed without it. If the CiliumNode is unavailable, a restarted agent continues with
its previous ranges.

Source: Cilium 1.17, pkg/ipam/multipool.go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import anyio
import msgspec

from cells.base.addresses import Family, IPNetwork
from cells.config import AgentConfig
from cells.node.ipam.allocator import Allocator, Clock
from cells.node.ipam.settings import PodAddressing, save_pools, saved_pools, saved_ranges
from lifecycle import Health, Logger, Table, UsageError

__all__ = ["AssignedPodCIDRs", "AssignedPools", "PodPools", "PoolRequest", "PoolState"]


# Inputs from other cells: Kubernetes, the operator, and pods' annotations.


class AssignedPodCIDRs(Protocol):
    """This node's assigned ranges. Cells that depend on it start after they are known."""

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        """Return the ranges by family, the primary one first; families without a range are absent."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Yield whenever the ranges may have changed."""
        ...


class PoolState(msgspec.Struct, frozen=True):
    """The pools in this node's CiliumNode."""

    requested: Mapping[str, Mapping[Family, int]]
    """Requested addresses, by pool."""
    allocated: Mapping[str, tuple[IPNetwork, ...]]
    """Allocated ranges, by pool."""
    problem: str = ""
    """The operator's error message."""


class AssignedPools(Protocol):
    """This node's pools in IPAM mode multi-pool."""

    def pools(self) -> PoolState | None:
        """Return the pools of the CiliumNode; None without a CiliumNode."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Yield whenever the pools may have changed."""
        ...


class PodPools(Protocol):
    """The pools that pods choose."""

    def pool_of(self, owner: str, family: Family) -> str:
        """Return the pool of ``namespace/pod``; empty for the default pool.

        Raises IpamLaterError while the pod is unknown, and IpamError if the pod requires a pool and has none.
        """
        ...


# Requested addresses per pool: in use, pending, and pre-allocated.
#
# Source: Cilium 1.17, pkg/ipam/multipool.go: neededIPCeil, pendingAllocationsPerPool.

PENDING_SECONDS: Final = 300.0
"""Seconds for which an address that could not be allocated is requested."""

Key = tuple[str, Family]
"""A pool and a family."""


class PoolRequest(msgspec.Struct, frozen=True):
    """A row of the table ``pod-pool-requests``: this node's request to a pool."""

    pool: str
    ipv4: int = 0
    ipv6: int = 0
    """Requested addresses of each family, including those in use."""
    released: tuple[IPNetwork, ...] = ()
    """Ranges to release: none of their addresses is in use, and none is allocated any more."""


def round_up_demand(needed: int, pre_allocation: int) -> int:
    """Round up to a multiple of ``pre_allocation``, with at least as many free addresses.

    Source: neededIPCeil.
    """
    if not pre_allocation:
        return needed
    return (-(-needed // pre_allocation) + 1) * pre_allocation


class AddressDemand:
    """The number of addresses to request: in use, pending and pre-allocated."""

    def __init__(self, pre_allocation: Mapping[str, int], clock: Clock) -> None:
        self.pre_allocation = pre_allocation
        """Pre-allocated addresses by pool."""
        self.floor: dict[Key, int] = {}
        """Minimum of requested addresses: the previous request, until endpoints are restored."""
        self._clock = clock
        self._pending: dict[tuple[str, Family, str], float] = {}

    def add_pending(self, pool: str, family: Family, owner: str) -> None:
        """Add a pending request for an address, for PENDING_SECONDS."""
        self._pending[pool, family, owner] = self._clock.now() + PENDING_SECONDS

    def remove_pending(self, pool: str, family: Family, owner: str) -> None:
        """Remove a pending request that got an address."""
        self._pending.pop((pool, family, owner), None)

    def needed(self, in_use: Mapping[Key, int], families: Iterable[Family]) -> dict[Key, int]:
        """Return the addresses to request, by pool and family; without zero counts."""
        now = self._clock.now()
        self._pending = {key: until for key, until in self._pending.items() if until > now}
        waiting: dict[Key, int] = {}
        for pool, family, _ in self._pending:
            waiting[pool, family] = waiting.get((pool, family), 0) + 1
        families = list(families)
        keys = {
            *in_use,
            *waiting,
            *self.floor,
            *((pool, family) for pool in self.pre_allocation for family in families),
        }
        found = {
            key: max(
                round_up_demand(in_use.get(key, 0) + waiting.get(key, 0), self.pre_allocation.get(key[0], 0)),
                self.floor.get(key, 0),
            )
            for key in keys
            if key[1] in families
        }
        return {key: count for key, count in found.items() if count}


NODE_OWNER: Final = "the node itself"
"""The owner of a pending request for an address of the default pool before the router has one."""


class OperatorPools:
    """The interface to the operator: assigned pools, pods' choice of pools, and requests."""

    def __init__(
        self,
        requests: Table[str, PoolRequest],
        assigned: AssignedPools | None = None,
        pods: PodPools | None = None,
    ) -> None:
        self.requests = requests
        self.assigned = assigned
        self.pods = pods


class NodePools:
    """Updates an allocator's pools from the CiliumNode, and the requests from the allocator's use."""

    def __init__(
        self,
        allocator: Allocator,
        addressing: PodAddressing,
        agent: AgentConfig,
        operator: OperatorPools,
        clock: Clock,
        health: Health,
        log: Logger,
    ) -> None:
        self._allocator = allocator
        self._assigned = operator.assigned
        self._pods = operator.pods
        self._requests = operator.requests
        self._first = operator.requests.initializer("requests of this node to pools")
        self._health = health
        self._log = log
        self._state_dir: Path = agent.state_dir
        on = {Family.IPV6: agent.ipv6, Family.IPV4: agent.ipv4}
        self._families = [family for family, enabled in on.items() if enabled]
        self._default = addressing.default_pool
        self._pre_allocation = addressing.pre_allocation
        self._demand = AddressDemand(self._pre_allocation, clock)
        self._releasing: set[tuple[str, IPNetwork]] = set()
        """Ranges in release."""
        self._claimed = False
        """Whether restored endpoints have claimed their addresses."""
        self._following = False
        self._saved: Mapping[str, tuple[IPNetwork, ...]] = {}
        self._grown = anyio.Event()

    async def start(self) -> None:
        """Wait until every pool with pre-allocation, and the default pool, has a free address.

        Raises UsageError.
        """
        if self._assigned is None:
            raise UsageError("ipam=multi-pool: no source for this node's pools")
        self._saved = saved_pools(self._state_dir, self._log)
        earlier = saved_ranges(self._state_dir, self._log).primary.values()  # of another IPAM mode
        self._allocator.use_pools(self._families, self._saved or {self._default: tuple(earlier)})
        self._following = True
        state = self._assigned.pools()
        self._apply_assigned(PoolState({}, self._saved) if state is None else state)
        for family in self._families:
            if not self._pre_allocation.get(self._default):
                self._demand.add_pending(self._default, family, NODE_OWNER)
        self.use_changed()
        self._first.done()
        if missing := self._missing():
            self._report(missing)
            async for _ in self._assigned.changes():
                self.look()
                if not (missing := self._missing()):
                    break
                self._report(missing)
        for family in self._families:
            self._demand.remove_pending(self._default, family, NODE_OWNER)
        self._health.ok("every pool has addresses")
        shown = {pool: list(map(str, networks)) for pool, networks in self._networks().items()}
        self._log.info("pools of pod addresses", pools=shown)

    def look(self) -> None:
        """Apply the pools as assigned now. A deleted CiliumNode changes nothing."""
        if self._assigned is not None and self._following:
            self._apply_assigned(self._assigned.pools())
            self.use_changed()

    def claimed(self) -> None:
        """Allow the release of unused ranges, once restored endpoints have claimed their addresses."""
        self._claimed = True
        self._demand.floor = {}
        self.look()

    def use_changed(self) -> None:
        """Update the requests to the current demand."""
        if not self._following:
            return
        needed = self._demand.needed(self._allocator.in_use(), self._families)
        if self._claimed:
            self._release_unused(needed)
        rows = _request_rows(needed, self._releasing)
        if rows != {row.pool: row for row in self._requests.all()}:
            with self._requests.txn() as txn:
                txn.replace_all(rows.values())

    def pool_for(self, owner: str, family: Family) -> str:
        """Return the pool to allocate from for an owner. Raises IpamError."""
        found = self._pods.pool_of(owner, family) if self._pods is not None else ""
        return found or self._default

    def add_pending(self, pool: str, family: Family, owner: str) -> str:
        """Add a pending request for an address; return the operator's error about the pool, or ""."""
        self._demand.add_pending(pool, family, owner)
        state = self._assigned.pools() if self._assigned is not None else None
        lines = state.problem.splitlines() if state is not None else []
        return next((line for line in lines if f'"{pool}"' in line and str(family) in line), "")

    def remove_pending(self, pool: str, family: Family, owner: str) -> None:
        """Remove a pending request that got an address."""
        self._demand.remove_pending(pool, family, owner)

    async def wait_changed(self) -> None:
        """Wait until ranges have changed."""
        await self._grown.wait()

    def save_if_changed(self) -> None:
        """Save the ranges for the next run, if they have changed."""
        networks = self._networks()
        if networks != self._saved:
            self._saved = networks
            save_pools(self._state_dir, networks)

    def _apply_assigned(self, state: PoolState | None) -> None:
        if state is None:
            return
        if not self._claimed:
            self._demand.floor = {
                (pool, family): count
                for pool, counts in state.requested.items()
                for family, count in counts.items()
            }
        allocated = {(pool, network) for pool, networks in state.allocated.items() for network in networks}
        self._releasing &= allocated
        use = {
            pool: [network for network in networks if (pool, network) not in self._releasing]
            for pool, networks in state.allocated.items()
        }
        if self._allocator.follow_pools(use, forget=self._claimed):
            shown = {pool: list(map(str, networks)) for pool, networks in use.items()}
            self._log.info("ranges of pods have changed", pools=shown)
            self._grown.set()
            self._grown = anyio.Event()

    def _release_unused(self, needed: Mapping[Key, int]) -> None:
        """Stop allocating from ranges that are not needed, and release them."""
        use: dict[str, list[IPNetwork]] = {}
        unused: set[tuple[str, IPNetwork]] = set()
        for pool, family in self._allocator.in_use():
            for network in self._allocator.spare(pool, family, needed.get((pool, family), 0)):
                unused.add((pool, network))
        if not unused:
            return
        self._releasing |= unused
        for row in self._allocator.pod_ranges():
            if row.state != "retired" and (row.pool, row.network) not in unused:
                use.setdefault(row.pool, []).append(row.network)
        self._allocator.follow_pools(use, forget=True)

    def _missing(self) -> list[Key]:
        """Return the pools and families that the start waits for."""
        pools = {pool for pool, count in self._pre_allocation.items() if count} | {self._default}
        return [
            (pool, family)
            for pool in sorted(pools)
            for family in self._families
            if not self._allocator.has_free(pool, family)
        ]

    def _report(self, missing: list[Key]) -> None:
        text = ", ".join(f"{pool} ({family})" for pool, family in missing)
        state = self._assigned.pools() if self._assigned is not None else None
        problem = state.problem if state is not None else ""
        self._health.degraded(f"waiting for ranges of pools: {text}" + (f": {problem}" if problem else ""))
        self._log.info("Waiting for IP pools to become available", pools=text, operator=problem)

    def _networks(self) -> dict[str, tuple[IPNetwork, ...]]:
        found: dict[str, tuple[IPNetwork, ...]] = {}
        for row in self._allocator.pod_ranges():
            found[row.pool] = (*found.get(row.pool, ()), row.network)
        return found


def _request_rows(needed: Mapping[Key, int], releasing: set[tuple[str, IPNetwork]]) -> dict[str, PoolRequest]:
    pools = sorted({pool for pool, _ in needed} | {pool for pool, _ in releasing})
    return {
        pool: PoolRequest(
            pool,
            needed.get((pool, Family.IPV4), 0),
            needed.get((pool, Family.IPV6), 0),
            tuple(sorted((network for of, network in releasing if of == pool), key=str)),
        )
        for pool in pools
    }
