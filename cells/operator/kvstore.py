"""The cluster's work in the kvstore: heartbeat, cluster configuration, global services, identity GC.

The heartbeat shows agents that the store is alive. The cluster configuration and the global services, under
leases, are for agents of other clusters. Unused identities are deleted here, since a node cannot determine
whether other nodes use the identities it has allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace

from cells.base.metrics import Collector, MetricFamily, gauge
from cells.kubernetes.objects.core import ENDPOINT_SLICES, EndpointSlice
from cells.kvstore.model import (
    CLUSTER_CONFIG,
    HEARTBEAT,
    HEARTBEAT_INTERVAL,
    IDS,
    LOCKS,
    SERVICES,
    VALUES,
    Compare,
    KeyValue,
    delete,
    put,
)
from cells.kvstore.own_keys import OwnKey, keep_keys
from cells.kvstore.store import KVStore, lock
from cells.observe.metrics import Metrics
from cells.operator.gc import IdentityPasses
from cells.operator.objects import CLUSTER_IDENTITIES, CLUSTER_SERVICES, ClusterObjects, wait_any
from cells.operator.options import ServedCluster
from lifecycle import Jobs, Lifecycle, Logger, Settings, Table, Tables, config, invoke, module, provide

__all__ = ["ClusterConfig", "IdentityComparison", "KVStoreGC", "ServiceExport", "cell"]


# Compares the two stores of identities in the doublewrite modes, to show when the other one can be read.
#
# Source: Cilium 1.17, the operator's metrics doublewrite_identity_*.

HEADLESS_IP: Final = "None"
INTERVAL: Final = 60.0
PREFIX: Final = "cilium_operator_doublewrite_identity"


class IdentityComparison:
    """Compares CiliumIdentities with the kvstore every minute, and reports the differences as metrics."""

    def __init__(
        self,
        cluster: ServedCluster,
        store: KVStore,
        objects: ClusterObjects | None,
        metrics: Metrics | None,
        *,
        jobs: Jobs,
        lifecycle: Lifecycle,
    ) -> None:
        if objects is None or metrics is None or not (store.enabled and cluster.compares_identities):
            return
        self._store = store
        self._objects = objects.table(CLUSTER_IDENTITIES)
        self._in_objects: set[str] = set()
        self._in_keys: set[str] = set()
        metrics.report(lifecycle, Collector("doublewrite", self._collect))
        jobs.timer("compare identities", self.compare, INTERVAL).trigger()

    async def compare(self) -> None:
        """Compare both stores. Raises StoreError."""
        await self._objects.wait_initialized()
        keys, _ = await self._store.client.list_prefix(IDS)
        self._in_keys = {kv.key.removeprefix(IDS) for kv in keys}
        self._in_objects = {row.name for row in self._objects.all()}

    async def _collect(self) -> Iterable[MetricFamily]:
        objects, keys = self._in_objects, self._in_keys
        return [
            gauge(f"{PREFIX}_crd_total_count", "Identities that are CiliumIdentities.", len(objects)),
            gauge(f"{PREFIX}_kvstore_total_count", "Identities in the kvstore.", len(keys)),
            gauge(f"{PREFIX}_crd_only_count", "CiliumIdentities not in the kvstore.", len(objects - keys)),
            gauge(f"{PREFIX}_kvstore_only_count", "Identities in the kvstore only.", len(keys - objects)),
        ]


# Writes the configuration of the cluster, which agents of other clusters read.
#
# Source: Cilium 1.17, the key cilium/cluster-config/NAME. It announces no sync canaries
#         (cilium/synced/NAME/...), since every agent of the cluster writes to this store.


class Capabilities(msgspec.Struct, frozen=True, rename="camel"):
    """The features that readers may use."""

    max_connected_clusters: int = 255
    service_exports_enabled: bool = False


class Configuration(msgspec.Struct, frozen=True):
    """The value of the key cilium/cluster-config/NAME."""

    id: int | msgspec.UnsetType
    """Unset outside a mesh."""
    capabilities: Capabilities


class ClusterConfig:
    """Maintains the key of the configuration under a lease."""

    def __init__(self, store: KVStore, cluster: ServedCluster, *, jobs: Jobs, tables: Tables) -> None:
        if not store.enabled:
            return
        keys: Table[str, OwnKey] = Table("cluster-config-keys", key=lambda row: row.key)
        value = msgspec.json.encode(
            Configuration(cluster.number or msgspec.UNSET, Capabilities(cluster.most_clusters))
        )
        with keys.txn() as rows:
            rows.put(OwnKey(f"{CLUSTER_CONFIG}{cluster.name}", value.decode()))
        keep_keys(store, keys, "cluster-config", jobs=jobs, tables=tables)


# Writes global services, for agents of other clusters that read this store.
#
# Source: Cilium 1.17, the operator's synchronize-k8s-services; pkg/service/store.ClusterService.


class ServiceExportSettings(Settings, frozen=True):
    """Settings of the export of global services."""

    synchronize_k8s_services: bool = True
    """In a mesh, write global services and their backends to the kvstore, for other clusters."""


class ExportedPort(msgspec.Struct, frozen=True, rename="pascal"):
    """A port of a service or of a backend."""

    protocol: str
    port: int


class ExportedService(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The value of a service's key."""

    cluster: str
    namespace: str
    name: str
    frontends: dict[str, dict[str, ExportedPort]]
    """Address -> name of the port -> port."""
    backends: dict[str, dict[str, ExportedPort]]
    hostnames: dict[str, str]
    """Address -> hostname of the endpoint, as pods of StatefulSets have."""
    labels: dict[str, str]
    selector: dict[str, str]
    include_external: bool = True
    shared: bool = True
    cluster_id: int = msgspec.field(name="clusterID")


