"""What is known of remote clusters: the rows, and the tables that connections write.

Source: Cilium 1.17, the keys of remote clusters: services as pkg/clustermesh/store.ClusterService, and the
        status of each cluster as /v1/healthz shows it.
Why:    a lost connection removes nothing. Rows stay until a listing lacks their keys, or the cluster's
        configuration is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import anyio
import msgspec

from cells.cluster.ipcache.rows import OF_CLUSTER, IpcacheEntry, Prefix, Source
from cells.cluster.nodes import MeshNodes
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.policy.maps import KnownRemoteClusters
from lifecycle import Duration, Named, ReadTable, Settings, Table, Tables, config, minutes, module, provide

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
"""The index by the name of the cluster."""
BY_NAME: Final = "name"
"""The index of services by namespace and name: those of all clusters that one local service may use."""
KINDS: Final = ("nodes", "services", "endpoints", "identities")
"""What is read of a remote cluster, by its names in the status."""
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
"""Address to port name to port."""

RemoteServiceKey = tuple[str, str, str]
"""Cluster, namespace and name."""


class RemoteService(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A global service of a remote cluster, as that cluster publishes it.

    Addresses are checked: each key of ``frontends`` and ``backends`` is an IP address, as it was written.
    """

    cluster: str
    """The name of the remote cluster."""
    namespace: str
    name: str
    cluster_id: int
    frontends: Ports = {}
    backends: Ports = {}
    """Without any the service exists all the same, and has no backends."""
    shared: bool = False
    """Whether the remote cluster lets others use its backends."""

    @property
    def key(self) -> RemoteServiceKey:
        """Of its row."""
        return self.cluster, self.namespace, self.name


MeshServices = Annotated[ReadTable[RemoteServiceKey, RemoteService], Named("clustermesh")]
"""The table ``global-services``: valid and shared services of all remote clusters, none of the own cluster.

A service that is no longer shared is deleted here. BY_NAME finds the rows of a namespace and name.

The table is initialized once all clusters that were configured at the start have listed their services, or
clustermesh-sync-timeout has passed. Before that a missing row means nothing, so no backend may be deleted for
want of one; what is local must not wait for it. Without a mesh it is empty, and initialized.
"""


class RemoteClusterConfig(msgspec.Struct, frozen=True):
    """What a remote cluster announces of itself, as the status shows it."""

    required: bool = True
    retrieved: bool = False
    cluster_id: int = 0
    kvstoremesh: bool = False
    """Whether kvstoremesh copies the keys: they are below ``cilium/cache``."""
    sync_canaries: bool = False
    """Whether each prefix has a key that appears when all of it is there."""
    service_exports_enabled: bool | None = None
    """Whether it exports services of the MCS API; None: it does not know of them."""


class RemoteCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``remote-clusters``, by name: how the connection to a remote cluster is.

    The numbers of its nodes, services, endpoints and identities are those of the rows by BY_CLUSTER.
    """

    name: str
    connected: bool = False
    """Whether there is a connection to its etcd."""
    status: str = CONNECTING
    """The state of the connection, for people."""
    config: RemoteClusterConfig | None = None
    """None: no connection has been established yet."""
    synced: frozenset[str] = frozenset()
    """What has been listed over this connection: ``nodes``, ``services``, ``endpoints``, ``identities``."""
    failures: int = 0
    """How often an established connection was lost."""
    last_failure: float = 0.0
    """When that was last, in seconds since the epoch; 0: never."""

    @property
    def ready(self) -> bool:
        """Whether everything of it is known, and followed."""
        retrieved = self.config is not None and self.config.retrieved
        return self.connected and retrieved and len(self.synced) == len(KINDS)


class RemoteClusterFile(msgspec.Struct, frozen=True):
    """A row of the table ``remote-cluster-configs``, by name: how to reach a remote cluster."""

    name: str
    """The name of the file, and of the cluster."""
    path: Path
    digest: str
    """SHA-256 of its contents: with another one the cluster is connected to again."""


class RemoteAddress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the table ``remote-cluster-addresses``: an address of a pod or node of a remote cluster."""

    cluster: str
    name: str
    """The key in the remote etcd."""
    prefix: Prefix
    identity: int
    """0: its identity is none of the cluster's. It counts as an entry, and is not used."""
    node: str
    """The address of its node; empty if unknown."""
    encrypt_key: int = 0
    namespace: str = ""
    pod: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Of its row."""
        return self.cluster, self.name

    @property
    def resource(self) -> str:
        """The owner of the claim in the ipcache."""
        kind = f"{OF_CLUSTER}{self.cluster}"
        return f"{kind}/{self.namespace}/{self.pod}" if self.pod else f"{kind}//{self.name}"

    @property
    def claim(self) -> IpcacheEntry | None:
        """It, by way of its node; None for one that is not used."""
        if not self.identity:
            return None
        return IpcacheEntry(
            prefix=self.prefix,
            identity=self.identity,
            source=Source.CLUSTERMESH,
            resource=self.resource,
            tunnel_endpoint=_tunnel_endpoint(self.node),
            encrypt_key=self.encrypt_key,
        )


def _tunnel_endpoint(node: str) -> IPv4Address:
    ip = ip_address(node) if node else None
    return ip if isinstance(ip, IPv4Address) else IPv4Address(0)


class RemoteIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the table ``remote-cluster-identities``: a number, and the labels it stands for."""

    cluster: str
    name: str
    """The key in the remote etcd: the number as text."""
    number: int
    labels: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Of its row."""
        return self.cluster, self.name


# What a starting agent waits for: nothing is removed for want of a remote cluster before all are known.
#
# Source: Cilium 1.17, NodesSynced, ServicesSynced and IPIdentitiesSynced.

UNSYNCED: Final = (
    "Failed waiting for clustermesh synchronization, expect possible disruption of cross-cluster connections"
)


class MeshGates:
    """Which clusters of the start have yet to list what.

    The tables of nodes and services are initialized by them, and the ipcache. Restored endpoints, which have
    the policies of the agent before, wait as for rules: see KnownRemoteClusters.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._expected: set[tuple[str, str]] = set()
        self._synced: set[tuple[str, str]] = set()
        self._news = anyio.Event()
        self._settled = not enabled

    def expect(self, clusters: Iterable[str]) -> None:
        """These clusters are waited for."""
        self._expected = {(cluster, kind) for cluster in clusters for kind in KINDS} - self._synced

    def synced(self, cluster: str, kind: str) -> None:
        """All of a kind has been listed."""
        self._synced.add((cluster, kind))
        self._expected.discard((cluster, kind))
        self._notify()

    def forget(self, cluster: str) -> None:
        """The cluster is not configured any more."""
        self._expected -= {(cluster, kind) for kind in KINDS}
        self._notify()

    async def wait(self, *kinds: str) -> None:
        """Wait until all clusters have listed these."""
        while self.unsynced(*kinds):
            await self._news.wait()

    def unsynced(self, *kinds: str) -> list[str]:
        """The clusters that have not listed one of these yet."""
        return sorted({cluster for cluster, kind in self._expected if kind in kinds})

    def settle(self) -> None:
        """All identities and addresses are in force, or the time for them has passed."""
        self._settled = True
        self._notify()

    async def known(self) -> None:
        """KnownRemoteClusters."""
        while not self._settled:
            await self._news.wait()

    @property
    def missing(self) -> str:
        """KnownRemoteClusters."""
        names = ", ".join(self.unsynced(*KINDS))
        return "" if self._settled else f"remote clusters{f': {names}' if names else ''}"

    def _notify(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class MeshTables:
    """All tables of the mesh. Without one they are empty and initialized, and nothing writes them."""

    def __init__(self, agent: AgentConfig, settings: MeshSettings, tables: Tables) -> None:
        self.directory = settings.clustermesh_config if agent.cluster_id else None
        """Where remote clusters are configured; None: there is no mesh."""
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
        """How many entries of a kind of KINDS a cluster has."""
        tables: tuple[ReadTable[Any, Any], ...] = (
            self.nodes,
            self.services,
            self.addresses,
            self.identities,
        )
        return len(tables[KINDS.index(kind)].by(BY_CLUSTER).keys(cluster))


def mesh_nodes(mesh: MeshTables) -> MeshNodes:
    """Nodes of remote clusters."""
    return mesh.nodes


def known_clusters(mesh: MeshTables) -> KnownRemoteClusters:
    """Whether remote clusters are known."""
    return mesh.gates


def mesh_services(mesh: MeshTables, tables: Tables) -> MeshServices:
    """Services of remote clusters that local ones may use."""
    found = mesh.services.filter(lambda row: row.shared, name="global-services")
    if mesh.enabled:
        tables.add(found)
    found.lookup(BY_NAME, lambda row: ((row.namespace, row.name),))
    return found


cell = module(
    "mesh-tables",
    "What is known of remote clusters",
    config(MeshSettings),
    provide(MeshTables, mesh_nodes, mesh_services, known_clusters),
)
