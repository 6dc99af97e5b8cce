"""The tables of the cluster mesh: remote clusters, and their nodes, services, addresses and identities.

Source: Cilium 1.17, the values of remote clusters (pkg/clustermesh/store.ClusterService), and the status
        of each cluster in /v1/healthz.
Why:    a lost connection deletes no row. Rows are deleted when a list lacks their keys, or when the
        configuration of the cluster is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import anyio
import msgspec

from cells.cluster.ipcache.rows import OF_CLUSTER, IpcacheEntry, Prefix, Source, tunnel_endpoint_of
from cells.cluster.nodes import MeshNodes
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.remote_endpoints import PeerPods
from cells.config import AgentConfig
from cells.kubernetes.objects.cilium_endpoint import NamedPort
from cells.policy.maps import KnownRemoteClusters
from lifecycle import (
    Duration,
    Member,
    Named,
    ReadTable,
    Settings,
    Table,
    Tables,
    config,
    minutes,
    module,
    provide,
)

__all__ = [
    "BY_CLUSTER",
    "BY_NAME",
    "CONNECTING",
    "KINDS",
    "UNSYNCED",
    "MeshServices",
    "MeshSettings",
    "MeshTables",
    "RemoteAddress",
    "RemoteCluster",
    "RemoteClusterConfig",
    "RemoteClusterFile",
    "RemoteIdentity",
    "RemotePort",
    "RemoteService",
    "RemoteServiceKey",
    "cell",
]

BY_CLUSTER: Final = "cluster"
"""The index by cluster name."""
BY_NAME: Final = "name"
"""The index of services by namespace and name: the services that one local service is merged with."""
KINDS: Final = ("nodes", "services", "endpoints", "identities")
"""The kinds of keys, as named in the status."""
CONNECTING: Final = "Waiting for initial connection to be established"


class MeshSettings(Settings, frozen=True):
    """Which other clusters this one is connected to."""

    clustermesh_config: Path | None = None
    """Directory with a file for each remote cluster, by the cluster's name. It configures a client of etcd:
    endpoints, trusted-ca-file, cert-file, key-file. It counts with a cluster-id."""

    clustermesh_sync_timeout: Duration = minutes(1)
    """How long a starting agent waits for remote clusters before it removes what it knows of none of them."""


class RemotePort(NamedTuple):
    """A port of a service or of a backend."""

    protocol: str
    """``TCP``, ``UDP`` or ``SCTP``."""
    port: int


Ports = Mapping[str, Mapping[str, RemotePort]]
"""IP address to port name to port."""

RemoteServiceKey = tuple[str, str, str]
"""Cluster, namespace and name."""


class RemoteService(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A global service of a remote cluster.

    Addresses are valid: each key of ``frontends`` and ``backends`` is an IP address, in its original text
    form.
    """

    cluster: str
    """The name of the remote cluster."""
    namespace: str
    name: str
    cluster_id: int
    frontends: Ports = {}
    backends: Ports = {}
    """Empty if the service has no ready backends; the service still exists."""
    shared: bool = False
    """Whether other clusters may use its backends."""

    @property
    def key(self) -> RemoteServiceKey:
        """The key of its row."""
        return self.cluster, self.namespace, self.name


MeshServices = Annotated[ReadTable[RemoteServiceKey, RemoteService], Named("clustermesh")]
"""The table ``global-services``: valid and shared services of all remote clusters, none of the local cluster.

A service that is no longer shared is deleted here. BY_NAME finds the rows of a namespace and name.

The table is initialized once all clusters that were configured at the start have listed their services, or
clustermesh-sync-timeout has passed. Before that a missing row means nothing, so no backend may be deleted for
lack of one; local backends must not wait for it. Without a mesh the table is empty and initialized.
"""


class RemoteClusterConfig(msgspec.Struct, frozen=True):
    """The configuration that a remote cluster announces, as the status shows it."""

    required: bool = True
    retrieved: bool = False
    cluster_id: int = 0
    kvstoremesh: bool = False
    """Whether the etcd is a cache of kvstoremesh: keys are below ``cilium/cache``."""
    sync_canaries: bool = False
    """Whether each kind has a canary key, which appears once all its keys are written."""
    service_exports_enabled: bool | None = None
    """Whether it exports services of the MCS API; None if its Cilium predates the field."""


class RemoteCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``remote-clusters``, by name: the state of a connection.

    The numbers of nodes, services, endpoints and identities are counted from their tables by BY_CLUSTER.
    """

    name: str
    connected: bool = False
    """Whether its etcd is connected."""
    status: str = CONNECTING
    """The state of the connection as text."""
    config: RemoteClusterConfig | None = None
    """None before the first connection."""
    synced: frozenset[str] = frozenset()
    """The kinds that have been listed over this connection."""
    failures: int = 0
    """Number of lost connections."""
    last_failure: float = 0.0
    """Time of the last lost connection in seconds since the epoch; 0: none."""

    @property
    def ready(self) -> bool:
        """Whether the cluster is connected, and all kinds are listed."""
        retrieved = self.config is not None and self.config.retrieved
        return self.connected and retrieved and len(self.synced) == len(KINDS)


class RemoteClusterFile(msgspec.Struct, frozen=True):
    """A row of the table ``remote-cluster-configs``, by name: a configuration file."""

    name: str
    """The name of the file and of the cluster."""
    path: Path
    digest: str
    """SHA-256 of its contents: a different one causes a reconnect."""


class RemoteAddress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the table ``remote-cluster-addresses``: an address of a pod or node of a remote cluster."""

    cluster: str
    name: str
    """The key in the remote etcd, without its prefix."""
    prefix: Prefix
    identity: int
    """0 if the value had an identity of another cluster: the row is counted but not claimed."""
    node: str
    """The address of its node; empty if unknown."""
    encrypt_key: int = 0
    namespace: str = ""
    pod: str = ""
    ports: tuple[NamedPort, ...] = ()
    """The named ports of the pod; none without an identity."""

    @property
    def key(self) -> tuple[str, str]:
        """The key of its row."""
        return self.cluster, self.name

    @property
    def resource(self) -> str:
        """The resource of the claim in the ipcache."""
        kind = f"{OF_CLUSTER}{self.cluster}"
        return f"{kind}/{self.namespace}/{self.pod}" if self.pod else f"{kind}//{self.name}"

    @property
    def claim(self) -> IpcacheEntry | None:
        """The claim in the ipcache, with the node as tunnel endpoint; None without an identity."""
        if not self.identity:
            return None
        return IpcacheEntry(
            prefix=self.prefix,
            identity=self.identity,
            source=Source.CLUSTERMESH,
            resource=self.resource,
            tunnel_endpoint=tunnel_endpoint_of(self.node),
            encrypt_key=self.encrypt_key,
        )


class RemoteIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the table ``remote-cluster-identities``: a number and its labels."""

    cluster: str
    name: str
    """The key in the remote etcd: the number as text."""
    number: int
    labels: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """The key of its row."""
        return self.cluster, self.name


# The initial synchronization: a starting agent deletes nothing for lack of a remote row before it.
#
# Source: Cilium 1.17, NodesSynced, ServicesSynced and IPIdentitiesSynced.

UNSYNCED: Final = (
    "Failed waiting for clustermesh synchronization, expect possible disruption of cross-cluster connections"
)


class MeshGates:
    """Tracks which clusters configured at the start have not listed which kinds.

    The initializers of nodes, services and ipcache wait for them, and so do restored endpoints, which keep
    the policies of the previous agent until then (KnownRemoteClusters).
    """

    def __init__(self, *, enabled: bool) -> None:
        self._expected: set[tuple[str, str]] = set()
        self._synced: set[tuple[str, str]] = set()
        self._news = anyio.Event()
        self._opened = not enabled

    def expect(self, clusters: Iterable[str]) -> None:
        """Wait for these clusters."""
        self._expected = {(cluster, kind) for cluster in clusters for kind in KINDS} - self._synced

    def synced(self, cluster: str, kind: str) -> None:
        """Record that all keys of a kind are listed."""
        self._synced.add((cluster, kind))
        self._expected.discard((cluster, kind))
        self._notify()

    def forget(self, cluster: str) -> None:
        """Stop waiting for a cluster that is no longer configured."""
        self._expected -= {(cluster, kind) for kind in KINDS}
        self._notify()

    async def wait(self, *kinds: str) -> None:
        """Wait until all clusters have listed these kinds."""
        while self.unsynced(*kinds):
            await self._news.wait()

    def unsynced(self, *kinds: str) -> list[str]:
        """Return the clusters that have not listed all of these kinds."""
        return sorted({cluster for cluster, kind in self._expected if kind in kinds})

    def open(self) -> None:
        """Record that all identities and addresses are claimed, or that the timeout has passed."""
        self._opened = True
        self._notify()

    async def known(self) -> None:
        """Implement KnownRemoteClusters."""
        while not self._opened:
            await self._news.wait()

    @property
    def missing(self) -> str:
        """Implement KnownRemoteClusters."""
        names = ", ".join(self.unsynced(*KINDS))
        return "" if self._opened else f"remote clusters{f': {names}' if names else ''}"

    def _notify(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class MeshTables:
    """All tables of the mesh. Without a mesh they are empty and initialized."""

    def __init__(self, agent: AgentConfig, settings: MeshSettings, tables: Tables) -> None:
        self.directory = settings.clustermesh_config if agent.cluster_id else None
        """The directory of configuration files; None without a mesh."""
        self.sync_timeout = settings.clustermesh_sync_timeout
        self.gates = MeshGates(enabled=self.enabled)
        by_cluster = {BY_CLUSTER: lambda row: (row.cluster,)}
        self.files: Table[str, RemoteClusterFile] = Table("remote-cluster-configs", key=lambda row: row.name)
        self.clusters: Table[str, RemoteCluster] = Table("remote-clusters", key=lambda row: row.name)
        self.nodes: Table[str, ClusterNode] = Table(
            "remote-cluster-nodes", key=lambda row: row.full_name, indexes=by_cluster
        )
        self.services: Table[RemoteServiceKey, RemoteService] = Table(
            "remote-cluster-services", key=lambda row: row.key, indexes=by_cluster
        )
        """All valid services, shared or not."""
        self.addresses: Table[tuple[str, str], RemoteAddress] = Table(
            "remote-cluster-addresses", key=lambda row: row.key, indexes=by_cluster
        )
        self.identities: Table[tuple[str, str], RemoteIdentity] = Table(
            "remote-cluster-identities", key=lambda row: row.key, indexes=by_cluster
        )
        if self.enabled:
            tables.add(self.files, self.clusters, self.nodes, self.services, self.addresses, self.identities)

    @property
    def enabled(self) -> bool:
        """Whether there is a mesh."""
        return self.directory is not None

    def count(self, cluster: str, kind: str) -> int:
        """Return the number of rows of a kind that a cluster has."""
        tables: tuple[ReadTable[Any, Any], ...] = (
            self.nodes,
            self.services,
            self.addresses,
            self.identities,
        )
        return len(tables[KINDS.index(kind)].by(BY_CLUSTER).keys(cluster))


def mesh_nodes(mesh: MeshTables) -> MeshNodes:
    """Provide the nodes of remote clusters."""
    return mesh.nodes


def mesh_pods(mesh: MeshTables) -> Member[PeerPods]:
    """Provide the named ports of pods of remote clusters."""
    return PeerPods(mesh.addresses)


def known_clusters(mesh: MeshTables) -> KnownRemoteClusters:
    """Provide the gate that restored endpoints wait for."""
    return mesh.gates


def mesh_services(mesh: MeshTables, tables: Tables) -> MeshServices:
    """Provide the shared services of remote clusters."""
    found = mesh.services.filter(lambda row: row.shared, name="global-services")
    if mesh.enabled:
        tables.add(found)
    found.lookup(BY_NAME, lambda row: ((row.namespace, row.name),))
    return found


cell = module(
    "mesh-tables",
    "Tables of remote clusters",
    config(MeshSettings),
    provide(MeshTables, mesh_nodes, mesh_pods, mesh_services, known_clusters),
)
