"""Computes the table ``frontends`` from Kubernetes objects, remote services and this node's addresses.

``ServiceWatch`` applies initial rows and changes of the tables in ``WatchedObjects`` to a ``ServiceCatalog``,
which computes frontends; and it reports refused and conflicting requests to log and tables. The ``services``
reconciler reads the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from cells.cluster.nodes.node import ClusterNode
from cells.clustermesh.tables import RemoteService, RemoteServiceKey
from cells.kubernetes.objects.cilium_policy import CiliumLocalRedirectPolicy
from cells.kubernetes.objects.core import EndpointSlice, Pod, Service, served_by
from cells.kubernetes.objects.core import Node as NodeObject
from cells.node.devices import OURS, Device
from cells.services import (
    EXPOSURE_LABEL,
    ZONE_LABEL,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServingNode,
)
from cells.services.control.manual import ManualService, ManualState
from cells.services.control.tables import (
    ImplementationDelays,
    IngestedObjects,
    LocalRedirect,
    ServiceConflict,
    ServiceReports,
)
from cells.services.model import ServiceCatalog
from cells.services.model.backends import (
    WEIGHT,
    RefusedBackend,
    refused_backends,
    terminating_addresses,
    weight_of,
)
from cells.services.model.claims import (
    HOST_IP,
    RefusedAddress,
    frontends,
    node_reservations,
    pod_reservations,
    unsupported_parts,
)
from cells.services.model.frontends import faults_of
from cells.services.model.redirect import RedirectPolicy, read_redirect
from cells.services.node_ports import IPAddress, NodePortAddress
from lifecycle import Change, Logger, ReadTable, Table
from lifecycle.jobs import TimeSlice, collector_paused

Row = TypeVar("Row")
Item = TypeVar("Item")
Feed = Callable[[ServiceCatalog, Change[Any, Row]], None]


STEP = 8
"""Rows between two checks of the clock: a row needs some microseconds to 0.1 ms."""


class _TableFeed(msgspec.Struct, frozen=True):
    """Applies a table to the catalog: ``first`` its initial rows, ``follow`` its changes."""

    first: Callable[[ServiceCatalog], Coroutine[Any, Any, None]]
    follow: Callable[[ServiceCatalog], Coroutine[Any, Any, None]]


def _address_order(ip: IPAddress) -> tuple[int, int]:
    return ip.version, int(ip)


class WatchedObjects(NamedTuple):
    """The tables from which frontends are computed; None for disabled features."""

    services: ReadTable[tuple[str, str], Service]
    slices: ReadTable[tuple[str, str], EndpointSlice]
    nodes: ReadTable[tuple[str, str], NodeObject]
    pods: ReadTable[tuple[str, str], Pod] | None = None
    addresses: ReadTable[IPAddress, NodePortAddress] | None = None
    redirects: ReadTable[tuple[str, str], CiliumLocalRedirectPolicy] | None = None
    manual: ReadTable[FrontendKey, ManualService] | None = None
    states: ReadTable[ServiceAddress, ManualState] | None = None
    devices: ReadTable[int, Device] | None = None
    """The node's devices: host ports are served only at their addresses."""
    cluster: ReadTable[str, ClusterNode] | None = None
    """The cluster's nodes. Initial frontends do not wait for it: listing nodes may need services."""
    remote: ReadTable[RemoteServiceKey, RemoteService] | None = None
    """Services of remote clusters. Initial frontends do not wait for it."""


