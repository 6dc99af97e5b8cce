"""Policies as Cilium's metrics.

For:    Metrics. Needs: EndpointPolicies. Gives: families().
Source: Cilium 1.17, cilium_policy_*.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from cells.observe.metrics import Family, gauge
from cells.policy.maps.endpoint_policies import EndpointPolicies
from cells.policy.maps.rows import enforced_directions

_ENFORCEMENTS: Final = ("none", "ingress", "egress", "both", "audit-ingress", "audit-egress", "audit-both")


def families(policies: EndpointPolicies, *, audited: bool) -> Iterator[Family]:
    """What is enforced for how many endpoints, and by which rules."""
    counted = Counter(enforced_directions(policy, audited=audited) for policy in policies.realized.all())
    yield gauge(
        "cilium_policy_endpoint_enforcement_status",
        "Number of endpoints labeled by policy enforcement status",
        dict.fromkeys(_ENFORCEMENTS, 0) | counted,
        "enforcement",
    )
    yield gauge(
        "cilium_policy_max_revision", "Highest policy revision number in the agent", policies.revision
    )
