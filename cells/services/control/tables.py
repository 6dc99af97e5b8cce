"""Tables, events and metrics of services: results of ``watch`` and ``target`` for the API and the log.

Tables: ``services`` (frontends in the maps), ``local-redirects``, ``service-conflicts`` and
``refused-service-addresses``. Kubernetes events, the health of load balancing and metrics are derived from
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

import msgspec

from cells.base.metrics import Collector, Histogram, MetricFamily, gauge, histogram
from cells.kubernetes.object_events import EventDraft, EventSource, Regarding
from cells.kubernetes.objects.cilium_policy import CILIUM_LOCAL_REDIRECT_POLICIES
from cells.kubernetes.objects.core import ENDPOINT_SLICES, PODS, SERVICES, EndpointSlice, Service, served_by
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import Resources
from cells.observe.health import Dependency, State
from cells.services import (
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceName,
    map_entries,
)
from cells.services.map_entries import NAMELESS
from cells.services.model.backends import SliceBackends, addresses_of, refused_backends, with_missing
from cells.services.model.claims import CLAIMANT, HOST_IP, RefusedAddress, unsupported_parts
from cells.services.model.frontends import LOCAL, faults_of
from cells.services.model.redirect import RedirectPolicy
from lifecycle import Change, HiveError, Member, Table


class LocalRedirect(msgspec.Struct, frozen=True):
    """A row of the table ``local-redirects``."""

    name: ServiceName
    uid: str
    redirect: RedirectPolicy | None = None
    """None if the policy is refused."""
    error: str = ""
    frontends: tuple[Frontend, ...] = ()
    """Frontends with a ready pod on this node."""
    pods: tuple[tuple[str, str], ...] = ()
    """Addresses of the backends, with the names of their pods."""


def local_redirects() -> Table[ServiceName, LocalRedirect]:
    """The ``local-redirects`` table, by namespace and name."""
    return Table("local-redirects", key=lambda one: one.name)


# Frontends in the maps, and claims on them that are not served.


class ServedFrontend(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``services``: a frontend in the maps, with its number."""

    id: int
    """The service ID, which Cilium's commands print: the index in the reverse NAT maps."""
    frontend: Frontend
    installed: Frontend | None = None
    """The frontend in the maps, if it differs: restored and manual backend states are in no object."""

    @property
    def in_maps(self) -> Frontend:
        """The frontend in the maps."""
        return self.installed or self.frontend

    @property
    def key(self) -> FrontendKey:
        """Its address and scope."""
        return self.frontend.key

    def merged(self, row: ServedFrontend) -> ServedFrontend:
        """Return the other row with the backends and source ranges of both: the maps may have either."""
        frontend, old = row.in_maps, self.in_maps
        backends = with_missing(frontend.backends, old.backends)
        ranges = tuple(dict.fromkeys((*frontend.source_ranges, *old.source_ranges)))
        if backends is frontend.backends and ranges == frontend.source_ranges:
            return row
        both = msgspec.structs.replace(frontend, backends=backends, source_ranges=ranges)
        return ServedFrontend(row.id, row.frontend, both)

    def with_unconfirmed(self, frontend: Frontend) -> Frontend:
        """Add restored backends that no source has confirmed yet, if the frontend is partial."""
        if not frontend.partial:
            return frontend
        seen = set(addresses_of(self.frontend.backends)) if self.frontend.service != NAMELESS else set()
        unconfirmed = [one for one in self.in_maps.backends if one.address not in seen]
        backends = with_missing(frontend.backends, unconfirmed)
        if backends is frontend.backends:
            return frontend
        return msgspec.structs.replace(frontend, backends=backends)

    def with_states(self, frontend: Frontend) -> Frontend:
        """Apply the states of this row's inactive backends to another version of the frontend.

        Active is the default in sources. Terminating is final; other states are set and reset manually. The
        other frontend may have a protocol where this one has none.
        """
        backends = self.in_maps.backends
        if isinstance(backends, SliceBackends):  # all are active
            return frontend
        states = {
            one.address.of_any_protocol: one.state for one in backends if one.state is not BackendState.ACTIVE
        }
        if not states:
            return frontend
        return msgspec.structs.replace(
            frontend,
            backends=tuple(
                msgspec.structs.replace(one, state=state)
                if one.state is BackendState.ACTIVE
                and (state := states.get(one.address.of_any_protocol)) is not None
                and (state is BackendState.TERMINATING or not one.manual)
                else one
                for one in frontend.backends
            ),
        )


class PlannedFrontend(msgspec.Struct, frozen=True, gc=False):
    """A frontend in a write plan."""

    row: ServedFrontend
    """The row of the frontend in the maps after the plan is written."""
    dropped: frozenset[bytes]
    """Addresses of the backends that the plan removes from the frontend."""
    was_served: bool


def range_keys(row: ServedFrontend | None) -> dict[bytes, None]:
    """Return the keys of the frontend's source ranges in its family."""
    if row is None:
        return {}
    prefixes = map(ip_network, row.in_maps.source_ranges)
    version = row.key.address.version
    keys = [map_entries.source_range_key(row.id, one).key for one in prefixes if one.version == version]
    return dict.fromkeys(keys)


