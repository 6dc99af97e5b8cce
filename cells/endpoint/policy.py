"""What the node allows its endpoints: the enforcement mode, and what follows from it for a policy map.

For:   Endpoints and PolicyEnforcement.   Needs: nothing.   Gives: NodePolicy, PolicySettings, Enforcement.
Source: Cilium 1.17, policy enforcement modes and allow-localhost. No policy can be loaded yet, so what is
allowed is the same for every endpoint.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from cells.endpoint.identity import HOST
from cells.maps import PolicyEntry, PolicyKey
from lifecycle import Duration, Settings, minutes

PolicyEntries = Mapping[PolicyKey, PolicyEntry]

ALLOW_ALL: Final[PolicyEntries] = {
    PolicyKey(identity=0, egress=False): PolicyEntry(),
    PolicyKey(identity=0, egress=True): PolicyEntry(),
}
"""What an endpoint may do where nothing is enforced: everything, in both directions."""

ALLOW_LOCALHOST: Final[PolicyEntries] = {PolicyKey(identity=HOST, egress=False): PolicyEntry()}
"""The node itself may reach the endpoint."""


class Enforcement(StrEnum):
    """When endpoints may do no more than policies allow."""

    DEFAULT = "default"
    """Where a policy selects them."""
    ALWAYS = "always"
    NEVER = "never"


class Localhost(StrEnum):
    """When the node itself may reach its endpoints, whatever is enforced."""

    AUTO = "auto"
    """Always with Kubernetes, whose kubelet probes pods; else as policies say."""
    ALWAYS = "always"
    POLICY = "policy"


class PolicySettings(Settings, frozen=True):
    """What endpoints may do."""

    enable_policy: Enforcement = Enforcement.DEFAULT
    """Whether endpoints may do only what policies allow: where one selects them (default), always, never."""

    allow_localhost: Localhost = Localhost.AUTO
    """Whether the node may always reach its endpoints, or as policies say; auto is always with Kubernetes."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""

    policy_map_full_reconciliation_interval: Duration = minutes(15)
    """How often whole policy maps are compared with what should be in them; 0 never does."""

    def validate(self) -> None:
        """Refuse an interval that cannot be; raises ValueError with one line."""
        if self.policy_map_full_reconciliation_interval < 0:
            raise ValueError(
                f"policy-map-full-reconciliation-interval={self.policy_map_full_reconciliation_interval}:"
                " expected 0 or more"
            )

    @property
    def reconciliation_seconds(self) -> float:
        """Seconds between two comparisons; infinite when there are none."""
        return float(self.policy_map_full_reconciliation_interval) or math.inf


class NodePolicy:
    """What is enforced at the moment, and since which revision."""

    def __init__(self, settings: PolicySettings) -> None:
        self._localhost = settings.allow_localhost is Localhost.ALWAYS  # there is no Kubernetes yet
        self.enforcement = settings.enable_policy
        self.source_ip_verification = settings.enable_source_ip_verification
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        self.revision = 1
        """Grows with every change; an endpoint has the revision it was last made right for."""

    @property
    def enforced(self) -> bool:
        """Whether endpoints may do only what is allowed expressly."""
        return self.enforcement is Enforcement.ALWAYS

    def entries(self) -> PolicyEntries:
        """What belongs in the policy map of an endpoint."""
        if not self.enforced:
            return ALLOW_ALL
        return ALLOW_LOCALHOST if self._localhost else {}
