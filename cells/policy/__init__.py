"""Settings of network policy: enforcement mode, access from the node, and reconciliation of policy maps.

Source: Cilium 1.17, ``enable-policy``, ``allow-localhost``, ``enable-host-firewall``,
``policy-map-full-reconciliation-interval``.
"""

import math
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from lifecycle import Duration, Settings, minutes


class Enforcement(StrEnum):
    """Policy enforcement mode: when traffic that no policy allows is denied."""

    DEFAULT = "default"
    """For endpoints that a policy selects, in the directions of the policy."""
    ALWAYS = "always"
    NEVER = "never"


class Localhost(StrEnum):
    """When the node may reach its own endpoints without a policy that allows it."""

    AUTO = "auto"
    """Always with Kubernetes, where the kubelet probes pods; else only if a policy allows it."""
    ALWAYS = "always"
    POLICY = "policy"


class PolicySettings(Settings, frozen=True):
    """Settings of policy enforcement."""

    enable_policy: Enforcement = Enforcement.DEFAULT
    """When traffic is denied unless a policy allows it: for endpoints that a policy selects (default),
    always, never.
    """

    allow_localhost: Localhost = Localhost.AUTO
    """When the node may reach its endpoints: always, or as policies allow (policy); auto: always with
    Kubernetes.
    """

    enable_host_firewall: bool = False
    """Enforce policies with a nodeSelector on the node itself."""


class PolicyMapSettings(Settings, frozen=True):
    """Settings of the reconciliation and the overflow of policy maps."""

    policy_map_full_reconciliation_interval: Annotated[Duration, Meta(ge=0)] = minutes(15)
    """Interval between comparisons of whole policy maps with their desired entries; 0: never."""

    enable_endpoint_lockdown_on_policy_overflow: bool = False
    """Deny all traffic of an endpoint if its policy map overflows, instead of writing the entries that fit.
    """

    @property
    def reconciliation_seconds(self) -> float:
        """The interval between comparisons in seconds; infinite if they are disabled."""
        return float(self.policy_map_full_reconciliation_interval) or math.inf
