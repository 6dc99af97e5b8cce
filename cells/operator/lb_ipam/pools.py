"""LB-IPAM's pools, the plan of addresses, and the pending status of pools and services.

Source: Cilium 1.17, CiliumLoadBalancerIPPool of group cilium.io, version v2alpha1; metav1.Condition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final

import msgspec

from cells.base.addresses import SpanIndex
from cells.kubernetes.objects.kind import Condition, Key, Kind, LabelSelector
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.objects import CLUSTER_SERVICES, ClusterService, LoadBalancerPool, PoolBlock
from lifecycle import Table

# Pools of addresses: their ranges and conflicts.
#
# Source: Cilium 1.17, CiliumLoadBalancerIPPool: blocks are networks or ranges. Of two overlapping pools the
#         newer one is in conflict and allocates no addresses; its allocated addresses stay. A pool that is in
#         conflict puts no other in conflict.

Address = IPv4Address | IPv6Address


class PoolRange(msgspec.Struct, frozen=True):
    """The addresses from first to last."""

    first: Address
    last: Address
    reserved: frozenset[Address] = frozenset()
    """Addresses that are not allocated: network and broadcast address, with allowFirstLastIPs "No"."""

    @property
    def size(self) -> int:
        """Number of addresses."""
        return int(self.last) - int(self.first) + 1

    def __str__(self) -> str:
        return f"{self.first} - {self.last}"


class AddressPool(msgspec.Struct, frozen=True):
    """A valid pool."""

    name: str
    ranges: tuple[PoolRange, ...]
    selector: LabelSelector | None
    disabled: bool
    conflict: str = ""
    """Why it allocates no addresses: the message of its condition; empty without a conflict."""
    order: tuple[int, ...] = ()
    """The order of its ranges among those of all pools; empty: by pool and position."""

    @property
    def allocatable(self) -> bool:
        """Whether addresses can be allocated from it."""
        return not self.disabled and not self.conflict

    @property
    def size(self) -> int:
        """Number of addresses."""
        return sum(one.size for one in self.ranges)


def ranges_of(pool: LoadBalancerPool) -> tuple[PoolRange, ...]:
    """Return the ranges of a pool. Raises ValueError for an invalid block."""
    reserve = pool.spec.allow_first_last_ips == "No"
    return tuple(_range(block, reserve=reserve) for block in pool.spec.blocks or ())


def _range(block: PoolBlock, *, reserve: bool) -> PoolRange:
    if block.cidr:
        network = ip_network(block.cidr, strict=False)
        first, last = network.network_address, network.broadcast_address
        small = network.max_prefixlen - network.prefixlen < 2
        return PoolRange(first, last, frozenset({first, last}) if reserve and not small else frozenset())
    if not block.start:
        raise ValueError("block: expected cidr or start")
    first, last = ip_address(block.start), ip_address(block.stop or block.start)
    if first.version != last.version or int(first) > int(last):
        raise ValueError(f"block {first} - {last}: expected two addresses of one family, the lower one first")
    return PoolRange(first, last)


def address_pools(pools: Iterable[LoadBalancerPool]) -> tuple[list[AddressPool], dict[str, str]]:
    """Return all valid pools, oldest first, and the errors of the others by name."""
    valid: list[tuple[LoadBalancerPool, tuple[PoolRange, ...]]] = []
    broken: dict[str, str] = {}
    for pool in sorted(pools, key=lambda one: (one.metadata.creation_timestamp, one.name)):
        try:
            valid.append((pool, ranges_of(pool)))
        except ValueError as error:
            broken[pool.name] = str(error)
    index, found = index_of(ranges for _, ranges in valid), list[AddressPool]()
    for number, (pool, ranges) in enumerate(valid):
        conflict = next(_conflicts(pool.name, number, ranges, index, found), "")
        found.append(AddressPool(pool.name, ranges, pool.spec.service_selector, pool.spec.disabled, conflict))
    return found, broken


def _conflicts(
    name: str, number: int, ranges: Sequence[PoolRange], index: PoolIndex, older: Sequence[AddressPool]
) -> Iterator[str]:
    """Yield the messages of a pool's ranges that overlap earlier ones of it or of older valid pools."""
    for at, mine in enumerate(ranges):
        for of, place, other in index.overlapping(mine.first, mine.last):
            if (of, place) >= (number, at):
                break
            if of == number:
                yield _overlap(other, mine, name)
            elif not older[of].conflict:
                yield _overlap(mine, other, older[of].name)


