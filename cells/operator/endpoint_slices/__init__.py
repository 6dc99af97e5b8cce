"""CiliumEndpointSlices: batches of a namespace's endpoints, which agents read instead of CiliumEndpoints.

Table ``endpoint-slices``: the desired slices, computed from CiliumEndpoints. A reconciler writes them at a
limited rate. Slices of namespaces with ``cilium.io/ces-namespace: priority`` are written by a second one,
ahead of the others.

Slices reduce the load of the API server: with thousands of nodes, each would watch every endpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Literal

import msgspec

from cells.base.metrics import Collector, Histogram, MetricFamily, counter, histogram
from cells.kubernetes.client.calls import Bucket
from cells.kubernetes.client.errors import ConflictError, KubernetesError, NotFoundError
from cells.kubernetes.objects.cilium_endpoint import CILIUM_ENDPOINT_SLICES, CiliumEndpointSlice
from cells.kubernetes.objects.kind import Key
from cells.observe.metrics import Metrics
from cells.operator.api_server import ClusterAPI
from cells.operator.endpoint_slices.slices import EndpointSlices, SliceRow, SliceSettings, WriteLimit
from lifecycle import (
    BatchError,
    Change,
    Jobs,
    Lifecycle,
    ReadTable,
    Reconciler,
    Table,
    Target,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["EndpointSlices", "SliceRow", "SliceSettings", "cell"]


# Metrics of slices.
#
# Source: Cilium 1.17, the operator's metrics of CiliumEndpointSlices.

PREFIX: Final = "cilium_operator"
SIZES: Final = (1, 10, 25, 50, 100, 200, 500, 1000)
DELAYS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 300, 900, 1800, 3600)
Queue = Literal["fast", "standard"]


class SliceCounts:
    """Counters of writes."""

    def __init__(self) -> None:
        self.sizes = Histogram(SIZES)
        """Number of endpoints per written slice."""
        self.changes = {"cepinserted": Histogram(SIZES), "cepremoved": Histogram(SIZES)}
        """Number of endpoints that one write added or removed."""
        self.delays: dict[Queue, Histogram] = {"fast": Histogram(DELAYS), "standard": Histogram(DELAYS)}
        """Seconds from the change of a slice to its write."""
        self.outcomes: Counter[str] = Counter(success=0, fail=0)

    def written(self, before: frozenset[str], after: frozenset[str]) -> None:
        """Count a write that replaces these endpoints by those."""
        self.sizes.observe(len(after))
        self.changes["cepinserted"].observe(len(after - before))
        self.changes["cepremoved"].observe(len(before - after))


def families(counts: SliceCounts) -> list[MetricFamily]:
    """Return the metrics."""
    return [
        histogram(f"{PREFIX}_number_of_ceps_per_ces", "The number of CEPs batched in a CES", counts.sizes),
        histogram(
            f"{PREFIX}_number_of_cep_changes_per_ces",
            "The number of changed CEPs in each CES update",
            counts.changes,
            "opcode",
        ),
        histogram(
            f"{PREFIX}_ces_queueing_delay_seconds",
            "CiliumEndpointSlice queueing delay in seconds",
            counts.delays,
            "queue",
        ),
        counter(
            f"{PREFIX}_ces_sync_total",
            "The number of completed CES syncs by outcome",
            dict(counts.outcomes),
            "outcome",
        ),
    ]


def collect_metrics(metrics: Metrics, counts: SliceCounts, lifecycle: Lifecycle) -> None:
    """Report the metrics while this operator leads."""

    async def collect() -> Iterable[MetricFamily]:
        return families(counts)

    metrics.report(lifecycle, Collector("endpoint-slices", collect))


# Writes CiliumEndpointSlices.


class SliceLimit:
    """The rate limit that both writers share; it depends on the number of nodes."""

    def __init__(self, limit: Callable[[], WriteLimit]) -> None:
        self._limit = limit
        self._limited: tuple[WriteLimit, Bucket] | None = None

    async def wait(self) -> None:
        """Wait until another write is allowed."""
        limit = self._limit()
        if self._limited is None or self._limited[0] != limit:
            self._limited = limit, Bucket(limit.limit, limit.burst)
        await self._limited[1].take()


class SliceWriter(Target[str, SliceRow, SliceRow]):
    """The reconciler's target of one priority's slices."""

    def __init__(
        self,
        server: ClusterAPI,
        slices: EndpointSlices,
        rows: ReadTable[str, SliceRow],
        limit: SliceLimit,
        counts: SliceCounts,
        *,
        first: bool,
    ) -> None:
        self._server = server
        self._slices = slices
        self._rows = rows
        self._limit = limit
        self._counts = counts
        self._first = first

    async def observe(self) -> Mapping[str, SliceRow]:
        """Return the content of each slice."""
        return {
            one.name: SliceRow(one.name, one.of_namespace, one.endpoints, self._first)
            for one in self._slices.live()
            if self._slices.has_priority(one.of_namespace) is self._first
        }

    async def put(self, batch: Mapping[str, SliceRow]) -> None:
        """Create or update slices, at the limited rate. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name, row in batch.items():
            await self._limit.wait()
            since = self._slices.waiting.pop(name, None)
            if since is not None:
                queue = self._counts.delays["fast" if self._first else "standard"]
                queue.observe(time.monotonic() - since)
            held = self._slices.find(name)
            before = frozenset(one.name for one in held.endpoints) if held is not None else frozenset()
            try:
                await self._write(row)
            except KubernetesError as error:
                failures[name] = error
            else:
                self._counts.written(before, frozenset(one.name for one in row.endpoints))
        self._count(len(batch), failures)

    async def drop(self, batch: Collection[str]) -> None:
        """Delete slices, except those of namespaces with another priority by now. Raises BatchError."""
        failures: dict[str, Exception] = {}
        removed = [name for name in batch if self._rows.get(name) is None]
        for name in removed:
            await self._limit.wait()
            self._slices.waiting.pop(name, None)
            try:
                await self._server.client.delete(CILIUM_ENDPOINT_SLICES, name)
            except KubernetesError as error:
                failures[name] = error
        self._count(len(removed), failures)

    def _count(self, tried: int, failures: dict[str, Exception]) -> None:
        self._counts.outcomes["fail"] += len(failures)
        self._counts.outcomes["success"] += tried - len(failures)
        if failures:
            raise BatchError(failures)

    async def _write(self, row: SliceRow) -> None:
        client = self._server.client
        endpoints = msgspec.to_builtins(row.endpoints)
        kind = CILIUM_ENDPOINT_SLICES
        if self._slices.find(row.name) is not None:
            try:
                await client.patch(kind, row.name, {"namespace": row.namespace, "endpoints": endpoints})
            except NotFoundError:
                pass  # it was deleted meanwhile
            else:
                return
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": row.name},
            "namespace": row.namespace,
            "endpoints": endpoints,
        }
        try:
            await client.create(kind, body)
        except ConflictError as error:
            if not error.exists:
                raise
            await client.patch(kind, row.name, {"namespace": row.namespace, "endpoints": endpoints})