class ServiceWatch:
    """Maintains the table ``frontends``, and initializes it once all objects are listed."""

    def __init__(
        self,
        node_name: Callable[[], str],
        objects: WatchedObjects,
        frontends: Table[FrontendKey, Frontend],
        options: LoadBalancerOptions,
        reports: ServiceReports = ServiceReports(),  # noqa: B008  (a value)
        log: Logger | None = None,
        delays: ImplementationDelays | None = None,
    ) -> None:
        self._reports, self._delays = reports, delays
        table = reports.refused
        self._refused_initializer = table.initializer("addresses of services") if table is not None else None
        self._conflicts: dict[FrontendKey, tuple[ServiceName, ...]] = {}
        self._refused_addresses: dict[ServiceName, tuple[RefusedAddress, ...]] = {}
        self._log = log
        self._node_name = node_name
        self._node = ServingNode("")
        self._objects = objects
        self._frontends = frontends
        self._options = options
        self._invalid_redirects: dict[ServiceName, LocalRedirect] = {}
        self._refused_redirects: dict[ServiceName, str] = {}
        self._refused_backends: dict[ServiceName, tuple[RefusedBackend, ...]] = {}
        self._initializer = frontends.initializer("services and their slices")
        self.events: Counter[str] = Counter()
        """Counts of added, updated and deleted services, by ``add``, ``update`` and ``delete``."""
        self.terminating = 0
        """Count of terminating addresses in all received versions of slices."""
        self.ingested = IngestedObjects()

    async def run(self) -> None:
        """Watch the objects until cancelled. After an error, a restart computes all frontends again."""
        objects = self._objects
        self._node = ServingNode(self._node_name())
        again = self._frontends.initialized
        catalog = ServiceCatalog(
            *(self._options, self._node, objects.slices),
            frontends() if again else self._frontends,  # served ones stay until all are found again
            objects.remote,
        )
        for table in objects:
            if table is not None and table is not objects.cluster and table is not objects.remote:
                await table.wait_initialized()
        follows = [
            *self._feeds_of(objects.manual, _override),
            *self._feeds_of(objects.addresses, self._addresses_changed),
            *self._feeds_of(objects.nodes, self._node_changed),
            *self._feeds_of(objects.devices, self._device_changed),
            *self._feeds_of(objects.cluster, _cluster_node_changed),
            *self._feeds_of(objects.slices, self._slice_changed),
            *self._feeds_of(objects.remote, _remote_changed),
            *self._feeds_of(objects.services, self._service_changed),  # after their slices
            *self._feeds_of(objects.pods, self._pod_changed),
            *self._feeds_of(objects.redirects, self._redirect_changed),
            *self._feeds_of(objects.states, _override_state),
        ]
        with catalog.changes as changes:
            changes.clear()
        for feed in follows:
            await feed.first(catalog)
        if again:
            catalog.changes.move_to(self._frontends)
        self._report(catalog)
        self._initializer.done()
        if self._refused_initializer is not None:
            self._refused_initializer.done()
        async with anyio.create_task_group() as group:
            for feed in follows:
                group.start_soon(feed.follow, catalog)
            if objects.remote is not None and not catalog.remote_known:
                group.start_soon(self._remove_unconfirmed, catalog, objects.remote)

    async def _remove_unconfirmed(self, catalog: ServiceCatalog, remote: ReadTable[Any, Any]) -> None:
        """Once remote clusters are listed, remove restored backends that none of them has."""
        await remote.wait_initialized()
        await _in_slices(catalog, ServiceCatalog.remote_changed, catalog.remote_listed())
        self._report(catalog)

    def _feeds_of(self, table: ReadTable[Any, Row] | None, feed: Feed[Row]) -> Iterable[_TableFeed]:
        if table is None:
            return
        changes = table.changes()

        async def first(catalog: ServiceCatalog) -> None:
            await _in_slices(catalog, feed, changes.take())

        async def follow(catalog: ServiceCatalog) -> None:
            async for batch in changes:
                await _in_slices(catalog, feed, batch, self._delays)
                await _in_slices(catalog, ServiceCatalog.refresh, catalog.pop_outdated())
                self._report(catalog)

        yield _TableFeed(first, follow)

    def _addresses_changed(self, catalog: ServiceCatalog, _: Change[IPAddress, NodePortAddress]) -> None:
        """Apply all node port addresses, whichever changed."""
        table = self._objects.addresses
        rows = table.all() if table is not None else []
        self._update_node(catalog, addresses=tuple(sorted((row.ip for row in rows), key=_address_order)))

    def _device_changed(self, catalog: ServiceCatalog, change: Change[int, Device]) -> None:
        """Apply the addresses of all devices, if a device's addresses changed."""
        table = self._objects.devices
        if table is None or _addresses(change.old) == _addresses(change.row):
            return
        catalog.set_own_addresses(frozenset(ip for row in table.all() for ip in _addresses(row)))

    def _service_changed(self, catalog: ServiceCatalog, change: Change[tuple[str, str], Service]) -> None:
        old, row = change.old, change.row
        if self._options.enable_internal_traffic_policy:
            self.ingested.note_service(old, row)
        if row is None:
            self.events["delete"] += 1
            catalog.delete_service(ServiceName(*change.key))
            return
        self.events["add" if old is None else "update"] += 1
        self._report_faults(old, row)
        catalog.upsert_service(row)

    def _slice_changed(self, catalog: ServiceCatalog, change: Change[tuple[str, str], EndpointSlice]) -> None:
        """Update the old and the new service of a slice: its service label may change."""
        old, row = change.old, change.row
        if old is not None and (row is None or row.service != old.service):
            catalog.slices_changed(ServiceName(old.namespace, old.service))
        if row is not None and row.service:
            self.terminating += terminating_addresses(row, self._options)
            self._report_weight(old, row)
            self._report_backends(old, row)
            catalog.slices_changed(ServiceName(row.namespace, row.service))

    def _report_weight(self, old: EndpointSlice | None, row: EndpointSlice) -> None:
        given = row.metadata.annotations
        if self._log is None or not given or (old is not None and old.annotations == row.annotations):
            return
        fault = ""
        try:
            weight_of(row)
        except ValueError as error:
            fault = str(error)
        maglev = self._options.bpf_lb_algorithm == "maglev" or self._options.bpf_lb_algorithm_annotation
        if not fault and WEIGHT in given and not maglev:
            fault = "weights count with bpf-lb-algorithm=maglev alone"
        if fault:
            self._log.warning(
                "annotation of an EndpointSlice has no effect",
                slice=f"{row.namespace}/{row.name}", annotation=WEIGHT, reason=fault,
            )  # fmt: skip

    def _report_backends(self, old: EndpointSlice | None, row: EndpointSlice) -> None:
        """Log invalid addresses of endpoints, once per change."""
        refused = refused_backends(row)
        if not refused or self._log is None or (old is not None and refused_backends(old) == refused):
            return
        self._log.warning(
            "backends of a service are refused",
            service=f"{row.namespace}/{row.service}", slice=row.name, addresses=", ".join(refused),
            reason="loopback, link-local, multicast and unspecified addresses are no backends",
        )  # fmt: skip

    def _report_faults(self, old: Service | None, row: Service) -> None:
        """Log annotations and fields of a service without effect, once per change."""
        log = self._log
        if log is None or not served_by(row.labels, self._options.k8s_service_proxy_name):
            return
        name = f"{row.namespace}/{row.name}"
        if row.metadata.annotations and (old is None or old.annotations != row.annotations):
            for annotation, fault in faults_of(row, self._options):
                log.warning(
                    "annotation of a service has no effect", service=name, annotation=annotation, reason=fault
                )
        if old is None or old.spec != row.spec:
            for part, fault in unsupported_parts(row, self._options):
                log.warning("part of a service is not served", service=name, part=part, reason=fault)

    def _pod_changed(self, catalog: ServiceCatalog, change: Change[tuple[str, str], Pod]) -> None:
        """Serve host ports of this node's pods, and reserve the addresses of all pods."""
        old, row = change.old, change.row
        if row is not None and row.spec.node_name == self._node.name:
            catalog.upsert_pod(row)
        elif old is not None:
            catalog.delete_pod(old.namespace, old.name)
        known = row or old
        if known is not None:
            name = f"pod {known.namespace}/{known.name}"
            catalog.reserve(name, pod_reservations(row) if row is not None else ())

    def _redirect_changed(
        self, catalog: ServiceCatalog, change: Change[tuple[str, str], CiliumLocalRedirectPolicy]
    ) -> None:
        """Apply a policy; a refused one redirects nothing, and its row has the error."""
        row = change.row
        known = row or change.old
        if known is None:
            return
        name = ServiceName(known.namespace, known.name)
        self._invalid_redirects.pop(name, None)
        before = name in catalog.redirects
        if row is not None:
            try:
                redirect = read_redirect(row)
            except ValueError as error:
                self._invalid_redirects[name] = LocalRedirect(name, row.metadata.uid, error=str(error))
                if self._log is not None:
                    self._log.warning("local redirect policy refused", policy=str(name), error=str(error))
            else:
                self._report_unpaired(name, redirect)
                catalog.upsert_redirect(redirect)
                self.ingested.note("local_redirect_policies", before, after=True)
                return
        catalog.delete_redirect(name)
        self.ingested.note("local_redirect_policies", before, after=False)

    def _report_unpaired(self, name: ServiceName, redirect: RedirectPolicy) -> None:
        """Log the ports that a policy does not redirect, as they match no backend port."""
        ports = ", ".join(f"{each.name} ({each.port})" for each in redirect.unpaired)
        if ports and self._log is not None:
            self._log.warning(
                "ports of a local redirect policy are not redirected",
                policy=str(name), ports=ports,
                reason="redirectBackend.toPorts has no port of the name and protocol",
            )  # fmt: skip

    def _report(self, catalog: ServiceCatalog) -> None:
        """Publish refused and conflicting requests."""
        self._publish_redirects(catalog)
        self._report_conflicts(catalog)
        self._report_refused(catalog)
        self._report_remote(catalog)

    def _report_remote(self, catalog: ServiceCatalog) -> None:
        """Log refused backends of remote clusters, once per change."""
        before, now = self._refused_backends, dict(catalog.refused_backends)
        if now == before:
            return
        self._refused_backends = now
        if self._log is None:
            return
        for name, one in _added(before, now):
            self._log.warning(
                "Conflicting service backend IP" if one.conflict else "remote backend is refused",
                service=str(name), cluster=one.cluster, address=one.address, reason=one.reason,
            )  # fmt: skip

    def _report_refused(self, catalog: ServiceCatalog) -> None:
        """Put refused addresses in the table, and log new ones."""
        before, now = self._refused_addresses, dict(catalog.refused)
        if now == before:
            return
        self._refused_addresses = now
        if self._reports.refused is not None:
            with self._reports.refused.txn() as rows:
                rows.replace_all(one for several in now.values() for one in several)
        if self._log is None:
            return
        for _, one in _added(before, now):
            what, of = ("host port", "pod") if one.part == HOST_IP else ("service", "service")
            self._log.warning(
                f"address of a {what} is {'not announced' if one.announced_only else 'refused'}",
                **{of: one.object_name}, part=one.part, address=str(one.address), reason=one.reason,
            )  # fmt: skip

    def _publish_redirects(self, catalog: ServiceCatalog) -> None:
        before, self._refused_redirects = self._refused_redirects, dict(catalog.refused_redirects)
        for name, reason in self._refused_redirects.items():
            if before.get(name) != reason and self._log is not None:
                self._log.warning("local redirect policy refused", policy=str(name), error=reason)
        if self._reports.redirects is None:
            return
        rows_now = [_local_redirect(catalog, redirect) for redirect in catalog.redirects.values()]
        with self._reports.redirects.txn() as rows:
            rows.replace_all([*rows_now, *self._invalid_redirects.values()])

    def _report_conflicts(self, catalog: ServiceCatalog) -> None:
        """Put frontends with several claims in the table, and log new conflicts."""
        before, now = self._conflicts, dict(catalog.contested)
        if now == before:
            return
        self._conflicts = now
        if self._reports.conflicts is not None:
            with self._reports.conflicts.txn() as rows:
                rows.replace_all(ServiceConflict(key, one, tuple(rest)) for key, (one, *rest) in now.items())
        lost: dict[tuple[ServiceName, ServiceName], dict[str, None]] = {}
        for key, (served, *rest) in now.items():
            held = before.get(key, ())
            for name in rest:
                if name not in held[1:] or held[0] != served:
                    lost.setdefault((name, served), {})[repr(key.address)] = None
        if self._log is None:
            return
        protocols = self._options.bpf_lb_proto_diff
        reason = "both claim them" if protocols else "both claim them, and bpf-lb-proto-diff is off"
        for (name, served), addresses in lost.items():
            self._log.warning(
                "addresses of a service are served for another one",
                service=str(name), served=str(served), addresses=", ".join(addresses), reason=reason,
            )  # fmt: skip

    def _update_node(
        self,
        catalog: ServiceCatalog,
        *,
        labels: Mapping[str, str] | None = None,
        addresses: tuple[IPAddress, ...] | None = None,
    ) -> None:
        """Apply changed labels or node port addresses of this node."""
        node = self._node
        if labels is not None:
            zone, exposure = labels.get(ZONE_LABEL, ""), labels.get(EXPOSURE_LABEL, "")
            node = msgspec.structs.replace(node, zone=zone, exposure=exposure, labels=labels)
        if addresses is not None:
            node = msgspec.structs.replace(node, node_port_addresses=addresses)
        if node == self._node:
            return
        self._node = node
        catalog.move(node)

    def _node_changed(self, catalog: ServiceCatalog, change: Change[tuple[str, str], NodeObject]) -> None:
        """Apply the labels of this node; other nodes are ignored."""
        row = change.row
        if row is None or row.name != self._node.name:
            return
        self._update_node(catalog, labels=row.labels)


