"""The pools of this node in IPAM mode multi-pool: what it has of them, asks for, and gives back.

Source: Cilium 1.17, pkg/ipam/multipool.go. The operator only adds ranges, this node alone gives back: what it
        releases it never uses again before its CiliumNode has been seen without it. While there is no news of
        the CiliumNode, a restarted agent goes on with the ranges it had.
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
from cells.node.ipam.settings import PodAddressing, keep_pools, saved_pools, saved_ranges
from lifecycle import Health, Logger, Table, UsageError

__all__ = ["AssignedPodCIDRs", "AssignedPools", "PodPools", "PoolRequest", "PoolState"]


# What is decided elsewhere for this node and its pods: by Kubernetes, the operator, or pods' annotations.


class AssignedPodCIDRs(Protocol):
    """This node's assigned ranges; a cell that takes this starts after the wait for them."""

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        """The ranges, the primary one of each family first; nothing for a family that has none."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Comes back whenever the ranges may have changed."""
        ...


class PoolState(msgspec.Struct, frozen=True):
    """The pools in this node's CiliumNode."""

    requested: Mapping[str, Mapping[Family, int]]
    """How many addresses are asked for, by pool."""
    allocated: Mapping[str, tuple[IPNetwork, ...]]
    """The ranges of each pool."""
    problem: str = ""
    """What the operator could not do."""


class AssignedPools(Protocol):
    """What is known of this node's pools, in IPAM mode multi-pool."""

    def pools(self) -> PoolState | None:
        """The object's pools; None without an object."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Comes back whenever that may have changed."""
        ...


class PodPools(Protocol):
    """Which pools pods ask for."""

    def pool_of(self, owner: str, family: Family) -> str:
        """The pool of ``namespace/pod``; empty for the default one.

        Raises IpamLaterError while the pod is not known, IpamError where it must have a pool and has none.
        """
        ...


# How many addresses a node requests from each pool: in use, waited for by pods, and some ahead.
#
# Source: Cilium 1.17, pkg/ipam/multipool.go: neededIPCeil, pendingAllocationsPerPool.

PENDING: Final = 300.0
"""Seconds that an address which could not be had is asked for."""

Key = tuple[str, Family]
"""A pool, and one of its families."""


class PoolRequest(msgspec.Struct, frozen=True):
    """This node's request to a pool, a row of the table ``pod-pool-requests``."""

    pool: str
    ipv4: int = 0
    ipv6: int = 0
    """How many addresses of each family, those in use among them."""
    released: tuple[IPNetwork, ...] = ()
    """Ranges that it gives back: none of their addresses is in use, and none is handed out."""