def _overlap(one: PoolRange, other: PoolRange, pool: str) -> str:
    return f"Pool conflicts since range '{one}' overlaps range '{other}' from IP Pool '{pool}'"


PoolIndex = SpanIndex[tuple[int, int, PoolRange]]
"""Ranges with the number of their pool, and their position in it."""


def index_of(pools: Iterable[Sequence[PoolRange]]) -> PoolIndex:
    """Index the ranges of pools."""
    return SpanIndex(
        (one.first, one.last, (number, at, one))
        for number, ranges in enumerate(pools)
        for at, one in enumerate(ranges)
    )


# The plan.


class Grant(msgspec.Struct, frozen=True):
    """A service's addresses, and the condition of its request."""

    addresses: tuple[Address, ...]
    reason: str = "satisfied"
    message: str = ""

    @property
    def satisfied(self) -> bool:
        """Whether all requested addresses are allocated."""
        return self.reason == "satisfied"


class Plan(msgspec.Struct, frozen=True):
    """The grants of all services, and numbers of addresses per pool."""

    grants: Mapping[Key, Grant]
    used: Mapping[str, int]
    """Allocated addresses."""
    reserved: Mapping[str, int]
    """Addresses that are neither allocated nor allocatable."""

    def available(self, pool: AddressPool) -> int:
        """Return the number of allocatable addresses of a pool."""
        return pool.size - self.used.get(pool.name, 0) - self.reserved.get(pool.name, 0)


NO_PLAN: Final = Plan({}, {}, {})


# The pending status of pools and services.

SATISFIED: Final = "cilium.io/IPAMRequestSatisfied"
CONFLICT = "cilium.io/PoolConflict"
COUNTS = ("cilium.io/IPsTotal", "cilium.io/IPsAvailable", "cilium.io/IPsUsed")


class ServicePatch(msgspec.Struct, frozen=True, gc=False):
    """The desired status of a service."""

    namespace: str
    name: str
    uid: str
    addresses: tuple[str, ...]
    condition: tuple[str, str, str] | None
    """Status, reason, message; None removes the condition."""
    conditioned: bool = True
    """Whether the condition is set or removed; false leaves it unchanged."""


class ConditionsPatch(msgspec.Struct, frozen=True, gc=False):
    """The desired conditions of a cluster-scoped object; conditions of other types are unchanged."""

    name: str
    uid: str
    generation: int
    conditions: tuple[tuple[str, str, str, str], ...]
    """Type, status, reason, message."""
    removed: frozenset[str] = frozenset()
    """Types of conditions to remove."""


def service_patch(service: ClusterService, grant: Grant | None) -> ServicePatch | None:
    """Return the pending change of a service, or None.

    Without a grant the service is not served: its condition is removed.
    """
    condition_now = next((one for one in service.status.conditions or () if one.type == SATISFIED), None)
    name, uid = service.name, service.metadata.uid
    if grant is None:
        return None if condition_now is None else ServicePatch(service.namespace, name, uid, (), None)
    addresses = tuple(map(str, grant.addresses))
    condition = ("True" if grant.satisfied else "False", grant.reason, grant.message)
    current = (
        None if condition_now is None else (condition_now.status, condition_now.reason, condition_now.message)
    )
    if addresses == service.addresses and condition == current:
        return None
    return ServicePatch(service.namespace, name, uid, addresses, condition)