AGAIN = minutes(1)
"""Interval at which actual and desired slices are compared."""


def slice_rows() -> Table[str, SliceRow]:
    """Create the table of desired slices, by name."""
    return Table("endpoint-slices", key=lambda one: one.name)


def write(
    server: ClusterAPI,
    rows: Table[str, SliceRow],
    slices: EndpointSlices,
    metrics: Metrics,
    lifecycle: Lifecycle,
    jobs: Jobs,
) -> None:
    """Start the two reconcilers of slices, if slices are used: of priority namespaces and of the others."""
    if not slices.active:
        return
    limit, counts = SliceLimit(slices.limit), SliceCounts()
    reconcilers: list[Reconciler[str, SliceRow]] = []
    for first, name in ((True, "first"), (False, "others")):
        writer = SliceWriter(server, slices, rows, limit, counts, first=first)
        part = rows.filter(_is_priority if first else _waits, name=f"endpoint-slices-{name}")
        reconcilers.append(Reconciler(part, writer, full_every=AGAIN))
        jobs.observe(f"write-{name}", reconcilers[-1])

    async def restore(changes: Iterable[Change[Key, CiliumEndpointSlice]]) -> None:
        """Compare all slices at once if another writer has changed one."""
        if any(slices.drifted(change.key[1]) for change in changes):
            for one in reconcilers:
                one.trigger()

    jobs.observe("restore", slices.changes, restore)
    collect_metrics(metrics, counts, lifecycle)


def _is_priority(row: SliceRow) -> bool:
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