def served_frontends() -> Table[FrontendKey, ServedFrontend]:
    """The ``services`` table, by address and scope."""
    return Table("services", key=lambda one: one.key)


class ServiceConflict(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``service-conflicts``: a frontend that several services claim."""

    frontend: FrontendKey
    served: ServiceName
    unserved: tuple[ServiceName, ...]


def service_conflicts() -> Table[FrontendKey, ServiceConflict]:
    """The ``service-conflicts`` table, by address and scope."""
    return Table("service-conflicts", key=lambda one: one.frontend)


def refused_addresses() -> Table[tuple[str, str, str], RefusedAddress]:
    """The ``refused-service-addresses`` table, by service, field and address."""
    return Table("refused-service-addresses", key=lambda one: (str(one.service), one.part, str(one.address)))


def address_events(
    refused: Table[tuple[str, str, str], RefusedAddress], resources: Resources
) -> Member[EventSource]:
    """Emit events for refused addresses of Services and of pods' host ports."""

    def drafts(row: RefusedAddress) -> Iterator[EventDraft]:
        kind: Kind[Any] = PODS if row.part == HOST_IP else SERVICES
        namespace, name = row.object_name.split("/")
        held = resources.table(kind).get((namespace, name))
        about = Regarding(kind, name, namespace, held.metadata.uid if held is not None else "")
        note = f"{row.part} {row.address} {row.reason}: {row.outcome}"
        yield EventDraft(about, "AddressRefused", note, "Serve", shared=kind is SERVICES)

    return EventSource("refused addresses", refused, drafts)


def service_events(options: LoadBalancerOptions, resources: Resources) -> Member[EventSource]:
    """Emit events for fields and annotations of a Service without effect."""

    def drafts(row: Service) -> Iterator[EventDraft]:
        if not served_by(row.labels, options.k8s_service_proxy_name):
            return
        about = Regarding(SERVICES, row.name, row.namespace, row.metadata.uid)
        for part, reason in unsupported_parts(row, options):
            yield EventDraft(about, "NotServedAsWritten", f"{part}: {reason}", "Serve")
        for annotation, reason in faults_of(row, options):
            yield EventDraft(about, "AnnotationWithoutEffect", f"{annotation}: {reason}", "Serve")

    return EventSource("services", resources.table(SERVICES), drafts)


def backend_events(resources: Resources) -> Member[EventSource]:
    """Emit events for refused addresses of endpoints, on the Service."""

    def drafts(row: EndpointSlice) -> Iterator[EventDraft]:
        refused = refused_backends(row) if row.service else []
        if not refused:
            return
        service = resources.table(SERVICES).get((row.namespace, row.service))
        uid = service.metadata.uid if service is not None else ""
        about = Regarding(SERVICES, row.service, row.namespace, uid)
        for address in refused:
            note = f"{address} of EndpointSlice {row.name} is not an address of a backend"
            yield EventDraft(about, "BackendRefused", note, "Serve")

    def concerns(row: EndpointSlice) -> bool:
        return bool(refused_backends(row))

    return EventSource("backends", resources.table(ENDPOINT_SLICES), drafts, concerns)


def redirect_events(redirects: Table[ServiceName, LocalRedirect]) -> Member[EventSource]:
    """Emit events for refused local redirect policies."""

    def drafts(row: LocalRedirect) -> Iterator[EventDraft]:
        if row.error:
            about = Regarding(CILIUM_LOCAL_REDIRECT_POLICIES, row.name.name, row.name.namespace, row.uid)
            yield EventDraft(about, "PolicyRefused", row.error, "Redirect")

    return EventSource("local redirects", redirects, drafts)


# Frontends without room in the maps, for the agent's status.


class MapFullError(HiveError):
    """A map is full."""


class MapFullFrontends:
    """The frontends that did not fit into a map at the last attempt."""

    def __init__(self) -> None:
        self._missing: dict[FrontendKey, str] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def note(self, tried: Iterable[FrontendKey], failures: Mapping[FrontendKey, Exception]) -> None:
        """Record the results of an attempt."""
        for key in tried:
            error = failures.get(key)
            if isinstance(error, MapFullError):
                self._missing[key] = str(error)
            else:
                self._missing.pop(key, None)

    def state(self) -> tuple[State, str]:
        """Return Warning while a frontend does not fit: others are served, and a restart would not help."""
        if not self._missing:
            return "Ok", ""
        count = len(self._missing)
        what = "1 frontend is" if count == 1 else f"{count} frontends are"
        return (
            "Warning",
            f"{what} not served, or not by all backends: {next(reversed(self._missing.values()))}",
        )


def dependency(map_full: MapFullFrontends) -> Member[Dependency]:
    """Report the health of load balancing in the agent's status."""
    return Dependency("Load balancing", map_full.state)


def metrics(map_full: MapFullFrontends) -> Member[Collector]:
    """Count the frontends that do not fit into the maps."""

    async def collect() -> Iterable[MetricFamily]:
        text = "Frontends that are not served as they should be, as a map is full."
        return [gauge("hive_services_without_room", text, len(map_full))]

    return Collector("services", collect)


class ServiceReports(msgspec.Struct, frozen=True):
    """The tables of refused and conflicting requests; None for disabled features."""

    conflicts: Table[FrontendKey, ServiceConflict] | None = None
    refused: Table[tuple[str, str, str], RefusedAddress] | None = None
    redirects: Table[ServiceName, LocalRedirect] | None = None


class IngestedObjects(Counter[tuple[str, str]]):
    """Counts objects that start or stop using a feature, by feature and action (add, delete)."""

    def note(self, name: str, before: bool, after: bool) -> None:
        """Count a change of an object, by whether it used the feature before and uses it now."""
        if before != after:
            self[name, "add" if after else "delete"] += 1

    def note_service(self, old: Service | None, row: Service | None) -> None:
        """Count a change of a service's internalTrafficPolicy to or from Local."""
        before, after = (one is not None and one.spec.internal_traffic_policy == LOCAL for one in (old, row))
        self.note("internal_traffic_policy_services", before, after)


# How long changes of services take.
#
# Source: Cilium 1.17, cilium_service_implementation_delay.


class _ServiceChange:
    """A change of a service that has not reached the maps."""

    __slots__ = ("action", "began", "keys")

    def __init__(self, action: str, began: float, keys: set[FrontendKey]) -> None:
        self.action = action
        self.began = began
        self.keys = keys
        """Changed frontends that are not written."""


class ImplementationDelays:
    """Measures the time from a change of a service or its slices until the maps are written.

    Frontends change in ``with`` blocks without an await. Changes without an effect on frontends are not
    measured, nor those that a later change replaces.
    """

    def __init__(
        self, frontends: Table[FrontendKey, Frontend], served: Table[FrontendKey, ServedFrontend]
    ) -> None:
        self.took: dict[str, Histogram] = {}
        """Seconds, by action."""
        self._frontends = frontends
        self._index = frontends.by(CLAIMANT)
        self._served = served
        self._expected: dict[ServiceName, tuple[str, float, dict[FrontendKey, Frontend]]] = {}
        """Action, start time and previous frontends of services that are changing."""
        self._due: dict[FrontendKey, _ServiceChange] = {}

    def expect(self, changes: Iterable[object]) -> None:
        """Record changes of objects before they are applied, in a ``with`` block."""
        for name, action in filter(None, map(_changed_service, changes)):
            if name not in self._expected:
                began, before = time.perf_counter(), self._rows(name)
            else:
                _, began, before = self._expected[name]
            self._expected[name] = action, began, before

    def __enter__(self) -> None:
        self._expected.clear()

    def __exit__(self, *_: object) -> None:
        """Start measuring the expected changes that changed frontends."""
        for name, (action, began, before) in self._expected.items():
            now = self._rows(name)
            keys = {key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)}
            if keys:
                self._begin(_ServiceChange(action, began, keys))

    @property
    def pending(self) -> int:
        """The number of changed frontends that are not in the maps."""
        return len(self._due)

    def _rows(self, name: ServiceName) -> dict[FrontendKey, Frontend]:
        return {row.key: row for row in self._index.get(name)}

    def _begin(self, change: _ServiceChange) -> None:
        for key in change.keys:
            if (earlier := self._due.pop(key, None)) is not None:
                earlier.keys.discard(key)
            self._due[key] = change
        self.written([key for key in change.keys if self._is_written(key)])

    def _is_written(self, key: FrontendKey) -> bool:
        row, served = self._frontends.get(key), self._served.get(key)
        return served is None if row is None else served is not None and served.frontend is row

    def written(self, keys: Iterable[FrontendKey]) -> None:
        """Record that the current rows of these frontends, or their absence, are in the maps."""
        if not self._due:
            return
        for key in keys:
            change = self._due.pop(key, None)
            if change is None:
                continue
            change.keys.discard(key)
            if not change.keys:
                took = time.perf_counter() - change.began
                self.took.setdefault(change.action, Histogram()).observe(took)


def _changed_service(change: object) -> tuple[ServiceName, str] | None:
    """Return the service of a changed object, and Cilium's name of the action."""
    if not isinstance(change, Change):
        return None
    one = change.row if change.row is not None else change.old
    if isinstance(one, EndpointSlice):
        return ServiceName(one.namespace, one.service), "service-updated"
    if isinstance(one, Service):
        action = "service-updated" if change.row is not None else "service-deleted"
        return ServiceName(one.namespace, one.name), action
    return None


def delay_metrics(delays: ImplementationDelays) -> Member[Collector]:
    """Export how long changes of services took."""

    async def collect() -> Iterable[MetricFamily]:
        text = (
            "Duration in seconds to propagate the data plane programming of a service, its network and"
            " endpoints from the time the service or the service pod was changed excluding the event queue"
            " latency"
        )
        return [histogram("cilium_service_implementation_delay", text, dict(delays.took), "action")]

    return Collector("service-delays", collect)
