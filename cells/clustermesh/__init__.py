"""Cluster mesh: nodes, services, addresses and identities of remote clusters, read from their etcds.

In:   the directory clustermesh-config, and an etcd for each of its files.
Out:  the tables of the mesh, which nodes and services use; claims in the ipcache; identities.
Why:  pods of several clusters reach each other, and policies select them by labels. Without a cluster-id or
      the directory, the connection code is not imported.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio import to_thread

from cells.base.metrics import Collector, MetricFamily, features, gauge
from cells.cluster.allocation.global_allocator import AllocationMode
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import ClusterNumbers
from cells.cluster.ipcache import Ipcache
from cells.cluster.nodes.node import ClusterNode
from cells.clustermesh import tables as mesh_tables
from cells.clustermesh.tables import (
    KINDS,
    UNSYNCED,
    MeshServices,
    MeshTables,
    RemoteAddress,
    RemoteClusterFile,
    RemoteIdentity,
)
from cells.config import AgentConfig, ChainingMode, cluster_name_fault
from cells.kubernetes.resources import ServiceAddresses
from cells.kvstore.store import KVStore
from lifecycle import (
    Change,
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    UsageError,
    group,
    invoke,
    module,
    provide,
    provide_private,
)
from lifecycle.jobs import TimeSlice
from lifecycle.settings import read_regular

if TYPE_CHECKING:
    from asyncinotify import Inotify

__all__ = ["ConfigDirectory", "cell"]


# Identities and addresses of remote clusters, for policies and the datapath.


class RemoteClaims:
    """Adds remote identities, and claims remote addresses in the ipcache."""

    def __init__(
        self,
        mesh: MeshTables,
        nodes: ReadTable[str, ClusterNode],
        identities: Identities,
        ipcache: Ipcache,
        *,
        jobs: Jobs,
    ) -> None:
        self._mesh = mesh
        self._identities = identities
        if not mesh.enabled:
            return
        from cells.remote.shared import AddressClaims

        self._claims = AddressClaims(mesh.addresses, nodes, ipcache)
        self._claimed = ipcache.table.initializer("clustermesh")
        jobs.observe("identities", mesh.identities.changes, self._learn)
        jobs.observe("addresses", self._batches, self._claim)

    async def complete_initial(self) -> None:
        """Process all rows, and report the initial claims as complete. Raises OSError."""
        for row in self._mesh.identities.all():
            self._identities.learn(row.number, row.labels)
        await self._claim(None)
        self._claimed.done()

    async def _learn(self, changes: Sequence[Change[tuple[str, str], RemoteIdentity]]) -> None:
        time_slice = TimeSlice()
        for change in changes:
            if change.row is not None:
                self._identities.learn(change.row.number, change.row.labels)
            elif change.old is not None:
                self._identities.forget(change.old.number)
            await time_slice.pause()

    async def _batches(
        self,
    ) -> AsyncIterator[Sequence[Change[tuple[str, str], RemoteAddress]] | None]:
        """Yield None, for all addresses, then changes."""
        changes = self._mesh.addresses.changes(self._mesh.addresses.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _claim(self, changes: Sequence[Change[tuple[str, str], RemoteAddress]] | None) -> None:
        await self._claims.follow(changes)


# The directory of configuration files, as the table ``remote-cluster-configs``.
#
# The directory and the targets of its links are watched with inotify.
# Source: Cilium 1.17, pkg/clustermesh/common: a readable file that contains the text ``endpoints:``
#         configures a cluster, all others are ignored; a different SHA-256 means that it has changed.

DEBOUNCE: Final = 0.05
"""Seconds in which changes are processed together: the files of a mounted secret change at once."""
ENDPOINTS_MARKER: Final = b"endpoints:"


def read_file(path: Path) -> RemoteClusterFile | None:
    """Return the row of a file; None if it does not configure a cluster."""
    try:
        data = read_regular(path)
    except OSError:  # for example a directory or a dangling link
        return None
    if ENDPOINTS_MARKER not in data:
        return None
    return RemoteClusterFile(path.name, path, hashlib.sha256(data).hexdigest())


class ConfigDirectory:
    """Maintains the table ``remote-cluster-configs``; the start fails if the directory is missing.

    After an event, the named files and those in the table are read again.
    """

    def __init__(self, directory: Path, mesh: MeshTables, *, lifecycle: Lifecycle, jobs: Jobs) -> None:
        self._directory = directory
        self._files = mesh.files
        self._first = mesh.files.initializer("clustermesh-config")
        lifecycle.append(Hook("check the directory of remote clusters", self._check))
        jobs.observe("watch the directory", self._changes, self._read)

    async def _check(self) -> None:
        if not self._directory.is_dir():
            raise UsageError(
                f"clustermesh-config={self._directory}: not a directory; make it, or leave the setting out"
            )

    async def _changes(self) -> AsyncIterator[Collection[str]]:
        """Yield names of files to read: all at first, then after every burst of events.

        Raises FileNotFoundError when the directory is removed.
        """
        from asyncinotify import Inotify, Mask

        removed = Mask.DELETE_SELF | Mask.MOVE_SELF
        changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
        with Inotify() as inotify:
            whole = inotify.add_watch(self._directory, removed | changed | Mask.ONLYDIR)
            names = {path.name for path in self._directory.iterdir()}
            while True:
                names |= set(self._files.keys())
                self._watch_links(inotify, names)
                yield names
                events = [await inotify.get()]
                with anyio.move_on_after(DEBOUNCE):
                    while True:
                        events.append(await inotify.get())
                if any(event.watch is whole and event.mask & (removed | Mask.IGNORED) for event in events):
                    raise FileNotFoundError(f"{self._directory} was removed or replaced")
                names = {str(event.name) for event in events if event.watch is whole and event.name}

    def _watch_links(self, inotify: Inotify, names: Collection[str]) -> None:
        """Watch the targets of symbolic links, which may be in other directories, before they are read."""
        from asyncinotify import Mask

        mask = Mask.CLOSE_WRITE | Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF
        for path in (self._directory / name for name in names):
            if path.is_symlink():
                with suppress(OSError):  # a dangling link, or a removed one
                    inotify.add_watch(path, mask)

    async def _read(self, names: Collection[str]) -> None:
        found = await to_thread.run_sync(
            lambda: {name: read_file(self._directory / name) for name in sorted(names)}
        )
        with self._files.txn() as rows:
            for name, row in found.items():
                if row is None:
                    rows.delete(name)
                else:
                    rows.put(row)
        self._first.done()


# A connection for each configuration file.


async def check_id(cluster_id: int, modes: Sequence[ChainingMode]) -> None:
    """Raise UsageError if packet marks of the chained plugin use a bit of the cluster id."""
    if cluster_id & 0x80 and any(mode.name == "aws-cni" for mode in modes):
        raise UsageError(
            f"cluster-id={cluster_id}: aws-cni uses a bit of it in marks of packets; expected an id from 1 to"
            " 127, or from 256 to 383"
        )


class ClusterMesh:
    """Runs a connection for each configured remote cluster."""

    def __init__(
        self,
        agent: AgentConfig,
        mesh: MeshTables,
        claims: RemoteClaims,
        store: KVStore,
        services: ServiceAddresses,
        modes: list[Member[ChainingMode]],
        *,
        jobs: Jobs,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        if mesh.directory is None:
            return
        from cells.clustermesh.connection import ClusterIDs

        self._mesh = mesh
        self._own = agent.cluster_name
        self._numbers = ClusterNumbers.of_agent(agent)
        self._store = store
        self._claims = claims
        self._gates = mesh.gates
        self._ids = ClusterIDs()
        self._jobs = jobs
        self._health = health
        self._log = log
        self._running: set[str] = set()
        """Clusters with a running job."""
        self._services = services
        self._nodes_known = mesh.nodes.initializer("clustermesh")
        self._services_known = mesh.services.initializer("clustermesh")
        lifecycle.append(Hook("check the id of the cluster", partial(check_id, agent.cluster_id, modes)))
        ConfigDirectory(mesh.directory, mesh, lifecycle=lifecycle, jobs=jobs)
        jobs.observe("connect", mesh.files.changes, self._follow)
        jobs.one_shot("wait for remote clusters", self._wait_synced)

    async def _wait_synced(self) -> None:
        """Wait until all clusters configured at the start are listed, or clustermesh-sync-timeout."""
        await self._mesh.files.wait_initialized()
        self._gates.expect(row.name for row in self._mesh.files.all() if not self._fault(row.name))
        with anyio.move_on_after(self._mesh.sync_timeout) as deadline:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._mark_known, self._nodes_known.done, "nodes")
                tasks.start_soon(self._mark_known, self._services_known.done, "services")
                await self._gates.wait("nodes", "endpoints", "identities")
                await self._finish_initial_claims()
        if deadline.cancelled_caught:
            self._log.warning(UNSYNCED, clusters=self._gates.unsynced(*KINDS))
            self._nodes_known.done()
            self._services_known.done()
            await self._finish_initial_claims()

    async def _finish_initial_claims(self) -> None:
        await self._claims.complete_initial()
        self._gates.open()

    async def _mark_known(self, done: Callable[[], None], kind: str) -> None:
        await self._gates.wait(kind)
        done()

    def _fault(self, name: str) -> str:
        """Return why the agent does not connect to a cluster of this name; empty if it does."""
        return "it is the local cluster" if name == self._own else cluster_name_fault(name)

    async def _follow(self, changes: Sequence[Change[str, RemoteClusterFile]]) -> None:
        for change in changes:
            name = change.key
            if change.row is None or name in self._running:
                continue  # handled by the cluster's job
            if name == self._own:
                self._log.debug("ignoring the configuration of the local cluster", cluster=name)
            elif fault := self._fault(name):
                self._log.error(
                    "Cannot connect to remote cluster", cluster=name, error=f"invalid cluster name: {fault}"
                )
            else:
                self._running.add(name)
                self._jobs.one_shot(f"remote-etcd-{name}", partial(self._connect, name))

    async def _connect(self, name: str) -> None:
        from cells.clustermesh.connection import RemoteConnection

        health = self._health.child(f"remote-cluster-{name}")
        with health:
            connection = RemoteConnection(
                name,
                self._mesh,
                self._ids,
                self._numbers,
                self._client,
                self._gates,
                health=health,
                log=self._log,
            )
            await connection.run()
        self._running.discard(name)

    def _client(self, path: Path) -> Any:
        """Create the client for a configuration file; limits of kvstore-opt apply."""
        from msgspec.structs import replace

        from cells.kvstore.etcd import EtcdClient

        options = replace(self._store.settings.options, addresses=(), config=str(path))
        return EtcdClient(options, self._store.metrics, self._services.resolve, pinned=True)


# Metrics.
#
# Source: Cilium 1.17, cilium_clustermesh_*.


def mesh_metrics(mesh: MeshTables, services: MeshServices, agent: AgentConfig) -> Member[Collector]:
    """Contribute the metrics of remote clusters; none without a mesh."""

    async def collect() -> Iterable[MetricFamily]:
        return families(mesh, services, agent.cluster_name, agent.node_name) if mesh.enabled else ()

    return Collector("clustermesh", collect)


def families(mesh: MeshTables, services: MeshServices, cluster: str, node: str) -> Iterable[MetricFamily]:
    """Yield the metric families, labelled with the own cluster and node."""
    rows = mesh.clusters.all()
    own = "source_cluster source_node_name"
    each = f"{own} target_cluster"
    yield gauge(
        "cilium_clustermesh_remote_clusters",
        "The total number of remote clusters meshed with the local cluster",
        {(cluster, node): len(rows)},
        own,
    )
    yield gauge(
        "cilium_clustermesh_global_services",
        "The total number of global services in the cluster mesh",
        {(cluster, node): len({(row.namespace, row.name) for row in services.all()})},
        own,
    )
    yield gauge(
        "cilium_clustermesh_remote_cluster_nodes",
        "The total number of nodes in the remote cluster",
        {(cluster, node, row.name): mesh.count(row.name, "nodes") for row in rows},
        each,
    )
    yield gauge(
        "cilium_clustermesh_remote_cluster_last_failure_ts",
        "The timestamp of the last failure of the remote cluster",
        {(cluster, node, row.name): row.last_failure for row in rows},
        each,
    )
    yield gauge(
        "cilium_clustermesh_remote_cluster_readiness_status",
        "The readiness status of the remote cluster",
        {(cluster, node, row.name): int(row.ready) for row in rows},
        each,
    )
    yield gauge(
        "cilium_clustermesh_remote_cluster_failures",
        "The total number of failures related to the remote cluster",
        {(cluster, node, row.name): row.failures for row in rows},
        each,
    )


def mesh_features(mesh: MeshTables, agent: AgentConfig, mode: AllocationMode) -> Member[Collector]:
    """How connected clusters publish what they share, as a feature in use.

    Source: Cilium 1.17, ClusterMeshMode: it takes the own mode of identities for the remote cluster's.
    """
    own = {AllocationMode.CRD: "clustermesh-apiserver", AllocationMode.KVSTORE: "etcd"}
    direct, most = own.get(mode, "clustermesh-apiserver_or_etcd"), str(agent.max_connected_clusters)

    def connected() -> Counter[tuple[str, ...]]:
        configs = [row.config for row in mesh.clusters.all() if row.connected]
        return Counter(
            ("kvstoremesh" if config.kvstoremesh else direct, most)
            for config in configs
            if config is not None and config.retrieved
        )

    return features("clustermesh-features", lambda: {"adv_connect_and_lb_clustermesh_enabled": connected()})


cell = group(
    mesh_tables.cell,
    module(
        "clustermesh",
        "Connections to other clusters",
        provide(mesh_metrics, mesh_features),
        provide_private(RemoteClaims, ClusterMesh),
        invoke(ClusterMesh),
    ),
)
