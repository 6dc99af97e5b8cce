"""What became of Cilium's policies, written to their ``status.conditions`` at the API server.

Controller: the table ``policies`` in, conditions of type ``Valid`` out. Nothing without an API server.
Needs:  KubernetesAPI, Table[PolicyObject], PolicyRuleSettings.
Why:    whoever applied an object sees it there; ``kubectl get cnp`` shows it as a column.
Source: CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy ``status``; a condition of type Valid, no reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from cells.kubernetes import (
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_NETWORK_POLICIES,
    Kind,
    KubernetesAPI,
)
from cells.policy.control.settings import PolicyRuleSettings
from cells.policy.control.status import PolicyObject
from lifecycle import Change, Hook, Jobs, Lifecycle, Table

KINDS: Final[Mapping[str, Kind[Any]]] = {
    kind.kind: kind for kind in (CILIUM_NETWORK_POLICIES, CILIUM_CLUSTERWIDE_NETWORK_POLICIES)
}
VALID: Final = "Valid"


class ConditionWriter:
    """Writes conditions. Every node of a cluster may: one that is right already is left alone."""

    def __init__(
        self,
        api: KubernetesAPI,
        objects: Table[PolicyObject],
        settings: PolicyRuleSettings,
        *,
        jobs: Jobs,
        lifecycle: Lifecycle,
    ) -> None:
        self._api = api
        self._objects = objects
        self._jobs = jobs
        if settings.validate_network_policy:
            lifecycle.append(Hook("write policies' conditions", self._start))

    async def _start(self) -> None:
        if self._api.enabled:
            self._jobs.observe("policy-conditions", self._objects.changes, self._follow)

    async def _follow(self, changes: list[Change[PolicyObject]]) -> None:
        for change in changes:
            row = change.row
            if row is not None and row.kind in KINDS:
                key = (row.namespace, row.name)
                await self._api.update_status(KINDS[row.kind], key, partial(with_condition, row=row))


def with_condition(live: dict[str, Any], row: PolicyObject) -> dict[str, Any] | None:
    """The object with a condition that says what became of it; None where it says so already."""
    wanted = {"type": VALID, "status": "True" if row.valid else "False", "message": row.text}
    status = live.get("status") or {}
    conditions = status.get("conditions") or []
    held: dict[str, Any] = next((one for one in conditions if one.get("type") == VALID), {})
    if wanted.items() <= held.items():
        return None
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if held.get("status") == wanted["status"] and held.get("lastTransitionTime"):
        since = held["lastTransitionTime"]
    others = [one for one in conditions if one.get("type") != VALID]
    written = [*others, {**wanted, "lastTransitionTime": since}]
    return {**live, "status": {**status, "conditions": written}}
