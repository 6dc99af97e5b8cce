"""Writes what services and pools do not say yet.

Needs: ClusterAPI.   Gives: ServiceWriter, PoolWriter.
Source: strategic merge patches of Service status: conditions are merged by type, addresses replaced.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cells.kubernetes import Key, api
from cells.operator.api_server import ClusterAPI
from cells.operator.lb_ipam.kinds import LOAD_BALANCER_POOLS
from cells.operator.lb_ipam.requests import SATISFIED
from cells.operator.lb_ipam.wishes import PoolWish, ServiceWish
from cells.operator.objects import CLUSTER_SERVICES
from lifecycle import BatchError

STRATEGIC = b"application/strategic-merge-patch+json"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ServiceWriter:
    """The status of services: a Target."""

    def __init__(self, server: ClusterAPI) -> None:
        self._server = server

    async def dump(self) -> Mapping[Key, ServiceWish]:
        """Nothing: a wish goes away once its service says it."""
        return {}

    async def put(self, batch: Mapping[Key, ServiceWish]) -> None:
        """Write them. Raises BatchError."""
        failures: dict[Key, Exception] = {}
        for key, wish in batch.items():
            try:
                await self._write(wish)
            except api.NotFoundError:
                continue
            except api.ConflictError as error:
                if "uid" not in str(error).lower():
                    failures[key] = error
            except api.KubernetesError as error:
                failures[key] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[Key]) -> None:
        """A wish that is fulfilled, or whose service is gone, leaves nothing to do."""

    async def _write(self, wish: ServiceWish) -> None:
        condition: dict[str, Any] = {"type": SATISFIED, "$patch": "delete"}
        if wish.condition is not None:
            status, reason, message = wish.condition
            condition = {
                "type": SATISFIED,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": _now(),
            }
        ingress = [{"ip": one} for one in wish.addresses] or None
        status_part: dict[str, Any] = {"loadBalancer": {"ingress": ingress}}
        if wish.conditioned:
            status_part["conditions"] = [condition]
        body = {"metadata": {"uid": wish.uid}, "status": status_part}
        path = CLUSTER_SERVICES.path(wish.namespace, wish.name, "status")
        query = {"fieldManager": self._server.client.manager}
        await self._server.client.raw("PATCH", path, query, json.dumps(body).encode(), STRATEGIC)


class PoolWriter:
    """The conditions of pools: a Target."""

    def __init__(self, server: ClusterAPI) -> None:
        self._server = server

    async def dump(self) -> Mapping[str, PoolWish]:
        """Nothing: a wish goes away once its pool says it."""
        return {}

    async def put(self, batch: Mapping[str, PoolWish]) -> None:
        """Write them; conditions of others stay. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name, wish in batch.items():
            try:
                await self._server.client.update(
                    LOAD_BALANCER_POOLS, name, partial(_said, wish), subresource="status"
                )
            except api.NotFoundError:
                continue
            except api.KubernetesError as error:
                failures[name] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """A wish that is fulfilled, or whose pool is gone, leaves nothing to do."""


def _said(wish: PoolWish, live: dict[str, Any]) -> dict[str, Any] | None:
    """The pool with the conditions wished for; None when it is another pool of that name."""
    if live["metadata"]["uid"] != wish.uid:
        return None
    old = {one["type"]: one for one in (live.get("status") or {}).get("conditions") or ()}
    for kind, status, reason, message in wish.conditions:
        before = old.get(kind) or {}
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        old[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since or _now(),
            "observedGeneration": wish.generation,
        }
    return {**live, "status": {**(live.get("status") or {}), "conditions": list(old.values())}}
