"""Keeps slices up to date with CiliumEndpoints.

Needs: OperatorOptions, SliceSettings, ClusterObjects, the table of slices.   Gives: EndpointSlices.
Source: Cilium 1.17: the annotation ``cilium.io/ces-namespace`` of a namespace, ``priority`` or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final, cast

import anyio
from msgspec.structs import replace

from cells.kubernetes import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CILIUM_NODES,
    NAMESPACES,
    CiliumEndpointSlice,
    Key,
    Namespace,
)
from cells.operator.endpoint_slices.settings import SliceSettings, WriteLimit
from cells.operator.endpoint_slices.slices import SliceRow, Slices
from cells.operator.objects import ClusterObjects
from cells.operator.options import OperatorOptions
from lifecycle import Change, Jobs, Table

ANNOTATION: Final = "cilium.io/ces-namespace"
DELAY: Final = 0.5
"""Seconds that a change waits for others, so that a slice is written once for all of them."""


class EndpointSlices:
    """Places endpoints once all of them, and all slices, are known."""

    def __init__(
        self,
        options: OperatorOptions,
        settings: SliceSettings,
        objects: ClusterObjects,
        rows: Table[SliceRow],
        *,
        jobs: Jobs,
    ) -> None:
        self.active = options.enable_cilium_endpoint_slice and objects.endpoints
        """Whether there are to be slices."""
        self._settings = settings
        self._rows = rows
        self._first = rows.initializer("endpoints of the cluster")
        self.waiting: dict[str, float] = {}
        """Since when slices wait to be written, in seconds of the monotonic clock."""
        if self.active:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            self._slices = objects.table(CILIUM_ENDPOINT_SLICES)
            self._nodes = objects.table(CILIUM_NODES)
            self._namespaces = objects.table(NAMESPACES)
            jobs.one_shot("batch", self._run)
            jobs.observe("priorities", self._namespaces.changes, self._follow_namespaces)

    def live(self) -> Mapping[str, CiliumEndpointSlice]:
        """The slices there are."""
        return {one.name: one for one in self._slices.all()}

    def goes_first(self, namespace: str) -> bool:
        """Whether the slices of a namespace are written before those of others."""
        row = self._namespaces.get(("", namespace))
        return row is not None and row.annotations.get(ANNOTATION) == "priority"

    def limit(self) -> WriteLimit:
        """How fast slices may be written, now that the cluster has so many nodes."""
        return self._settings.limit(len(self._nodes))

    async def _run(self) -> None:
        """All there is, then what changes; what comes together is taken together."""
        for table in (self._endpoints, self._slices, self._nodes, self._namespaces):
            await table.wait_initialized()
        settings = self._settings
        slices = Slices(
            settings.ces_max_ciliumendpoints_per_ces, by_identity=settings.ces_slice_mode == "identity"
        )
        slices.adopt(self._slices.all())
        feed = self._endpoints.changes()
        first = [one.row for one in feed.take() if one.row is not None]
        with self._rows.txn() as txn:
            txn.replace_all(self._marked(row for row in slices.begin(first).values() if row is not None))
        self._first.done()
        while True:
            await feed.wait()
            await anyio.sleep(DELAY)
            changed = slices.update({cast("Key", one.key): one.row for one in feed.take()})
            with self._rows.txn() as txn:
                for name in (name for name, row in changed.items() if row is None):
                    txn.delete(name)
                for row in self._marked(row for row in changed.values() if row is not None):
                    txn.put(row)

    def _marked(self, rows: Iterable[SliceRow]) -> Iterable[SliceRow]:
        """Slices with whether they go first; they wait from now on."""
        now = time.monotonic()
        for row in rows:
            self.waiting.setdefault(row.name, now)
            yield replace(row, priority=self.goes_first(row.namespace))

    async def _follow_namespaces(self, changes: list[Change[Namespace]]) -> None:
        changed = {cast("Key", one.key)[1] for one in changes}
        with self._rows.txn() as txn:
            for row in self._rows.all():
                if row.namespace in changed and row.priority != self.goes_first(row.namespace):
                    txn.put(replace(row, priority=not row.priority))
