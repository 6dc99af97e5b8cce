"""The tables of objects, one per kind, with their one writer."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_IDENTITIES,
    KNOWN_ENDPOINT_SLICES,
    KNOWN_ENDPOINTS,
    CiliumIdentity,
)
from cells.kubernetes.objects.core import ENDPOINT_SLICES, PODS, EndpointSlice, Pod
from cells.kubernetes.objects.kind import Kind, Object
from cells.kubernetes.sink import Forgotten, ForgottenObject, ObjectEvents, Sink, SourceStatus
from lifecycle import Health, Logger, Table, Tables

__all__ = ["Resources"]


T = TypeVar("T", bound=Object)


def source_statuses() -> Table[str, SourceStatus]:
    """How the source of each kind is, by ``pods``, ``ciliumnodes.cilium.io``."""
    return Table("k8s-sources", key=lambda one: one.kind)


def _pod_addresses(pod: Pod) -> tuple[str, ...]:
    return () if pod.finished or pod.spec.host_network else pod.addresses


def _service(endpoints: EndpointSlice) -> tuple[tuple[str, str], ...]:
    return ((endpoints.namespace, endpoints.service),) if endpoints.service else ()


def _meaning(identity: CiliumIdentity) -> tuple[tuple[tuple[str, str], ...], ...]:
    return (tuple(sorted(identity.security_labels.items())),)


def _namespace(row: Object) -> tuple[str, ...]:
    return (row.namespace,)


INDEXES: dict[str, dict[str, Any]] = {
    PODS.qualified: {
        "namespace": _namespace,
        "address": _pod_addresses,
        "node": lambda pod: (pod.spec.node_name,) if pod.spec.node_name else (),
    },
    ENDPOINT_SLICES.qualified: {"service": _service},
    CILIUM_IDENTITIES.qualified: {"labels": _meaning},
}
"""Kind -> index -> the values a row is found by."""


RETAINED: dict[str, Kind[Any]] = {kind.qualified: kind for kind in (KNOWN_ENDPOINTS, KNOWN_ENDPOINT_SLICES)}
"""Kinds of which an agent keeps less than it reads."""


class Resources:
    """Every table of objects; a source writes them through :meth:`sinks`, everybody else reads."""

    def __init__(
        self,
        statuses: Table[str, SourceStatus],
        forgotten: Table[tuple[str, str, str], ForgottenObject],
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self.forgotten = Forgotten(forgotten, statuses, health, log)
        """What a server has lost, and is in force here."""
        self.events = ObjectEvents()
        """The events of sources, counted."""
        self.kinds: tuple[Kind[Any], ...] = tuple(RETAINED.get(kind.qualified, kind) for kind in KINDS)
        self._tables: dict[str, Table[Any, Any]] = {}
        for kind in self.kinds:
            self._tables[kind.qualified] = Table(kind.table, key=_key, indexes=INDEXES.get(kind.qualified))
        self._sink = partial(
            Sink, statuses=statuses, health=health, log=log, forgotten=self.forgotten, events=self.events
        )
        self._sinks: dict[str, Sink[Any]] = {
            kind.qualified: self._sink(kind, self._tables[kind.qualified]) for kind in self.kinds
        }
        self._named = tables
        tables.add(*self._tables.values())

    def follow(self, kind: Kind[Any], namespace: str = "") -> Table[Any, Any]:
        """The objects of a kind that only some agents follow, of one namespace if it is given.

        To be called in constructors: sources begin with those that are known then.
        """
        if kind.qualified not in self._tables:
            table: Table[Any, Any] = Table(kind.table, key=_key)
            self.kinds = (*self.kinds, kind)
            self._tables[kind.qualified] = table
            self._sinks[kind.qualified] = self._sink(kind, table, namespace=namespace)
            self._named.add(table)
        return self._tables[kind.qualified]

    def table(self, kind: Kind[T]) -> Table[tuple[str, str], T]:
        """The objects of a kind, by namespace and name."""
        return self._tables[kind.qualified]

    def sinks(self) -> list[Sink[Any]]:
        """Where a source puts what it finds."""
        return list(self._sinks.values())

    def nothing(self) -> None:
        """There is no source: every table is initialized, and empty."""
        for sink in self._sinks.values():
            sink.without_source()


def _key(row: Object) -> tuple[str, str]:
    return row.key
