"""What cannot be followed of a CiliumL2AnnouncementPolicy, written to its ``status.conditions``.

Controller: the table of policies in, conditions out; one is only made for a fault, and becomes False once
            that is mended.
Needs:  KubernetesAPI, Resources, AnnouncementSettings.   Gives: PolicyConditions.
Source: Cilium 1.17: types io.cilium/bad-…, reason error. Agents may patch that status, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cells.kubernetes import (
    CILIUM_L2_ANNOUNCEMENTS,
    CiliumL2AnnouncementPolicy,
    Condition,
    KubernetesAPI,
    Resources,
)
from cells.services.announcements.policies import FAULTS, read_policy
from cells.services.settings import AnnouncementSettings
from lifecycle import Change, Jobs, Logger

REASON = "error"


class PolicyConditions:
    """Writes conditions. Every node may: what is right already is left alone."""

    def __init__(
        self,
        settings: AnnouncementSettings,
        api: KubernetesAPI,
        resources: Resources,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._api = api
        self._log = log
        if settings.enable_l2_announcements:
            jobs.observe("conditions", resources.table(CILIUM_L2_ANNOUNCEMENTS).changes, self._follow)

    async def _follow(self, changes: list[Change[CiliumL2AnnouncementPolicy]]) -> None:
        for change in changes:
            if change.row is not None:
                await self._write(change.row)

    async def _write(self, policy: CiliumL2AnnouncementPolicy) -> None:
        from cells.kubernetes import api  # loaded where there is a server

        _, faults = read_policy(policy)
        for kind, text in faults.items():
            wrong = f"{kind}: {text}"
            self._log.warning("an announcement policy cannot be followed", policy=policy.name, error=wrong)
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        wanted = conditions(policy, faults, now)
        if wanted is None:
            return
        await self._api.reachable()
        body = {"status": {"conditions": wanted}}
        try:
            await self._api.client.patch(CILIUM_L2_ANNOUNCEMENTS, policy.name, body, subresource="status")
        except api.NotFoundError:
            return


def conditions(
    policy: CiliumL2AnnouncementPolicy, faults: Mapping[str, str], now: str
) -> list[dict[str, Any]] | None:
    """All conditions as they should be; None where they are. ``faults``: texts by type; ``now``: RFC 3339."""
    held = {each.type: each for each in policy.status.conditions or ()}
    wanted = dict(held)
    for kind in FAULTS:
        before = held.get(kind)
        if before is None and kind not in faults:
            continue
        status, text = ("True" if kind in faults else "False"), faults.get(kind, "")
        if before is None or (before.status, before.message) != (status, text):
            since = before.last_transition_time if before is not None and before.status == status else now
            wanted[kind] = Condition(kind, status, REASON, text, since, policy.metadata.generation)
    if wanted == held:
        return None
    return [
        {
            "type": each.type,
            "status": each.status,
            "reason": each.reason,
            "message": each.message,
            "lastTransitionTime": each.last_transition_time or now,
            "observedGeneration": each.observed_generation,
        }
        for each in wanted.values()
    ]
