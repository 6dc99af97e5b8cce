"""Fills a table for each kind that somebody asks for.

Needs: ClusterAPI, CustomResources.   Gives: ClusterObjects, source_statuses.
"""

from __future__ import annotations

from typing import Any, TypeVar

from cells.kubernetes import Kind, Object, api
from cells.operator.api_server import ClusterAPI
from cells.operator.crds import CustomResources
from lifecycle import Health, Hook, Jobs, Lifecycle, Logger, Table, Tables

T = TypeVar("T", bound=Object)


def source_statuses() -> Table[api.SourceStatus]:
    """How the source of each kind is, by ``pods``, ``ciliumnodes.cilium.io``."""
    return Table("k8s-sources", key=lambda one: one.kind)


class ClusterObjects:
    """The tables of the leader. A kind is followed from the start on when a constructor has asked for it."""

    def __init__(
        self,
        server: ClusterAPI,
        resources: CustomResources,
        statuses: Table[api.SourceStatus],
        tables: Tables,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._server = server
        self._resources = resources
        self._statuses = statuses
        self._registry = tables
        self._jobs = jobs
        self._health = health
        self._log = log
        self._tables: dict[str, Table[Any]] = {}
        self._sinks: list[api.Sink[Any]] = []
        lifecycle.append(Hook("follow objects", self._start))

    @property
    def endpoints(self) -> bool:
        """Whether there are CiliumEndpoints, and slices of them."""
        return self._resources.endpoints

    def table(self, kind: Kind[T]) -> Table[T]:
        """The objects of a kind, by namespace and name. Only constructors ask."""
        found = self._tables.get(kind.qualified)
        if found is None:
            found = self._tables[kind.qualified] = Table(kind.table, key=_key)
            self._sinks.append(api.Sink(kind, found, self._statuses, self._health, self._log))
            self._registry.add(found)
        return found

    async def _start(self) -> None:
        for sink in self._sinks:
            sink.begin()
            reflector = api.Reflector(self._server.client, sink.kind, sink)
            self._jobs.one_shot(f"follow-{sink.kind.plural}", reflector.run)


def _key(row: Object) -> tuple[str, str]:
    return row.key
