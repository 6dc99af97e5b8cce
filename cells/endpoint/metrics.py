"""Endpoints and identities as Cilium's metrics.

For:    Metrics. Needs: Endpoints, NodePolicy. Gives: families().
Source: Cilium 1.17, cilium_endpoint*, cilium_identity*, cilium_policy_*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from cells.endpoint.builds import Builds
from cells.endpoint.identity import RESERVED_IDENTITIES
from cells.endpoint.manager import Endpoints
from cells.endpoint.policy import NodePolicy
from cells.metrics import Family, counter, gauge, histogram

_ENFORCEMENTS: Final = ("none", "ingress", "egress", "both", "audit-ingress", "audit-egress", "audit-both")


def families(endpoints: Endpoints, policy: NodePolicy) -> Iterator[Family]:
    """How many endpoints there are in which state, and what is enforced for them."""
    there = endpoints.all()
    yield gauge("cilium_endpoint", "Number of endpoints managed by this agent", len(there))
    yield gauge(
        "cilium_endpoint_state",
        "Count of all endpoints, tagged by different endpoint states",
        Counter(endpoints.shown_state(endpoint).value for endpoint in there),
        "endpoint_state",
    )
    enforced = sum(endpoint.enforced for endpoint in there)
    yield gauge(
        "cilium_policy_endpoint_enforcement_status",
        "Number of endpoints labeled by policy enforcement status",
        dict.fromkeys(_ENFORCEMENTS, 0) | {"none": len(there) - enforced, "both": enforced},
        "enforcement",
    )
    yield gauge("cilium_policy_max_revision", "Highest policy revision number in the agent", policy.revision)
    yield from _builds(endpoints.builds)
    identities = endpoints.identities.all()
    reserved = sum(identity.id in RESERVED_IDENTITIES for identity in identities)
    yield gauge(
        "cilium_identity",
        "Number of identities currently allocated",
        {"reserved": reserved, "cluster_local": len(identities) - reserved},
        "type",
    )
    sources = ({label.partition(":")[0] for label in identity.labels} for identity in identities)
    yield gauge(
        "cilium_identity_label_sources",
        "Number of identities which contain at least one label of the given label source",
        Counter(source for each in sources for source in each),
        "source",
    )


def _builds(builds: Builds) -> Iterator[Family]:
    """Regenerations, under the names of both, of endpoints and of their policy, as Cilium still has it.

    Cilium declares the outcome ``failure`` and counts under ``fail``: both are there.
    """
    outcomes = {"success": builds.succeeded, "fail": builds.failed, "failure": 0}
    took = {("total", status): spread for status, spread in builds.took.items() if spread.count}
    yield counter(
        "cilium_endpoint_regenerations_total",
        "Count of all endpoint regenerations that have completed, tagged by outcome",
        outcomes,
        "outcome",
    )
    yield counter(
        "cilium_policy_regeneration_total",
        "Total number of successful policy regenerations",
        builds.succeeded,
    )
    for name, what in (("endpoint_regeneration", "Endpoint"), ("policy_regeneration", "Policy")):
        yield histogram(
            f"cilium_{name}_time_stats_seconds",
            f"{what} regeneration time stats labeled by the scope",
            took,
            "scope status",
        )
