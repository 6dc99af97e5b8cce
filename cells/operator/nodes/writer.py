"""Writes taints and the condition of nodes.

Needs: ClusterAPI.   Gives: MarkWriter.
Source: Cilium 1.17: a JSON patch that first tests that the taints are still those that were read, so that
        nobody else's taint is lost; then the condition, merged by its type.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from cells.kubernetes import NODES, api
from cells.operator.api_server import ClusterAPI
from cells.operator.nodes.marks import IS_UP, UNAVAILABLE, NodeMark
from lifecycle import BatchError

MERGE = b"application/strategic-merge-patch+json"


class MarkWriter:
    """Nodes, as far as the operator writes them: a Target."""

    def __init__(self, server: ClusterAPI, taint: str) -> None:
        self._server = server
        self._taint = taint

    async def dump(self) -> Mapping[str, NodeMark]:
        """Nothing: a mark goes away once its node says it."""
        return {}

    async def put(self, batch: Mapping[str, NodeMark]) -> None:
        """Write them. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name, mark in batch.items():
            try:
                if mark.untaint or mark.taint:
                    await self._change_taints(mark)
                if mark.available:
                    await self._say_available(mark.name)
            except api.NotFoundError:
                continue
            except api.KubernetesError as error:
                failures[name] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """A mark that is written, or whose node is gone, leaves nothing to do."""

    async def _change_taints(self, mark: NodeMark) -> None:
        live = json.loads(await self._server.client.raw("GET", NODES.path("", mark.name)))
        old: list[dict[str, Any]] = live["spec"].get("taints") or []
        new = [one for one in old if one.get("key") != self._taint]
        if mark.taint:
            new.append({"key": self._taint, "effect": "NoSchedule"})
        if new == old:
            return
        steps: list[dict[str, Any]] = [{"op": "test", "path": "/spec/taints", "value": old}] if old else []
        steps.append({"op": "replace" if old else "add", "path": "/spec/taints", "value": new})
        await self._server.client.patch(NODES, mark.name, steps, how="json")

    async def _say_available(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": UNAVAILABLE,
            "status": "False",
            "reason": IS_UP,
            "message": "Cilium is running on this node",
            "lastTransitionTime": now,
            "lastHeartbeatTime": now,
        }
        body = json.dumps({"status": {"conditions": [condition]}}).encode()
        path = NODES.path("", name, "status")
        query = {"fieldManager": self._server.client.manager}
        await self._server.client.raw("PATCH", path, query, body, MERGE)
