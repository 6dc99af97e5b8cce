"""Changes what is enforced while the agent runs, and sees to it that policy maps stay what they should be.

For:   PATCH /config.   Needs: NodePolicy, Endpoints, Jobs.   Gives: PolicyEnforcement.
Source: Cilium 1.17, the daemon's configuration and policy-map-full-reconciliation-interval.
"""

from dataclasses import dataclass

import anyio.lowlevel

from cells.endpoint.manager import Endpoints
from cells.endpoint.policy import Enforcement, NodePolicy, PolicySettings
from lifecycle import Jobs, Logger

STRETCH = 50
"""Endpoints changed before others get their turn on the event loop: about 5 ms."""


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
        self, settings: PolicySettings, policy: NodePolicy, endpoints: Endpoints, jobs: Jobs, log: Logger
    ) -> None:
        self._policy = policy
        self._endpoints = endpoints
        self._log = log
        jobs.timer("policy-map-full-reconciliation", self.reconcile, settings.reconciliation_seconds)

    @property
    def now(self) -> Enforced:
        """What is enforced."""
        return Enforced(self._policy.enforcement, self._policy.source_ip_verification)

    async def change(self, wanted: Enforced) -> list[int]:
        """Enforce this from now on; the endpoints for which that failed, which are tried again.

        Nothing happens when it is enforced already. When it returns, every endpoint's maps say so, unless
        a later change has taken over.
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
        revision, failed = policy.revision, []
        for position, endpoint in enumerate(self._endpoints.all()):
            applied = self._endpoints.apply_policy(endpoint.id, "agent configuration update")
            if not applied and self._endpoints.get(endpoint.id) is not None:
                failed.append(endpoint.id)
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
                if policy.revision != revision:
                    break
        return failed

    async def reconcile(self) -> None:
        """Compare every policy map as a whole, and put right what differs; raises OSError."""
        for position, endpoint in enumerate(self._endpoints.all()):
            wrong = self._endpoints.reconcile_policy(endpoint.id)
            if wrong:
                self._log.warning("policy map was put right", endpoint=endpoint.id, entries=wrong)
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
