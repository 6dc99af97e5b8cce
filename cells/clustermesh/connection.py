"""The connection to a remote cluster: lists and watches its etcd, and writes the tables of the mesh.

Source: Cilium 1.17, pkg/clustermesh/common, the controllers remote-etcd-NAME.
Why:    a lost connection deletes no row: the remote pods are still reachable. Keys that are deleted in the
        meantime are found by the first list of the next connection.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from cells.cluster.identity.numbers import ClusterNumbers
from cells.clustermesh.keys import (
    Announcement,
    RemoteKeys,
    RemoteValues,
    announcement_fault,
    read_announcement,
    synced_prefix,
)
from cells.clustermesh.tables import (
    BY_CLUSTER,
    CONNECTING,
    KINDS,
    MeshTables,
    RemoteAddress,
    RemoteCluster,
    RemoteClusterConfig,
    RemoteClusterFile,
)
from cells.kvstore.etcd import EtcdClient
from cells.kvstore.model import (
    CLUSTER_CONFIG,
    HEARTBEAT,
    CompactedError,
    StoreError,
    StoreUnavailableError,
)
from cells.kvstore.settings import StoreConfigError
from cells.kvstore.store import Heartbeat
from lifecycle import Backoff, Health, Logger, Table

RETRY: Final = Backoff(first=0.5, maximum=15.0)
CHECK_INTERVAL: Final = 15.0
"""Seconds between checks of the heartbeat and the server."""
CONFIG_TIMEOUT: Final = 180.0
"""Seconds to wait for the cluster's configuration (its key below cluster-config)."""
CHUNK: Final = 100
"""Values parsed before the event loop runs other tasks: a few milliseconds."""

Clients = Callable[[Path], EtcdClient]
"""Creates the client for a configuration file."""


class RemoteClusterError(StoreError):
    """Raised when the cluster's configuration is missing or does not allow a connection."""


class _ConfigurationChangedError(StoreError):
    """Raised to end a connection when its file changes."""


class ClusterIDs:
    """The reserved cluster ids, by cluster."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def reserve(self, cluster: str, cluster_id: int) -> None:
        """Reserve the id for the cluster. Raises RemoteClusterError if another cluster has it."""
        if self._names.setdefault(cluster_id, cluster) != cluster:
            raise RemoteClusterError(f"clusterID {cluster_id} is already used")

    def release(self, cluster_id: int) -> None:
        """Release the id."""
        self._names.pop(cluster_id, None)


class SyncObserver(Protocol):
    """Receives the progress of initial lists."""

    def synced(self, cluster: str, kind: str) -> None:
        """Record that all keys of a kind are listed."""
        ...

    def forget(self, cluster: str) -> None:
        """Record that the cluster is no longer configured."""
        ...


class _Kind(NamedTuple):
    """How keys of a kind are parsed and stored."""

    table: Table[Any, Any]
    read: Callable[[RemoteValues], Callable[[str, bytes], Any]]
    key: Callable[[str, str], Any]
    """Returns the row's key for a cluster and a key without its prefix."""


def _service_key(cluster: str, name: str) -> tuple[str, str, str]:
    namespace, _, rest = name.partition("/")
    return cluster, namespace, rest


