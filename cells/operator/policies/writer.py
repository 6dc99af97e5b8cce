"""Writes verdicts to the status of policies.

Needs: ClusterAPI.   Gives: ConditionWriter, with_condition().
Source: CiliumNetworkPolicy ``status.conditions``; one of type Valid, without a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cells.kubernetes import api
from cells.operator.api_server import ClusterAPI
from cells.operator.policies.verdicts import KINDS, VALID, PolicyVerdict
from lifecycle import BatchError


class ConditionWriter:
    """The conditions of policies: a Target."""

    def __init__(self, server: ClusterAPI) -> None:
        self._server = server

    async def dump(self) -> Mapping[tuple[str, str, str], PolicyVerdict]:
        """Nothing: a verdict goes away once its policy says it."""
        return {}

    async def put(self, batch: Mapping[tuple[str, str, str], PolicyVerdict]) -> None:
        """Write them; conditions of others stay. Raises BatchError."""
        kinds = {kind.kind: kind for kind in KINDS}
        failures: dict[tuple[str, str, str], Exception] = {}
        for key, verdict in batch.items():
            change = partial(with_condition, verdict)
            try:
                await self._server.client.update(
                    kinds[verdict.kind], verdict.name, change, verdict.namespace, subresource="status"
                )
            except api.NotFoundError:
                continue
            except api.KubernetesError as error:
                failures[key] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[tuple[str, str, str]]) -> None:
        """A verdict that is told, or whose policy is gone, leaves nothing to do."""


def with_condition(verdict: PolicyVerdict, live: dict[str, Any]) -> dict[str, Any] | None:
    """The object with its condition; None where it says so already, or is another one of that name."""
    if live["metadata"].get("uid") != verdict.uid:
        return None
    wanted = {"type": VALID, "status": str(verdict.valid), "message": verdict.message}
    status = live.get("status") or {}
    conditions = status.get("conditions") or []
    held: dict[str, Any] = next((one for one in conditions if one.get("type") == VALID), {})
    if wanted.items() <= held.items():
        return None
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if held.get("status") == wanted["status"] and held.get("lastTransitionTime"):
        since = held["lastTransitionTime"]
    written = {**wanted, "lastTransitionTime": since}
    told = [written if one is held else one for one in conditions]
    return {**live, "status": {**status, "conditions": told if held else [*told, written]}}
