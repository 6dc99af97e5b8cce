"""CiliumEndpointSlices: the endpoints of a namespace in batches, which agents read instead of each of them.

Controller: CiliumEndpoints in, the table ``endpoint-slices`` out: which endpoint is in which slice.
Reconciler: that table in, CiliumEndpointSlices out, made, changed and deleted at a limited rate.
            Those of namespaces with ``cilium.io/ces-namespace: priority`` do not wait for the others.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, SliceSettings, the table.   Gives: EndpointSlices.
Why:        thousands of nodes that each follow every endpoint are more than an API server bears.
"""

from cells.observe.metrics import Metrics
from cells.operator.api_server import ClusterAPI
from cells.operator.endpoint_slices.metrics import SliceCounts, tell
from cells.operator.endpoint_slices.service import EndpointSlices
from cells.operator.endpoint_slices.settings import SliceSettings
from cells.operator.endpoint_slices.slices import SliceRow
from cells.operator.endpoint_slices.writer import SliceLimit, SliceWriter
from lifecycle import Jobs, Lifecycle, Reconciler, Table, config, invoke, minutes, module, provide

__all__ = ["EndpointSlices", "SliceRow", "SliceSettings", "cell"]

AGAIN = minutes(1)
"""How often slices are compared with what they should hold."""


def slice_rows() -> Table[SliceRow]:
    """What each slice should hold, by name."""
    return Table("endpoint-slices", key=lambda one: one.name)


def write(
    server: ClusterAPI,
    rows: Table[SliceRow],
    slices: EndpointSlices,
    metrics: Metrics,
    lifecycle: Lifecycle,
    jobs: Jobs,
) -> None:
    """Have slices written, where there are any: those that go first, and beside them the others."""
    if not slices.active:
        return
    limit, counts = SliceLimit(slices.limit), SliceCounts()
    for first, name in ((True, "first"), (False, "others")):
        writer = SliceWriter(server, slices, rows, limit, counts, first=first)
        part = rows.filter(_goes_first if first else _waits, name=f"endpoint-slices-{name}")
        jobs.observe(f"write-{name}", Reconciler(part, writer, full_every=AGAIN))
    tell(metrics, counts, lifecycle)


def _goes_first(row: SliceRow) -> bool:
    return row.priority


def _waits(row: SliceRow) -> bool:
    return not row.priority


cell = module(
    "endpoint-slices",
    "CiliumEndpoints in batches",
    config(SliceSettings),
    provide(slice_rows, EndpointSlices),
    invoke(write),
)
