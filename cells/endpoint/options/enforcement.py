"""Changes what is enforced while the agent runs, and has endpoints follow.

For:   PATCH /config.   Needs: NodePolicy, Endpoints, Regenerations.   Gives: PolicyEnforcement.
Source: Cilium 1.17, the daemon's configuration.
"""

import msgspec

from cells.endpoint.manager import Endpoints
from cells.endpoint.regeneration.queue import Regenerations
from cells.endpoint.table.states import Level
from cells.policy.maps import Enforcement, NodePolicy
from lifecycle import Logger


class Enforced(msgspec.Struct, frozen=True):
    """What can be changed while the agent runs."""

    enforcement: Enforcement
    source_ip_verification: bool


class PolicyEnforcement:
    """Makes endpoints follow what is enforced."""

    def __init__(
        self, policy: NodePolicy, endpoints: Endpoints, regenerations: Regenerations, log: Logger
    ) -> None:
        self._policy = policy
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._log = log

    @property
    def now(self) -> Enforced:
        """What is enforced."""
        return Enforced(self._policy.enforcement, self._endpoints.source_ip_verification)

    def refusal(self, wanted: Enforced) -> str:
        """Why this cannot be enforced now, in one line; empty when it can.

        Restored endpoints keep their policies until all rules are known, in whichever mode: without the rules
        nobody can tell what a mode leaves open.
        """
        policies = self._endpoints.policies
        keeping = sum(policies.awaits_rules(endpoint.id) for endpoint in self._endpoints.all())
        if wanted.enforcement is self.now.enforcement or not keeping:
            return ""
        return (
            f"policy enforcement is not changed: {keeping} restored endpoints keep their policies"
            f" until these are known: {policies.unknown_rules()}; ask again then"
        )

    async def change(self, wanted: Enforced) -> list[int]:
        """Enforce this from now on; the endpoints for which that failed, which are tried again.

        Nothing happens when it is enforced already; refusal() was asked before. When it returns, every
        endpoint's maps say so, or what a later change wants.
        """
        if wanted == self.now:
            return []
        self._endpoints.source_ip_verification = wanted.source_ip_verification
        self._policy.enforce(wanted.enforcement)
        self._log.info(
            "configuration changed",
            enforcement=wanted.enforcement.value,
            source_ip_verification=wanted.source_ip_verification,
            revision=self._policy.revision,
        )
        reason = "agent configuration update"
        asked = [
            self._regenerations.request(endpoint.id, Level.POLICY, reason)
            for endpoint in self._endpoints.all()
        ]
        wrong = [one.endpoint_id for one in asked if await one.result()]
        return [number for number in wrong if self._endpoints.get(number) is not None]