def with_ahead(needed: int, ahead: int) -> int:
    """The addresses needed, rounded up to a multiple of ``ahead`` with at least so many on top."""
    if not ahead:
        return needed
    return (-(-needed // ahead) + 1) * ahead


class Demand:
    """What is asked for, beside what is in use."""

    def __init__(self, ahead: Mapping[str, int], clock: Clock) -> None:
        self.ahead = ahead
        """How many addresses of a pool are held ready."""
        self.floor: dict[Key, int] = {}
        """No less is asked for; until endpoints are restored, what was asked for before."""
        self._clock = clock
        self._pending: dict[tuple[str, Family, str], float] = {}

    def wanted(self, pool: str, family: Family, owner: str) -> None:
        """A request found no address: ask for one more, for a while."""
        self._pending[pool, family, owner] = self._clock.now() + PENDING

    def met(self, pool: str, family: Family, owner: str) -> None:
        """A request got an address."""
        self._pending.pop((pool, family, owner), None)

    def needed(self, in_use: Mapping[Key, int], families: Iterable[Family]) -> dict[Key, int]:
        """How many addresses of each pool are asked for; pools of which none is needed are left out."""
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
            *((pool, family) for pool in self.ahead for family in families),
        }
        found = {
            key: max(
                with_ahead(in_use.get(key, 0) + waiting.get(key, 0), self.ahead.get(key[0], 0)),
                self.floor.get(key, 0),
            )
            for key in keys
            if key[1] in families
        }
        return {key: count for key, count in found.items() if count}


FIRST: Final = "the node itself"
"""Who waits for an address of the default pool before the router does."""


class OperatorPools:
    """The pools of the operator: what this node has of them, which pods choose, and what it asks for."""

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
    """Keeps an allocator's pools as the CiliumNode has them, and the requests as the allocator is used."""

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
        self._ahead = addressing.ahead
        self._demand = Demand(self._ahead, clock)
        self._leaving: set[tuple[str, IPNetwork]] = set()
        """Ranges that are being given back."""
        self._claimed = False
        """Whether restored endpoints have claimed their addresses."""
        self._following = False
        self._saved: Mapping[str, tuple[IPNetwork, ...]] = {}
        self._grown = anyio.Event()

    async def start(self) -> None:
        """Wait until every pool that addresses are held ready of has one. Raises UsageError."""
        if self._assigned is None:
            raise UsageError("ipam=multi-pool: no source for this node's pools")
        self._saved = saved_pools(self._state_dir, self._log)
        earlier = saved_ranges(self._state_dir, self._log).primary.values()  # of another mode of IPAM
        self._allocator.use_pools(self._families, self._saved or {self._default: tuple(earlier)})
        self._following = True
        state = self._assigned.pools()
        self._look(PoolState({}, self._saved) if state is None else state)
        for family in self._families:
            if not self._ahead.get(self._default):
                self._demand.wanted(self._default, family, FIRST)
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
            self._demand.met(self._default, family, FIRST)
        self._health.ok("every pool has addresses")
        shown = {pool: list(map(str, networks)) for pool, networks in self._networks().items()}
        self._log.info("pools of pod addresses", pools=shown)

    def look(self) -> None:
        """Apply the pools as assigned now; a deleted object changes nothing."""
        if self._assigned is not None and self._following:
            self._look(self._assigned.pools())
            self.use_changed()

    def claimed(self) -> None:
        """Restored endpoints have their addresses: what is not in use may be given back from now on."""
        self._claimed = True
        self._demand.floor = {}
        self.look()

    def use_changed(self) -> None:
        """Ask for as many addresses as are needed now."""
        if not self._following:
            return
        needed = self._demand.needed(self._allocator.in_use(), self._families)
        if self._claimed:
            self._give_back(needed)
        rows = _rows(needed, self._leaving)
        if rows != {row.pool: row for row in self._requests.all()}:
            with self._requests.txn() as txn:
                txn.replace_all(rows.values())

    def pool_for(self, owner: str, family: Family) -> str:
        """The pool to allocate from for an owner. Raises IpamError."""
        found = self._pods.pool_of(owner, family) if self._pods is not None else ""
        return found or self._default

    def wanted(self, pool: str, family: Family, owner: str) -> str:
        """A request found no address: ask for it; the operator's message about the pool."""
        self._demand.wanted(pool, family, owner)
        state = self._assigned.pools() if self._assigned is not None else None
        lines = state.problem.splitlines() if state is not None else []
        return next((line for line in lines if f'"{pool}"' in line and str(family) in line), "")

    def met(self, pool: str, family: Family, owner: str) -> None:
        """A request got an address."""
        self._demand.met(pool, family, owner)

    async def grown(self) -> None:
        """Wait until ranges have come."""
        await self._grown.wait()

    def keep(self) -> None:
        """Keep the ranges for the next run of the agent."""
        networks = self._networks()
        if networks != self._saved:
            self._saved = networks
            keep_pools(self._state_dir, networks)

    def _look(self, state: PoolState | None) -> None:
        if state is None:
            return
        if not self._claimed:
            self._demand.floor = {
                (pool, family): count
                for pool, counts in state.requested.items()
                for family, count in counts.items()
            }
        allocated = {(pool, network) for pool, networks in state.allocated.items() for network in networks}
        self._leaving &= allocated
        use = {
            pool: [network for network in networks if (pool, network) not in self._leaving]
            for pool, networks in state.allocated.items()
        }
        if self._allocator.follow_pools(use, forget=self._claimed):
            shown = {pool: list(map(str, networks)) for pool, networks in use.items()}
            self._log.info("ranges of pods have changed", pools=shown)
            self._grown.set()
            self._grown = anyio.Event()

    def _give_back(self, needed: Mapping[Key, int]) -> None:
        """Stop using ranges that are not needed; they are given back once that is written."""
        use: dict[str, list[IPNetwork]] = {}
        spare: set[tuple[str, IPNetwork]] = set()
        for pool, family in self._allocator.in_use():
            for network in self._allocator.spare(pool, family, needed.get((pool, family), 0)):
                spare.add((pool, network))
        if not spare:
            return
        self._leaving |= spare
        for row in self._allocator.pod_ranges():
            if row.state != "retired" and (row.pool, row.network) not in spare:
                use.setdefault(row.pool, []).append(row.network)
        self._allocator.follow_pools(use, forget=True)

    def _missing(self) -> list[Key]:
        """Pools and families that the start waits for."""
        pools = {pool for pool, ahead in self._ahead.items() if ahead} | {self._default}
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


def _rows(needed: Mapping[Key, int], leaving: set[tuple[str, IPNetwork]]) -> dict[str, PoolRequest]:
    pools = sorted({pool for pool, _ in needed} | {pool for pool, _ in leaving})
    return {
        pool: PoolRequest(
            pool,
            needed.get((pool, Family.IPV4), 0),
            needed.get((pool, Family.IPV6), 0),
            tuple(sorted((network for of, network in leaving if of == pool), key=str)),
        )
        for pool in pools
    }
