"""The tables of objects, one per kind, and their sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from ipaddress import ip_address
from typing import Any, TypeVar

from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_IDENTITIES,
    SLIM_ENDPOINT_SLICES,
    SLIM_ENDPOINTS,
    CiliumIdentity,
)
from cells.kubernetes.objects.core import ENDPOINT_SLICES, PODS, SERVICES, EndpointSlice, Pod
from cells.kubernetes.objects.kind import Kind, Object
from cells.kubernetes.sink import MissingObject, MissingObjects, ObjectEvents, Sink, SourceStatus
from lifecycle import Health, Logger, ReadTable, Table, Tables

__all__ = ["Resources", "ServiceAddresses", "service_addresses"]


T = TypeVar("T", bound=Object)


def source_statuses() -> Table[str, SourceStatus]:
    """The state of each kind's source, by ``pods``, ``ciliumnodes.cilium.io``."""
    return Table("k8s-sources", key=lambda one: one.kind)


def _pod_addresses(pod: Pod) -> tuple[str, ...]:
    return () if pod.finished or pod.spec.host_network else pod.addresses


def _service(endpoints: EndpointSlice) -> tuple[tuple[str, str], ...]:
    return ((endpoints.namespace, endpoints.service),) if endpoints.service else ()


def _labels(identity: CiliumIdentity) -> tuple[tuple[tuple[str, str], ...], ...]:
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
    CILIUM_IDENTITIES.qualified: {"labels": _labels},
}
"""Kind -> index -> function that returns a row's index values."""


SLIM_KINDS: dict[str, Kind[Any]] = {kind.qualified: kind for kind in (SLIM_ENDPOINTS, SLIM_ENDPOINT_SLICES)}
"""Kinds of which the tables hold a reduced form of each object."""


class Resources:
    """All tables of objects; a source writes them through :meth:`sinks`, other modules only read."""

    def __init__(
        self,
        statuses: Table[str, SourceStatus],
        missing_objects: Table[tuple[str, str, str], MissingObject],
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self.missing_objects = MissingObjects(missing_objects, statuses, health, log)
        """Objects that a server has lost, and that stay in the tables."""
        self.events = ObjectEvents()
        """Counts the events of all sources."""
        self.kinds: tuple[Kind[Any], ...] = tuple(SLIM_KINDS.get(kind.qualified, kind) for kind in KINDS)
        self._tables: dict[str, Table[Any, Any]] = {}
        for kind in self.kinds:
            self._tables[kind.qualified] = Table(kind.table, key=_key, indexes=INDEXES.get(kind.qualified))
        self._sink = partial(
            Sink,
            statuses=statuses,
            health=health,
            log=log,
            missing_objects=self.missing_objects,
            events=self.events,
        )
        self._sinks: dict[str, Sink[Any]] = {
            kind.qualified: self._sink(kind, self._tables[kind.qualified]) for kind in self.kinds
        }
        self._named = tables
        tables.add(*self._tables.values())

    def follow(self, kind: Kind[Any], namespace: str = "") -> Table[Any, Any]:
        """Return the table of a kind that only some agents follow, optionally of one namespace.

        Call it in constructors: sources start with the kinds that are registered by then.
        """
        if kind.qualified not in self._tables:
            table: Table[Any, Any] = Table(kind.table, key=_key)
            self.kinds = (*self.kinds, kind)
            self._tables[kind.qualified] = table
            self._sinks[kind.qualified] = self._sink(kind, table, namespace=namespace)
            self._named.add(table)
        return self._tables[kind.qualified]

    def table(self, kind: Kind[T]) -> Table[tuple[str, str], T]:
        """Return the table of a kind, by namespace and name."""
        return self._tables[kind.qualified]

    def sinks(self) -> list[Sink[Any]]:
        """The sinks of all kinds, for a source."""
        return list(self._sinks.values())

    def nothing(self) -> None:
        """Mark every table as initialized: there is no source."""
        for sink in self._sinks.values():
            sink.without_source()


def _key(row: Object) -> tuple[str, str]:
    return row.key


class ServiceAddresses:
    """Cluster IPs of Services, by their names in the cluster's DNS, which may be down or start later.

    Source: Cilium 1.17, pkg/dial: names of the form NAME.NAMESPACE.svc.
    """

    def __init__(
        self, follow: Callable[[], ReadTable[tuple[str, str], T]], cluster_ip: Callable[[T], str]
    ) -> None:
        self._follow = follow
        self._cluster_ip = cluster_ip

    @cached_property
    def services(self) -> ReadTable[tuple[str, str], Any]:
        """Services, followed from now on. Read it in constructors first."""
        return self._follow()

    def resolve(self, host: str) -> str:
        """The cluster IP, or the host itself if it names no Service that has one."""
        name, _, rest = host.partition(".")
        namespace, _, domain = rest.partition(".")
        if domain.partition(".")[0] != "svc":
            return host
        service = self.services.get((namespace, name))
        try:
            return str(ip_address(self._cluster_ip(service))) if service is not None else host
        except ValueError:  # headless
            return host


def service_addresses(resources: Resources) -> ServiceAddresses:
    """Cluster IPs of the Services that this agent follows."""
    return ServiceAddresses(partial(resources.table, SERVICES), lambda service: service.spec.cluster_ip)
