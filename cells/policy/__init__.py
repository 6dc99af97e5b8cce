"""Policy: which peers an endpoint may talk to, and when endpoints may do no more than policies allow."""

import math
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from lifecycle import Duration, Settings, minutes

# When endpoints may do no more than policies allow.
#
# Source: Cilium 1.17, policy enforcement modes, allow-localhost, policy-map-full-reconciliation-interval.


class Enforcement(StrEnum):
    """When endpoints may do no more than policies allow."""

    DEFAULT = "default"
    """Where a policy selects them."""
    ALWAYS = "always"
    NEVER = "never"


class Localhost(StrEnum):
    """When the node itself may reach its endpoints, whatever is enforced."""

    AUTO = "auto"
    """Always with Kubernetes, where the kubelet probes pods; else by policies."""
    ALWAYS = "always"
    POLICY = "policy"


class PolicySettings(Settings, frozen=True):
    """What endpoints may do."""

    enable_policy: Enforcement = Enforcement.DEFAULT
    """Whether endpoints may do only what policies allow: where one selects them (default), always, never."""

    allow_localhost: Localhost = Localhost.AUTO
    """Whether the node may always reach its endpoints, or only as policies say; auto: always with
    Kubernetes."""

    enable_host_firewall: bool = False
    """Enforce policies with a nodeSelector on the node itself."""


class PolicyMapSettings(Settings, frozen=True):
    """How policy maps are written."""

    policy_map_full_reconciliation_interval: Annotated[Duration, Meta(ge=0)] = minutes(15)
    """How often whole policy maps are compared with what they should hold; 0: never."""

    enable_endpoint_lockdown_on_policy_overflow: bool = False
    """Deny all traffic of an endpoint if its policy map overflows, instead of writing what fits."""

    @property
    def reconciliation_seconds(self) -> float:
        """Seconds between two comparisons; infinite when there are none."""
        return float(self.policy_map_full_reconciliation_interval) or math.inf
