"""Services, EndpointSlices and this node to frontends.

Controller: three tables of objects in, the table ``frontends`` out.
Needs:  the tables, ServiceCatalog.   Gives: ServiceWatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import anyio

from cells.kubernetes import EndpointSlice, Service
from cells.kubernetes import Node as NodeObject
from cells.services.model import (
    EXPOSURE_LABEL,
    ZONE_LABEL,
    Frontend,
    FrontendChange,
    FrontendKey,
    LoadBalancerOptions,
    Node,
    ServiceCatalog,
    ServiceName,
    Upsert,
)
from lifecycle import Change, ReadTable, Table
from lifecycle.tables import Changes

Row = TypeVar("Row")
Feed = Callable[[ServiceCatalog, Change[Row]], Iterable[FrontendChange]]


class ServiceWatch:
    """Keeps the frontends. They are told once every service, slice and node has been listed."""

    def __init__(
        self,
        node_name: Callable[[], str],
        services: ReadTable[Service],
        slices: ReadTable[EndpointSlice],
        nodes: ReadTable[NodeObject],
        frontends: Table[Frontend],
        options: LoadBalancerOptions,
    ) -> None:
        self._node_name = node_name
        self._node = Node("")
        self._services = services
        self._slices = slices
        self._nodes = nodes
        self._frontends = frontends
        self._options = options
        self._first = frontends.initializer("services and their slices")

    async def run(self) -> None:
        """Follow the objects for ever; run again after an error, it begins anew."""
        self._node = Node(self._node_name())
        catalog = ServiceCatalog(self._options, self._node)
        for table in (self._nodes, self._services, self._slices):
            await table.wait_initialized()
        nodes, services, slices = self._nodes.changes(), self._services.changes(), self._slices.changes()
        first: dict[FrontendKey, Frontend] = {}
        for change in [
            *_changes(catalog, nodes.take(), self._node_changed),
            *_changes(catalog, services.take(), _service_changed),
            *_changes(catalog, slices.take(), _slice_changed),
        ]:
            if isinstance(change, Upsert):
                first[change.frontend.key] = change.frontend
            else:
                first.pop(change.key, None)
        with self._frontends.txn() as rows:
            rows.replace_all(first.values())
        self._first.done()
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow, catalog, nodes, self._node_changed)
            group.start_soon(self._follow, catalog, services, _service_changed)
            group.start_soon(self._follow, catalog, slices, _slice_changed)

    async def _follow(self, catalog: ServiceCatalog, changes: Changes[Row], feed: Feed[Row]) -> None:
        async for batch in changes:
            with self._frontends.txn() as rows:
                for change in _changes(catalog, batch, feed):
                    if isinstance(change, Upsert):
                        rows.put(change.frontend)
                    else:
                        rows.delete(change.key)

    def _node_changed(self, catalog: ServiceCatalog, change: Change[NodeObject]) -> Iterable[FrontendChange]:
        """Only this node counts, and of it only what decides which backends are used."""
        row = change.row
        if row is None or row.name != self._node.name:
            return ()
        labels = row.labels
        node = Node(row.name, zone=labels.get(ZONE_LABEL, ""), exposure=labels.get(EXPOSURE_LABEL, ""))
        if node == self._node:
            return ()
        self._node = node
        return catalog.move(node)


def _changes(
    catalog: ServiceCatalog, batch: Iterable[Change[Row]], feed: Feed[Row]
) -> Iterable[FrontendChange]:
    for change in batch:
        yield from feed(catalog, change)


def _service_changed(catalog: ServiceCatalog, change: Change[Service]) -> Iterable[FrontendChange]:
    if change.row is not None:
        return catalog.upsert_service(change.row)
    return catalog.delete_service(ServiceName(*change.old.key)) if change.old is not None else ()


def _slice_changed(catalog: ServiceCatalog, change: Change[EndpointSlice]) -> Iterable[FrontendChange]:
    """A slice may come to belong to another service."""
    old, row = change.old, change.row
    if old is not None and (row is None or row.service != old.service):
        yield from catalog.delete_slice(ServiceName(old.namespace, old.service), old.name)
    if row is not None and row.service:
        yield from catalog.upsert_slice(row)
