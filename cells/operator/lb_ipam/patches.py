"""The pending changes of the status of services and pools, and their writers.

Source: metav1.Condition; Cilium 1.17, conditions of Services and CiliumLoadBalancerIPPools.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from cells.kubernetes.objects.kind import Condition, Key, Kind
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.lb_ipam.allocation import (
    SATISFIED,
    AddressPool,
    Grant,
    Plan,
)
from cells.operator.objects import CLUSTER_SERVICES, ClusterService, LoadBalancerPool

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
