"""The cluster mesh part of an agent, over real etcds, each behind a relay that tests can cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import structlog

from cells import clustermesh, kubernetes, kvstore
from cells.cluster import ipcache
from cells.cluster.allocation.global_allocator import AllocationMode
from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source
from cells.cluster.nodes import MeshNodes
from cells.cluster.nodes.node import ClusterNode
from cells.clustermesh.tables import KINDS, MeshServices, MeshTables, RemoteCluster
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Lifecycle, ReadTable, Table, invoke, replace, supply
from lifecycle.testing import eventually
from tests.support.etcd import Etcd
from tests.unit.ipcache.fakes import FakeIpcacheMap


class Relay:
    """A port that forwards to an etcd while it is up."""

    def __init__(self, etcd: Etcd) -> None:
        self._to = etcd
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        """Accept connections."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Close all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    def lead_to(self, etcd: Etcd) -> None:
        """Forward new connections to another etcd."""
        self._to = etcd

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to.port)
        self._open |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._open -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


class Mesh:
    """The agent of cluster ``home``, id 1, and the configurations of remote clusters."""

    def __init__(self, hive: Hive, directory: Path, etcd: Etcd) -> None:
        self.directory = directory
        self.etcd = etcd
        self.tables = hive.get(MeshTables)
        self.services = hive.get(MeshServices)
        self.identities = hive.get(Identities)
        self._ipcache = hive.get(Table[str, IpcacheEntry])
        self._relays: dict[str, Relay] = {}

    async def connect(self, cluster: str) -> None:
        """Configure a remote cluster, or make it reachable again."""
        if cluster not in self._relays:
            self._relays[cluster] = Relay(self.etcd)
        await self._relays[cluster].up()
        self.configure(cluster, self._relays[cluster].url)

    def configure(self, cluster: str, url: str) -> None:
        """Write a remote cluster's configuration file."""
        (self.directory / cluster).write_text(f"endpoints:\n- {url}\n")

    async def disconnect(self, cluster: str) -> None:
        """Make a remote cluster's etcd unreachable."""
        await self._relays[cluster].down()
        await until(lambda: not self.row(cluster).connected)

    async def remove(self, cluster: str) -> None:
        """Remove a remote cluster's configuration file."""
        (self.directory / cluster).unlink()
        await until(lambda: cluster not in self.tables.clusters)

    async def close(self) -> None:
        """Close the relays."""
        for relay in self._relays.values():
            await relay.down()

    def relay(self, cluster: str) -> Relay:
        """Return the relay to a remote cluster."""
        return self._relays[cluster]

    def row(self, cluster: str) -> RemoteCluster:
        """Return the row of a remote cluster's connection."""
        return self.tables.clusters.get(cluster) or RemoteCluster(name=cluster)

    def put(self, key: str, value: object) -> None:
        """Write a key."""
        self.etcd.put(key, value if isinstance(value, str) else json.dumps(value))

    async def ready(self, cluster: str) -> None:
        """Wait until a remote cluster has been listed completely."""
        await until(lambda: self.row(cluster).ready)

    async def caught_up(self, cluster: str) -> None:
        """Wait until all earlier writes are processed, by a key that is written now."""
        row = self.row(cluster)
        if row.config is None or not row.config.retrieved:
            return
        number = row.config.cluster_id
        part = "cache" if row.config.kvstoremesh else "state"
        origin = {"cluster": cluster, "clusterID": number, "Cluster": cluster, "ClusterID": number}
        ips, ids = (f"ip/v1/{cluster}", f"identities/v1/{cluster}") if part == "cache" else ("", "")
        last = (number << 16) + 65535
        markers = {
            "nodes": (f"nodes/v1/{cluster}/marker", origin | {"Name": "marker"}),
            "services": (
                f"services/v1/{cluster}/marker/marker",
                origin | {"namespace": "marker", "name": "marker"},
            ),
            "endpoints": (f"{ips or 'ip/v1/default'}/192.0.2.255", {"IP": "192.0.2.255", "ID": last}),
            "identities": (
                f"{ids or 'identities/v1'}/id/{last}",
                f"k8s:io.cilium.k8s.policy.cluster={cluster};",
            ),
        }
        there: dict[str, tuple[ReadTable[Any, Any], Any]] = {
            "nodes": (self.tables.nodes, f"{cluster}/marker"),
            "services": (self.tables.services, (cluster, "marker", "marker")),
            "endpoints": (self.tables.addresses, (cluster, "192.0.2.255")),
            "identities": (self.tables.identities, (cluster, str(last))),
        }
        for kind in row.synced:
            key, value = markers[kind]
            table, name = there[kind]
            self.put(f"cilium/{part}/{key}", value)
            with anyio.fail_after(30):
                await table.wait_for(name)
            self.etcd.delete(f"cilium/{part}/{key}")
            with anyio.fail_after(30):
                await table.wait_removed(name)

    def addresses(self) -> dict[str, dict[str, Any]]:
        """Return the ipcache's entries of remote clusters."""
        return {
            row.prefix.removesuffix("/32").removesuffix("/128"): {
                "identity": row.identity,
                "host_ip": str(row.tunnel_endpoint),
                "key": row.encrypt_key,
            }
            for row in self._ipcache.all()
            if row.is_of(Source.CLUSTERMESH)
        }

    def labels(self) -> dict[int, list[str]]:
        """Return the known identities, by number."""
        return {row.id: sorted(row.labels) for row in self.identities.all() if row.id >= CLUSTER.start}

    def counts(self, cluster: str) -> dict[str, int]:
        """Return the number of entries, by kind."""
        return {kind: self.tables.count(cluster, kind) for kind in KINDS}


async def until(condition: Any) -> None:
    await eventually(condition, within=30)


def needed(_: MeshTables, __: MeshNodes, ___: MeshServices, ____: Table[str, IpcacheEntry]) -> None: ...


@asynccontextmanager
async def mesh(
    folder: Path,
    etcd: Etcd,
    most: int = 255,
    before: dict[str, str] | None = None,
    kernel: FakeIpcacheMap | None = None,
    **settings: str,
) -> AsyncIterator[Mesh]:
    """Run an agent with these settings; ``before`` lists the clusters configured at its start, with URLs."""
    directory = folder / "clustermesh"
    directory.mkdir(exist_ok=True)
    for name, url in (before or {}).items():
        (directory / name).write_text(f"endpoints:\n- {url}\n")
    known = AgentConfig(
        AgentSettings(cluster_name="home", cluster_id=1, max_connected_clusters=most),
        Lifecycle("test"),
        structlog.get_logger(),
    )
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    nodes.lookup("address", lambda row: [one.ip for one in row.addresses])
    hive = Hive(
        kubernetes.cell,
        kvstore.cell,
        ipcache.cell,
        clustermesh.cell,
        supply(known),
        supply(AllocationMode.CRD),
        supply(nodes, type=ReadTable[str, ClusterNode]),
        supply(Identities(identity_table(), NodeAllocator(CLUSTER))),
        replace(IpcacheTarget, (kernel or FakeIpcacheMap()).target),
        invoke(needed),
        settings={"clustermesh-config": str(directory)}
        | {name.replace("_", "-"): text for name, text in settings.items()},
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hive.started())
        found = Mesh(hive, directory, etcd)
        stack.push_async_callback(found.close)
        yield found
