"""What every endpoint may do by the enforcement mode alone: the computer while no policy can be loaded.

For:    EndpointPolicies. Needs: PolicySettings. Gives: NodePolicy.
Source: Cilium 1.17, policy enforcement modes and allow-localhost.
"""

from collections.abc import Collection, Iterable

from cells.cluster.identity import Identity
from cells.policy.maps.edges import NO_POD, PodKey
from cells.policy.maps.rows import ALLOW_ALL, ALLOW_LOCALHOST, EndpointPolicy, PolicyEntries
from cells.policy.maps.settings import Enforcement, Localhost, PolicySettings


class NodePolicy:
    """The enforcement mode, and since which revision it is in force."""

    def __init__(self, settings: PolicySettings) -> None:
        self._localhost = settings.allow_localhost is Localhost.ALWAYS  # there is no Kubernetes yet
        self._enforcement = settings.enable_policy
        self._revision = 1

    @property
    def revision(self) -> int:
        """Grows with every change of the mode."""
        return self._revision

    @property
    def enforcement(self) -> Enforcement:
        """The mode."""
        return self._enforcement

    def enforce(self, mode: Enforcement) -> None:
        """From now on. Policies are computed anew when they are asked for."""
        self._enforcement = mode
        self._revision += 1

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """The same for every endpoint."""
        del identity, labels, pod
        enforced = self._enforcement is Enforcement.ALWAYS
        return EndpointPolicy(
            endpoint_id=endpoint_id,
            revision=self._revision,
            ingress_enforced=enforced,
            egress_enforced=enforced,
            entries=self._entries(),
        )

    def know(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """No policy of the mode alone tells identities apart."""
        del identities
        return []

    def forget(self, endpoint_id: int) -> None:
        """No endpoint is known here."""

    def _entries(self) -> PolicyEntries:
        if self._enforcement is not Enforcement.ALWAYS:
            return ALLOW_ALL
        return ALLOW_LOCALHOST if self._localhost else {}
