"""What garbage collection tells of itself.

For:    the operator's metrics. Needs: EndpointGC, IdentityPasses, Metrics.   Gives: tell().
Source: Cilium 1.17, metrics of the operator; runs and latency are gauges there.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.observe.metrics import Collector, Family, Metrics, counter, gauge
from cells.operator.gc.endpoints import EndpointGC
from cells.operator.gc.passes import IdentityPasses
from lifecycle import Hook, Lifecycle


def tell(metrics: Metrics, endpoints: EndpointGC, identities: IdentityPasses, lifecycle: Lifecycle) -> None:
    """Tell it while this operator leads."""

    async def collect() -> Iterable[Family]:
        return families(endpoints, identities)

    collector = Collector("gc", collect)

    async def start() -> None:
        metrics.add([collector])

    async def stop() -> None:
        metrics.remove([collector])

    lifecycle.append(Hook("report metrics", start, stop))


def families(endpoints: EndpointGC, identities: IdentityPasses) -> list[Family]:
    """All of it."""
    return [
        counter(
            "cilium_operator_endpoint_gc_objects",
            "CiliumEndpoints that were collected.",
            {"success": endpoints.deleted, "fail": endpoints.failed},
            "outcome",
        ),
        gauge(
            "cilium_operator_identity_gc_entries",
            "Identities of the last pass.",
            dict(identities.entries),
            "status identity_type",
        ),
        gauge(
            "cilium_operator_identity_gc_runs",
            "Passes over identities.",
            dict(identities.runs),
            "outcome identity_type",
        ),
        gauge(
            "cilium_operator_identity_gc_latency",
            "Seconds the last pass over identities took.",
            dict(identities.latency),
            "outcome identity_type",
        ),
    ]
