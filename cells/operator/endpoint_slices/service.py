"""Keeps slices up to date with CiliumEndpoints.

Needs: OperatorOptions, SliceSettings, ClusterObjects, the table of slices.   Gives: EndpointSlices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import anyio

from cells.kubernetes import CILIUM_ENDPOINT_SLICES, CILIUM_ENDPOINTS, CILIUM_NODES, CiliumEndpointSlice, Key
from cells.operator.endpoint_slices.settings import SliceSettings, WriteLimit
from cells.operator.endpoint_slices.slices import SliceRow, Slices
from cells.operator.objects import ClusterObjects
from cells.operator.options import OperatorOptions
from lifecycle import Jobs, Table

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
        self.active = options.enable_cilium_endpoint_slice
        """Whether there are to be slices."""
        self._settings = settings
        self._rows = rows
        self._first = rows.initializer("endpoints of the cluster")
        if self.active:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            self._slices = objects.table(CILIUM_ENDPOINT_SLICES)
            self._nodes = objects.table(CILIUM_NODES)
            jobs.one_shot("batch", self._run)

    def live(self) -> Mapping[str, CiliumEndpointSlice]:
        """The slices there are."""
        return {one.name: one for one in self._slices.all()}

    def limit(self) -> WriteLimit:
        """How fast slices may be written, now that the cluster has so many nodes."""
        return self._settings.limit(len(self._nodes))

    async def _run(self) -> None:
        """All there is, then what changes; what comes together is taken together."""
        for table in (self._endpoints, self._slices, self._nodes):
            await table.wait_initialized()
        settings = self._settings
        slices = Slices(
            settings.ces_max_ciliumendpoints_per_ces, by_identity=settings.ces_slice_mode == "identity"
        )
        slices.adopt(self._slices.all())
        feed = self._endpoints.changes()
        first = [one.row for one in feed.take() if one.row is not None]
        with self._rows.txn() as txn:
            txn.replace_all(row for row in slices.begin(first).values() if row is not None)
        self._first.done()
        while True:
            await feed.wait()
            await anyio.sleep(DELAY)
            changed = slices.update({cast("Key", one.key): one.row for one in feed.take()})
            with self._rows.txn() as txn:
                for name, row in changed.items():
                    if row is None:
                        txn.delete(name)
                    else:
                        txn.put(row)
