"""Changes what is enforced while the agent runs, and sees to it that policy maps stay what they should be.

For:   PATCH /config.   Needs: NodePolicy, Endpoints, Regenerations, Jobs.   Gives: PolicyEnforcement.
Source: Cilium 1.17, the daemon's configuration and policy-map-full-reconciliation-interval.
"""

from dataclasses import dataclass

import anyio.lowlevel

from cells.endpoint.manager import Endpoints
from cells.endpoint.policy import Enforcement, NodePolicy, PolicySettings
from cells.endpoint.regeneration import Regenerations
from cells.endpoint.states import Level
from lifecycle import Jobs, Logger

STRETCH = 50
"""Endpoints looked at before others get their turn on the event loop: about 5 ms."""


@dataclass(frozen=True, slots=True)
class Enforced:
    """What can be changed while the agent runs."""

    enforcement: Enforcement
    source_ip_verification: bool


class PolicyEnforcement:
    """Makes endpoints follow what is enforced.

    An entry of somebody else in a policy map stays until the next comparison of whole maps.
    """

    def __init__(
        self,
        settings: PolicySettings,
        policy: NodePolicy,
        endpoints: Endpoints,
        regenerations: Regenerations,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._policy = policy
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._log = log
        jobs.timer("policy-map-full-reconciliation", self.reconcile, settings.reconciliation_seconds)

    @property
    def now(self) -> Enforced:
        """What is enforced."""
        return Enforced(self._policy.enforcement, self._policy.source_ip_verification)

    async def change(self, wanted: Enforced) -> list[int]:
        """Enforce this from now on; the endpoints for which that failed, which are tried again.

        Nothing happens when it is enforced already. When it returns, every endpoint's maps say so, or what
        a later change wants.
        """
        if wanted == self.now:
            return []
        policy = self._policy
        policy.enforcement = wanted.enforcement
        policy.source_ip_verification = wanted.source_ip_verification
        policy.revision += 1
        self._log.info(
            "configuration changed",
            enforcement=wanted.enforcement.value,
            source_ip_verification=wanted.source_ip_verification,
            revision=policy.revision,
        )
        reason = "agent configuration update"
        asked = [
            self._regenerations.request(endpoint.id, Level.POLICY, reason)
            for endpoint in self._endpoints.all()
        ]
        wrong = [one.endpoint_id for one in asked if await one.result()]
        return [number for number in wrong if self._endpoints.get(number) is not None]

    async def reconcile(self) -> None:
        """Compare every policy map as a whole, and put right what differs; raises OSError."""
        for position, endpoint in enumerate(self._endpoints.all()):
            wrong = self._endpoints.reconcile_policy(endpoint.id)
            if wrong:
                self._log.warning("policy map was put right", endpoint=endpoint.id, entries=wrong)
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