class RemoteConnection:
    """Runs the connection to a cluster; the only writer of the cluster's rows."""

    def __init__(
        self,
        name: str,
        mesh: MeshTables,
        ids: ClusterIDs,
        numbers: ClusterNumbers,
        clients: Clients,
        observer: SyncObserver,
        *,
        health: Health,
        log: Logger,
    ) -> None:
        self.name = name
        self._mesh = mesh
        self._ids = ids
        self._numbers = numbers
        self._clients = clients
        self._observer = observer
        self._health = health
        self._log = log
        self._id = 0
        """The reserved cluster id; 0 without one."""
        self._failures = 0
        """Number of failures in a row."""
        self._reported = ""
        """The last logged error of a series of failures."""
        self._kinds: Mapping[str, _Kind] = {
            "nodes": _Kind(mesh.nodes, lambda values: values.node, lambda *key: "/".join(key)),
            "services": _Kind(mesh.services, lambda values: values.service, _service_key),
            "endpoints": _Kind(mesh.addresses, lambda values: values.address, lambda *key: key),
            "identities": _Kind(mesh.identities, lambda values: values.identity, lambda *key: key),
        }

    async def run(self) -> None:
        """Connect and reconnect until the configuration is removed, then delete the cluster's rows."""
        while True:
            file = self._mesh.files.get(self.name)
            if file is None:
                await self._remove()
                if self.name not in self._mesh.files:
                    return
                continue  # it was added again while its rows were deleted
            error = await self._connect(file)
            if isinstance(error, _ConfigurationChangedError):
                self._failures = 0
                continue
            self._failures += 1
            if self._reported != str(error):
                self._reported = str(error)
                self._log.warning("remote cluster is not connected", cluster=self.name, error=str(error))
            self._health.degraded("not connected: the last known state of the cluster stays in force", error)
            with anyio.move_on_after(RETRY.pause(self._failures)):
                await self._mesh.files.wait_changed(self.name, file)

    @property
    def _row(self) -> RemoteCluster:
        return self._mesh.clusters.get(self.name) or RemoteCluster(name=self.name)

    def _update(self, **fields: Any) -> None:
        self._mesh.clusters.put(replace(self._row, **fields))

    async def _connect(self, file: RemoteClusterFile) -> Exception | None:
        """Follow the cluster until an error, and return it."""
        self._update()
        client = self._clients(file.path)
        error: Exception | None = None

        async def fail_when_changed() -> None:
            await self._mesh.files.wait_changed(self.name, file)
            raise _ConfigurationChangedError("the configuration has changed")

        try:
            async with client.open():
                error = await first_failure(partial(self._follow, client), fail_when_changed)
        except StoreConfigError as wrong:
            error = wrong
        row = self._row
        if row.connected and not isinstance(error, RemoteClusterError | _ConfigurationChangedError):
            self._update(failures=row.failures + 1, last_failure=time.time())
        changed = isinstance(error, _ConfigurationChangedError)
        status = CONNECTING if changed else f"{CONNECTING}: {error}"
        self._update(connected=False, status=status, config=None, synced=frozenset[str]())
        return error

    async def _follow(self, client: EtcdClient) -> None:
        """List the cluster's keys, and follow their changes. Raises StoreError."""
        heartbeat = Heartbeat()
        await self._check(client, heartbeat)
        self._log.info("connected to a remote cluster", cluster=self.name, endpoint=client.endpoint)
        self._update(connected=True, config=RemoteClusterConfig())
        with anyio.move_on_after(CONFIG_TIMEOUT) as deadline:
            found = await self._announcement(client)
        if deadline.cancelled_caught:
            raise RemoteClusterError("failed to retrieve cluster configuration: not found")
        if fault := announcement_fault(found, self._numbers):
            raise RemoteClusterError(fault)
        await self._reserve_id(found.id)
        self._update(config=found.config)
        keys = RemoteKeys(self.name, cached=found.config.kvstoremesh)
        values = RemoteValues(self.name, found.id, self._numbers)
        canaries = {key: anyio.Event() for key in keys.canaries.values()}
        if not found.config.sync_canaries:
            for canary in canaries.values():
                canary.set()
        watches = [
            partial(
                self._list_and_watch, client, kind, keys.prefixes[kind], values, canaries[keys.canaries[kind]]
            )
            for kind in KINDS
        ]
        error = await first_failure(
            partial(self._check_periodically, client, heartbeat),
            partial(self._watch_canaries, client, canaries),
            *watches,
        )
        if error is not None:
            raise error

    async def _announcement(self, client: EtcdClient) -> Announcement:
        """Wait for the cluster's configuration and return it. Raises StoreError."""
        key = f"{CLUSTER_CONFIG}{self.name}"
        while True:
            there, revision = await client.list_prefix(key)
            value = next((kv.value for kv in there if kv.key == key), None)
            if value is not None:
                try:
                    return read_announcement(value)
                except ValueError as error:
                    raise RemoteClusterError(f"failed to retrieve cluster configuration: {error}") from error
            self._health.degraded(f"connected; waiting for the key {key}")
            async with aclosing(client.watch(key, revision + 1)) as changes:
                async for events in changes:
                    if any(event.key == key for event in events):
                        break

    async def _reserve_id(self, cluster_id: int) -> None:
        """Reserve the cluster's id. If it has changed, delete all rows of the cluster first."""
        before = self._id
        if before not in (0, cluster_id):
            self._log.info("the cluster ID has changed", cluster=self.name, before=before, id=cluster_id)
            await self._delete_all()
        self._ids.reserve(self.name, cluster_id)
        self._id = cluster_id
        if before not in (0, cluster_id):
            self._ids.release(before)

    # Status of the connection

    async def _check(self, client: EtcdClient, heartbeat: Heartbeat) -> None:
        """Check that the server answers, and that the heartbeat is recent. Raises StoreError."""
        beat = await client.lookup(HEARTBEAT)
        if beat is not None:
            heartbeat.observe(beat.mod_revision)
        described = await client.describe()
        status = (
            f"etcd: 1/{len(client.endpoints)} connected, leases=0, lock leases=0, has-quorum=true:"
            f" {described}, ID: {client.cluster_id:x}"
        )
        if self._row.status != status:
            self._update(status=status)

    async def _check_periodically(self, client: EtcdClient, heartbeat: Heartbeat) -> None:
        while True:
            await anyio.sleep(CHECK_INTERVAL)
            await self._check(client, heartbeat)

    # Keys to rows

    async def _watch_canaries(self, client: EtcdClient, canaries: Mapping[str, anyio.Event]) -> None:
        """Set the event of each canary key as the key appears. Raises StoreError."""
        prefix = synced_prefix(self.name)
        while not all(canary.is_set() for canary in canaries.values()):
            there, revision = await client.list_prefix(prefix)
            for kv in there:
                if kv.key in canaries:
                    canaries[kv.key].set()
            with suppress(CompactedError):
                async with aclosing(client.watch(prefix, revision + 1)) as changes:
                    async for events in changes:
                        for event in events:
                            if event.kv is not None and event.key in canaries:
                                canaries[event.key].set()
                        if all(canary.is_set() for canary in canaries.values()):
                            return

    async def _list_and_watch(
        self, client: EtcdClient, kind: str, prefix: str, values: RemoteValues, canary: anyio.Event
    ) -> None:
        """Wait for the canary, then list the keys of a kind and follow them. Raises StoreError."""
        await canary.wait()
        while True:
            with suppress(CompactedError):  # relist
                found, revision = await client.list_prefix(prefix)
                await self._replace(kind, values, {kv.key.removeprefix(prefix): kv.value for kv in found})
                self._synced(client, kind)
                async with aclosing(client.watch(prefix, revision + 1)) as changes:
                    async for events in changes:
                        await self._apply(
                            kind, values, [(event.key.removeprefix(prefix), event.value) for event in events]
                        )
                raise StoreUnavailableError("the watch has ended")

    def _synced(self, client: EtcdClient, kind: str) -> None:
        synced = self._row.synced | {kind}
        self._update(synced=synced)
        self._observer.synced(self.name, kind)
        if len(synced) == len(KINDS):
            client.end_bootstrap()
            self._failures, self._reported = 0, ""
            self._health.ok(f"connected to {client.endpoint}")

    async def _replace(self, kind: str, values: RemoteValues, there: Mapping[str, bytes]) -> None:
        """Replace all rows of a kind by these keys: delete others first."""
        key_of = self._kinds[kind].key
        await self._delete(kind, {key_of(self.name, name) for name in there})
        await self._apply(kind, values, list(there.items()))

    async def _apply(
        self, kind: str, values: RemoteValues, changes: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Apply changes to the table. While a key's value is invalid, its last valid row stays."""
        table, reader, key_of = self._kinds[kind]
        read = reader(values)
        for begin in range(0, len(changes), CHUNK):
            with table.txn() as rows:
                for name, value in changes[begin : begin + CHUNK]:
                    key = key_of(self.name, name)
                    if value is None:
                        rows.delete(key)
                        continue
                    try:
                        row = read(name, value)
                    except (ValueError, RecursionError) as error:
                        self._log.warning(
                            "ignoring an invalid value of a remote cluster",
                            cluster=self.name,
                            kind=kind,
                            key=name,
                            error=str(error),
                        )
                        continue
                    if isinstance(row, RemoteAddress) and not row.identity:
                        self._log.warning(
                            "Skipping invalid upsertion event: the identity is not of the cluster",
                            cluster=self.name,
                            address=name,
                        )
                        row = rows.get(key) or row
                    rows.put(row)
            await anyio.lowlevel.checkpoint()

    async def _delete(self, kind: str, except_keys: Collection[Any] = ()) -> None:
        table = self._kinds[kind].table
        removed = [key for key in table.by(BY_CLUSTER).keys(self.name) if key not in except_keys]
        for begin in range(0, len(removed), CHUNK):
            with table.txn() as rows:
                for key in removed[begin : begin + CHUNK]:
                    rows.delete(key)
            await anyio.lowlevel.checkpoint()

    async def _delete_all(self) -> None:
        for kind in KINDS:
            await self._delete(kind)

    async def _remove(self) -> None:
        """Delete everything of a cluster that is no longer configured."""
        self._log.info("remote cluster removed", cluster=self.name)
        await self._delete_all()
        self._ids.release(self._id)
        self._id = 0
        self._mesh.clusters.delete(self.name)
        self._observer.forget(self.name)


async def first_failure(*works: Callable[[], Awaitable[None]]) -> StoreError | None:
    """Run these concurrently until one raises StoreError, or all return. Returns the error."""
    errors: list[StoreError] = []
    async with anyio.create_task_group() as tasks:

        async def cancel_on_failure(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except StoreError as error:
                errors.append(error)
                tasks.cancel_scope.cancel()

        for work in works:
            tasks.start_soon(cancel_on_failure, work)
    return errors[0] if errors else None
