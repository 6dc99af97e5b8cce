"""Endpoints as Cilium's metrics.

For:    Metrics. Needs: Endpoints. Gives: families().
Source: Cilium 1.17, cilium_endpoint*, cilium_policy_regeneration*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cells.endpoint.manager import Endpoints
from cells.endpoint.regeneration.builds import Builds
from cells.observe.metrics import Family, counter, gauge, histogram


def families(endpoints: Endpoints) -> Iterator[Family]:
    """How many endpoints there are in which state."""
    there = endpoints.all()
    yield gauge("cilium_endpoint", "Number of endpoints managed by this agent", len(there))
    yield gauge(
        "cilium_endpoint_state",
        "Count of all endpoints, tagged by different endpoint states",
        Counter(endpoints.shown_state(endpoint).value for endpoint in there),
        "endpoint_state",
    )
    yield from _builds(endpoints.builds)


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
