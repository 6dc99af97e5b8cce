"""CiliumEndpointSlices: the endpoints of a namespace in batches, which agents read instead of each of them.

Controller: CiliumEndpoints in, the table ``endpoint-slices`` out: which endpoint is in which slice.
Reconciler: that table in, CiliumEndpointSlices out, made, changed and deleted at a limited rate.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, SliceSettings, the table.   Gives: EndpointSlices.
Why:        thousands of nodes that each follow every endpoint are more than an API server bears.
"""

from cells.operator.api_server import ClusterAPI
from cells.operator.endpoint_slices.service import EndpointSlices
from cells.operator.endpoint_slices.settings import SliceSettings
from cells.operator.endpoint_slices.slices import SliceRow
from cells.operator.endpoint_slices.writer import SliceWriter
from lifecycle import Jobs, Reconciler, Table, config, invoke, minutes, module, provide

__all__ = ["EndpointSlices", "SliceRow", "SliceSettings", "cell"]

AGAIN = minutes(1)
"""How often slices are compared with what they should hold."""


def slice_rows() -> Table[SliceRow]:
    """What each slice should hold, by name."""
    return Table("endpoint-slices", key=lambda one: one.name)


def write(server: ClusterAPI, rows: Table[SliceRow], slices: EndpointSlices, jobs: Jobs) -> None:
    """Have slices written, where there are any."""
    if slices.active:
        writer = SliceWriter(server, slices.live, slices.limit)
        jobs.observe("write", Reconciler(rows, writer, full_every=AGAIN))


cell = module(
    "endpoint-slices",
    "CiliumEndpoints in batches",
    config(SliceSettings),
    provide(slice_rows, EndpointSlices),
    invoke(write),
)