class ServiceExport:
    """Maintains a key for each global and shared service, once services and backends are synchronized."""

    def __init__(
        self,
        store: KVStore,
        cluster: ServedCluster,
        settings: ServiceExportSettings,
        objects: ClusterObjects | None,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        if objects is None or not (store.enabled and cluster.number and settings.synchronize_k8s_services):
            return
        self._store = store
        self._cluster = cluster
        self._services = objects.table(CLUSTER_SERVICES)
        self._slices = objects.table(ENDPOINT_SLICES)
        self._slices_of = self._slices.lookup("service", lambda row: ((row.namespace, row.service),))
        self._keys: Table[str, OwnKey] = Table("exported-services", key=lambda row: row.key)
        self._known = self._keys.initializer("services and their backends")
        self._left: dict[str, str] = {}
        """Keys of an earlier operator."""
        jobs.one_shot("export services", self._run)
        keep_keys(store, self._keys, "services/v1", jobs=jobs, tables=tables, previous=lambda: self._left)

    async def _run(self) -> None:
        """Follow services and backends; runs forever. Raises StoreError."""
        await self._services.wait_initialized()
        await self._slices.wait_initialized()
        found, _ = await self._store.client.list_prefix(f"{SERVICES}{self._cluster.name}/")
        self._left = {kv.key: kv.value.decode(errors="replace") for kv in found}
        services, slices = self._services.changes(), self._slices.changes()
        services.take(), slices.take()
        with self._keys.txn() as rows:
            exported = [self._exported(row.namespace, row.name) for row in self._services.all()]
            rows.replace_all(one for one in exported if one is not None)
        self._known.done()
        while True:
            await wait_any(services.wait, slices.wait)
            names = {change.key for change in services.take()}
            both = [row for change in slices.take() for row in (change.old, change.row) if row is not None]
            names |= {(row.namespace, row.service) for row in both}
            with self._keys.txn() as rows:
                for key in names:
                    if (one := self._exported(*key)) is not None:
                        rows.put(one)
                    else:
                        rows.delete(self._key(*key))

    def _key(self, namespace: str, name: str) -> str:
        return f"{SERVICES}{self._cluster.name}/{namespace}/{name}"

    def _exported(self, namespace: str, name: str) -> OwnKey | None:
        """Return the key of a service, or None if other clusters must not use it."""
        from cells.services.model.frontends import is_shared

        service = self._services.get((namespace, name))
        if service is None or service.spec.type == "ExternalName" or not is_shared(service):
            return None
        ports = {port.name: ExportedPort(port.protocol, port.port) for port in service.spec.ports or ()}
        slices = own_slices(self._slices_of.get((namespace, name)))
        backends = exported_backends(slices)
        value = ExportedService(
            cluster=self._cluster.name,
            namespace=namespace,
            name=name,
            frontends={ip: ports for ip in service.spec.cluster_ips or () if ip != HEADLESS_IP},
            backends=backends,
            hostnames={ip: hostname for ip, hostname in hostnames_of(slices) if ip in backends},
            labels=service.labels,
            selector=service.spec.selector or {},
            cluster_id=self._cluster.number,
        )
        return OwnKey(self._key(namespace, name), msgspec.json.encode(value, order="sorted").decode())


def own_slices(slices: Iterable[EndpointSlice]) -> list[EndpointSlice]:
    """Return the slices of this cluster: remote clusters export their own backends."""
    from cells.services.model import MANAGED_BY, OF_OTHER_CLUSTERS

    return [one for one in slices if one.labels.get(MANAGED_BY) != OF_OTHER_CLUSTERS]


def hostnames_of(slices: Iterable[EndpointSlice]) -> Iterator[tuple[str, str]]:
    """Yield the addresses of endpoints that have a hostname, with the hostname."""
    from cells.services import parse_address

    for slice_ in slices:
        for endpoint in slice_.endpoints or ():
            for ip in map(parse_address, endpoint.addresses or ()) if endpoint.hostname else ():
                yield str(ip), endpoint.hostname or ""


def exported_backends(slices: Sequence[EndpointSlice]) -> dict[str, dict[str, ExportedPort]]:
    """Return a service's backends, as address -> name of the port -> port."""
    from cells.services import PROTOCOLS, LoadBalancerOptions
    from cells.services.model.backends import backends_of

    names = {number: name for name, number in PROTOCOLS.items()}
    found: dict[str, dict[str, ExportedPort]] = {}
    for name, backends in backends_of(slices, LoadBalancerOptions()).items():
        for one in backends:
            port = ExportedPort(names[one.address.protocol], one.address.port)
            found.setdefault(str(one.address.ip), {})[name] = port
    return found


# Writes the heartbeat, and deletes identities without a node.
#
# Source: Cilium 1.17, RunGC of the kvstore's allocator: a number without a node in two passes, and not
# written
#         between them, is deleted under the lock of its labels.

KVSTORE: Final = "kvstore"
PATIENCE: Final = 60.0
"""Timeout of the lock in seconds."""


class KVStoreGC:
    """Deletes unused identities every identity-gc-interval, and writes the heartbeat."""

    def __init__(self, store: KVStore, passes: IdentityPasses, *, jobs: Jobs, log: Logger) -> None:
        self._store = store
        self._log = log
        self._unused: dict[str, int] = {}
        """Key of a number without a node in the last pass -> its mod_revision."""
        self._passes = passes
        if not store.enabled:
            return
        passes.expect(KVSTORE)
        jobs.timer("heartbeat", self.write_heartbeat, HEARTBEAT_INTERVAL).trigger()
        if passes.interval:
            jobs.timer("identities", self.collect, passes.interval)

    async def write_heartbeat(self) -> None:
        """Write the current time. Raises StoreError."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self._store.client.txn(put(HEARTBEAT, now.encode()))

    async def collect(self) -> None:
        """Run one pass. Raises StoreError."""
        with self._passes.counted(KVSTORE):
            await self._collect()

    async def _collect(self) -> None:
        client = self._store.client
        numbers, _ = await client.list_prefix(IDS)
        used, _ = await client.list_prefix(VALUES)
        in_use = {kv.key.removeprefix(VALUES).rpartition("/")[0] for kv in used}
        before, self._unused = self._unused, {}
        deleted = 0
        for kv in numbers:
            if kv.value.decode(errors="replace") in in_use:
                continue
            if before.get(kv.key) != kv.mod_revision:
                self._unused[kv.key] = kv.mod_revision
            elif await self._delete(kv):
                deleted += 1
                if deleted % self._passes.most == 0:
                    await anyio.sleep(self._passes.within)
        self._passes.record(KVSTORE, alive=len(numbers) - deleted - len(self._unused), deleted=deleted)
        if deleted:
            self._log.info("deleted identities that no node uses", count=deleted)

    async def _delete(self, master: KeyValue) -> bool:
        """Delete a number, unless a node uses it by now. Raises StoreError."""
        client, labels = self._store.client, master.value.decode(errors="replace")
        with anyio.move_on_after(PATIENCE):
            async with lock(client, f"{LOCKS}{labels}.lock") as held:
                if await client.first(f"{VALUES}{labels}/") is not None:
                    return False
                unchanged = Compare(master.key, "mod", master.mod_revision)
                return (await client.txn(delete(master.key), when=[held.held, unchanged])).succeeded
        return False


# Metrics of the kvstore client.
#
# Source: Cilium 1.17: the agent's metrics of the kvstore, with the prefix cilium_operator_.


def collect_metrics(
    store: KVStore, cluster: ServedCluster, metrics: Metrics | None, lifecycle: Lifecycle
) -> None:
    """Report the metrics of the kvstore client while this operator leads."""
    if metrics is None or not store.enabled:
        return

    async def collect() -> Iterable[MetricFamily]:
        return [
            replace(one, name=one.name.replace("cilium_", "cilium_operator_", 1))
            for one in store.metrics.families(cluster.name)
        ]

    metrics.report(lifecycle, Collector("kvstore", collect))


cell = module(
    "kvstore-gc",
    "Heartbeat of the kvstore, keys for other clusters, and identity GC",
    config(ServiceExportSettings),
    provide(KVStoreGC, ClusterConfig, ServiceExport, IdentityComparison),
    invoke(KVStoreGC, ClusterConfig, ServiceExport, IdentityComparison, collect_metrics),
)