async def _in_slices(
    catalog: ServiceCatalog,
    feed: Callable[[ServiceCatalog, Item], None],
    batch: Sequence[Item],
    delays: ImplementationDelays | None = None,
) -> None:
    """Apply a batch in transactions of some milliseconds; the event loop runs in between.

    A row that changes meanwhile is in a later batch again; other tables are always read in their current
    state.
    """
    fed = 0
    while fed < len(batch):
        if fed:
            await anyio.lowlevel.checkpoint()
        time_slice = TimeSlice()
        with collector_paused(), delays or nullcontext(), catalog.changes:
            while fed < len(batch):
                part = batch[fed : fed + STEP]
                if delays is not None:
                    delays.expect(part)
                for change in part:
                    feed(catalog, change)
                fed += STEP
                if time_slice.over:
                    break


def _addresses(device: Device | None) -> tuple[IPAddress, ...]:
    """Return the addresses that host ports may use: none of the agent's own devices."""
    if device is None or device.name.startswith(OURS):
        return ()
    return tuple(each.ip for each in device.addresses)


def _local_redirect(catalog: ServiceCatalog, redirect: RedirectPolicy) -> LocalRedirect:
    frontends = tuple(catalog.redirected.get(redirect.name, ()))
    used = {str(backend.address.ip) for frontend in frontends for backend in frontend.backends}
    names = catalog.pods_of(redirect.name.namespace) if used else {}
    pods = tuple((ip, names[ip]) for ip in sorted(used) if ip in names)
    error = catalog.refused_redirects.get(redirect.name, "")
    return LocalRedirect(redirect.name, redirect.uid, redirect, error, frontends, pods)


def _cluster_node_changed(catalog: ServiceCatalog, change: Change[str, ClusterNode]) -> None:
    """Reserve the addresses of a node and of its pods against services."""
    row = change.row
    found = node_reservations(row.name, row.addresses, row.all_cidrs()) if row is not None else ()
    catalog.reserve(f"node {change.key}", found)


def _remote_changed(catalog: ServiceCatalog, change: Change[RemoteServiceKey, RemoteService]) -> None:
    _, namespace, name = change.key
    catalog.remote_changed(ServiceName(namespace, name))


def _override(catalog: ServiceCatalog, change: Change[FrontendKey, ManualService]) -> None:
    if change.row is not None:
        catalog.override(change.row.key, change.row.frontend)
    else:
        catalog.clear_override(change.key)


def _override_state(catalog: ServiceCatalog, change: Change[ServiceAddress, ManualState]) -> None:
    if change.row is not None:
        catalog.set_state(change.row.address, change.row.state)


def _added(
    before: Mapping[ServiceName, Collection[Item]], now: Mapping[ServiceName, Collection[Item]]
) -> Iterator[tuple[ServiceName, Item]]:
    """Yield the new values of each key."""
    for key, values in now.items():
        for value in values:
            if value not in before.get(key, ()):
                yield key, value