def pool_patch(pool: LoadBalancerPool, found: AddressPool | None, plan: Plan) -> ConditionsPatch | None:
    """Return the pending conditions of a pool, or None; an invalid pool has no addresses.

    As Cilium's, the numbers are of the pool's current generation, a conflict is of the generation in which it
    began or ended.
    """
    now = {one.type: one for one in pool.status.conditions or ()}
    generation = pool.metadata.generation
    changed: list[tuple[str, str, str, str]] = []
    numbers = (0, 0, 0)
    if found is not None:
        conflict = ("True", "cidr_overlap", found.conflict) if found.conflict else ("False", "resolved", "")
        if _values(now.get(CONFLICT)) != conflict:
            changed.append((CONFLICT, *conflict))
        numbers = (found.size, plan.available(found), plan.used.get(pool.name, 0))
    for kind, number in zip(COUNTS, numbers, strict=True):
        values, before = ("Unknown", "noreason", str(number)), now.get(kind)
        if before is None or _values(before) != values or before.observed_generation != generation:
            changed.append((kind, *values))
    return ConditionsPatch(pool.name, pool.metadata.uid, generation, tuple(changed)) if changed else None


def _values(one: Condition | None) -> tuple[str, str, str] | None:
    return None if one is None else (one.status, one.reason, one.message)


# Writes the pending changes of services and pools.
#
# Source: strategic merge patches of a service's status: conditions are merged by type, addresses replaced.

STRATEGIC = b"application/strategic-merge-patch+json"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ServiceWriter(ObjectWriter[Key, ServicePatch]):
    """Writes the status of services."""

    async def write(self, patch: ServicePatch) -> None:
        """See ObjectWriter."""
        condition: dict[str, Any] = {"type": SATISFIED, "$patch": "delete"}
        if patch.condition is not None:
            status, reason, message = patch.condition
            condition = {
                "type": SATISFIED,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": _now(),
            }
        ingress = [{"ip": one} for one in patch.addresses] or None
        status_part: dict[str, Any] = {"loadBalancer": {"ingress": ingress}}
        if patch.conditioned:
            status_part["conditions"] = [condition]
        body = {"metadata": {"uid": patch.uid}, "status": status_part}
        path = CLUSTER_SERVICES.path(patch.namespace, patch.name, "status")
        query = {"fieldManager": self.server.client.manager}
        await self.server.client.raw("PATCH", path, query, json.dumps(body).encode(), STRATEGIC)


class ConditionsWriter(ObjectWriter[str, ConditionsPatch]):
    """Writes conditions of cluster-scoped objects of one kind; conditions of other types are unchanged."""

    def __init__(self, server: ClusterAPI, kind: Kind[Any]) -> None:
        super().__init__(server)
        self._kind = kind

    async def write(self, patch: ConditionsPatch) -> None:
        """See ObjectWriter."""
        change = partial(_with_conditions, patch)
        await self.server.client.update(self._kind, patch.name, change, subresource="status")


def _with_conditions(patch: ConditionsPatch, live: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object with the desired conditions, or None if it was recreated."""
    if live["metadata"]["uid"] != patch.uid:
        return None
    old = {one["type"]: one for one in (live.get("status") or {}).get("conditions") or ()}
    for kind, status, reason, message in patch.conditions:
        before = old.get(kind) or {}
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        old[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since or _now(),
            "observedGeneration": patch.generation,
        }
    held = [one for kind, one in old.items() if kind not in patch.removed]
    return {**live, "status": {**(live.get("status") or {}), "conditions": held}}


# Tables of the pending changes.


def service_patches() -> Table[tuple[str, str], ServicePatch]:
    """Create the table of pending changes of services, by namespace and name."""
    return Table("lb-service-annotations", key=lambda one: (one.namespace, one.name))


def pool_patches() -> Table[str, ConditionsPatch]:
    """Create the table of pending changes of pools, by name."""
    return Table("lb-pool-requests", key=lambda one: one.name)
