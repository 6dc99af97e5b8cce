"""What services and pools do not say yet.

Needs: Plan, AddressPool.   Gives: ServiceWish, PoolWish, service_wish(), pool_wish().
Source: metav1.Condition; Cilium 1.17, conditions of Services and CiliumLoadBalancerIPPools.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cells.kubernetes import Condition
from cells.operator.lb_ipam.kinds import LoadBalancerPool
from cells.operator.lb_ipam.plan import Grant
from cells.operator.lb_ipam.pools import AddressPool
from cells.operator.lb_ipam.requests import SATISFIED
from cells.operator.objects import ClusterService

CONFLICT = "cilium.io/PoolConflict"
COUNTS = ("cilium.io/IPsTotal", "cilium.io/IPsAvailable", "cilium.io/IPsUsed")


class ServiceWish(msgspec.Struct, frozen=True, gc=False):
    """What the status of a service shall say."""

    namespace: str
    name: str
    uid: str
    addresses: tuple[str, ...]
    condition: tuple[str, str, str] | None
    """Status, reason, message; None takes the condition away."""
    conditioned: bool = True
    """Whether the condition is to be said, or taken away, at all."""


class PoolWish(msgspec.Struct, frozen=True, gc=False):
    """The conditions that a pool shall have, beside those of others."""

    name: str
    uid: str
    generation: int
    conditions: tuple[tuple[str, str, str, str], ...]
    """Type, status, reason, message."""


def service_wish(service: ClusterService, grant: Grant | None) -> ServiceWish | None:
    """What a service does not say yet. Without a grant it is not ours: nothing of us stays there."""
    told = next((one for one in service.status.conditions or () if one.type == SATISFIED), None)
    name, uid = service.name, service.metadata.uid
    if grant is None:
        return None if told is None else ServiceWish(service.namespace, name, uid, (), None)
    addresses = tuple(map(str, grant.addresses))
    condition = ("True" if grant.satisfied else "False", grant.reason, grant.message)
    said = None if told is None else (told.status, told.reason, told.message)
    if addresses == service.addresses and condition == said:
        return None
    return ServiceWish(service.namespace, name, uid, addresses, condition)


def pool_wish(pool: LoadBalancerPool, found: AddressPool | None, used: Mapping[str, int]) -> PoolWish | None:
    """The conditions that a pool does not have yet; one that cannot be read has no addresses."""
    wanted: list[tuple[str, str, str, str]] = []
    numbers = (0, 0, 0)
    if found is not None:
        conflict = ("True", "cidr_overlap", found.conflict) if found.conflict else ("False", "resolved", "")
        wanted.append((CONFLICT, *conflict))
        count = used.get(pool.name, 0)
        reserved = sum(len(one.reserved) for one in found.ranges)
        numbers = (found.size, found.size - reserved - count, count)
    for kind, number in zip(COUNTS, numbers, strict=True):
        wanted.append((kind, "Unknown", "noreason", str(number)))  # beside the first
    told = {one.type: _said(one) for one in pool.status.conditions or ()}
    if all(told.get(one[0]) == one for one in wanted):
        return None
    return PoolWish(pool.name, pool.metadata.uid, pool.metadata.generation, tuple(wanted))


def _said(one: Condition) -> tuple[str, str, str, str]:
    return one.type, one.status, one.reason, one.message
