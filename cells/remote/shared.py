"""Nodes and pod addresses that nodes share through the kvstore.

In:   keys of all nodes; this node's row and endpoints.
Out:  the tables ``shared-nodes`` and ``shared-addresses``, claims in the ipcache, and this node's own keys.
Why:  nodes need no API server for it, or the cluster has more pods than one can serve.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from ipaddress import ip_address
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio.lowlevel

from cells.base.addresses import Family
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix
from cells.cluster.nodes import SharedNodes
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.remote_endpoints import PeerPods, chunks
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.kubernetes.objects.core import Pod
from cells.kvstore.model import IPS, NODES
from cells.kvstore.own_keys import OwnKey, keep_keys
from cells.kvstore.store import KVStore
from cells.kvstore.watch import PrefixWatch
from cells.remote.shared_keys import (
    SharedAddress,
    SharedPort,
    address_keys,
    node_key,
    read_address,
    read_node,
)
from lifecycle import Change, Jobs, Member, ReadTable, Table, Tables, after, group, invoke, module, provide

__all__ = ["AddressClaims", "SharedTables", "cell"]


class SharedTables:
    """The tables ``shared-nodes`` and ``shared-addresses``; empty and initialized without a kvstore.

    Their keys are the kvstore's without the prefix.
    """

    def __init__(self, store: KVStore, *, jobs: Jobs, tables: Tables) -> None:
        self.nodes: Table[str, ClusterNode] = Table("shared-nodes", key=lambda node: node.full_name)
        self.addresses: Table[str, SharedAddress] = Table("shared-addresses", key=lambda row: row.address)
        if not store.enabled:
            return
        tables.add(self.nodes, self.addresses)
        nodes = PrefixWatch(store, NODES, self.nodes, read_node, scope="nodes/v1")
        addresses = PrefixWatch(store, IPS, self.addresses, read_address, scope="ip/v1")
        jobs.observe("follow nodes", nodes)
        jobs.observe("follow addresses", addresses)


def shared_pods(shared: SharedTables) -> Member[PeerPods]:
    """Provide the named ports of pods in the kvstore."""
    return PeerPods(shared.addresses)


# Pod addresses to claims in the ipcache; used for remote clusters, too.

Key = TypeVar("Key", bound=Hashable)
CHUNK: Final = 100
"""Addresses processed before the event loop runs other tasks: a few milliseconds."""


class ClaimingRow(Protocol):
    """A row of a table of addresses."""

    @property
    def node(self) -> str:
        """The address of its node; empty if unknown."""
        ...

    @property
    def claim(self) -> IpcacheEntry | None:
        """The claim in the ipcache; None if the address must not be used."""
        ...


Row = TypeVar("Row", bound=ClaimingRow)


class AddressClaims(Generic[Key, Row]):
    """Claims a table's addresses in the ipcache, except those of this node's pods."""

    def __init__(
        self, addresses: ReadTable[Key, Row], nodes: ReadTable[str, ClusterNode], ipcache: Ipcache
    ) -> None:
        self._addresses = addresses
        self._nodes = nodes
        self._ipcache = ipcache
        self._claimed: dict[Key, tuple[str, Prefix]] = {}

    async def follow(self, changes: Sequence[Change[Key, Row]] | None) -> None:
        """Update the claims of changed rows; of all rows for None.

        Raises OSError: then call it with None.
        """
        keys = [change.key for change in changes] if changes is not None else self._all()
        for chunk in chunks(keys, CHUNK):
            self._update(chunk)
            await anyio.lowlevel.checkpoint()

    def _all(self) -> list[Key]:
        return list({*self._claimed, *self._addresses.keys()})

    def _update(self, keys: Iterable[Key]) -> None:
        claimed: dict[Key, IpcacheEntry] = {}
        for key in keys:
            row = self._addresses.get(key)
            claim = row.claim if row is not None and not self._on_this_node(row.node) else None
            before = self._claimed.get(key)
            if before is not None and (claim is None or (claim.resource, claim.prefix) != before):
                self._ipcache.withdraw(before[0], [before[1]])
                del self._claimed[key]
            if claim is not None:
                claimed[key] = claim
        self._ipcache.upsert(*claimed.values())
        self._claimed.update((key, (claim.resource, claim.prefix)) for key, claim in claimed.items())

    def _on_this_node(self, node: str) -> bool:
        try:
            ip = ip_address(node)
        except ValueError:
            return False
        return any(found.local for found in self._nodes.by("address").get(ip))


class SharedClaims:
    """Claims ``shared-addresses`` in the ipcache; until all are claimed no leftover of the map is deleted."""

    def __init__(
        self,
        store: KVStore,
        shared: SharedTables,
        nodes: ReadTable[str, ClusterNode],
        *,
        identities: Identities,
        ipcache: Ipcache,
        jobs: Jobs,
    ) -> None:
        self._addresses = shared.addresses
        self._claims = AddressClaims(shared.addresses, nodes, ipcache)
        self._identities = identities
        if store.enabled:
            self._first = ipcache.table.initializer("kvstore")
            jobs.observe("claim", self._batches, self._follow)

    async def _batches(self) -> AsyncIterator[Sequence[Change[str, SharedAddress]] | None]:
        """Yield None, for all addresses, then changes.

        Identities are initialized first: no rule denies a number without known labels.
        """
        await self._identities.table.wait_initialized()
        await self._addresses.wait_initialized()
        changes = self._addresses.changes(self._addresses.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: Sequence[Change[str, SharedAddress]] | None) -> None:
        """Update claims. Raises OSError if the ipcache cannot be written; the job starts again with None."""
        await self._claims.follow(changes)
        if changes is None:
            self._first.done()


# This node's keys: the node, and the addresses of its endpoints.


@after(ExposedEndpoints)
class SharedKeys:
    """Writes this node's keys; none is deleted before restored endpoints and this node are known."""

    def __init__(
        self,
        agent: AgentConfig,
        store: KVStore,
        endpoints: Table[int, Endpoint],
        pods: Table[tuple[str, str], Pod],
        nodes: ReadTable[str, ClusterNode],
        shared: SharedTables,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._agent = agent
        self._endpoints = endpoints
        self._pods = pods
        self._nodes = nodes
        self._addresses = shared.addresses
        self._keys: Table[str, OwnKey] = Table("shared-address-keys", key=lambda row: row.key)
        self._keys_by_endpoint: dict[int, list[str]] = {}
        """The keys of each endpoint, by its id."""
        if not store.enabled:
            return
        self._first = self._keys.initializer("endpoints")
        own = nodes.filter(lambda node: node.local, name="own-shared-node")
        node_keys = own.flat_map(
            lambda node: (node_key(node, agent.cluster_id),), key=lambda row: row.key, name="node-keys"
        )
        keep_keys(store, node_keys, "nodes/v1", jobs=jobs, tables=tables, after=[shared.nodes])
        keep_keys(
            *(store, self._keys, "ip/v1"),
            jobs=jobs,
            tables=tables,
            previous=self._keys_in_store,
            after=[shared.addresses],
        )
        jobs.observe("endpoints", endpoints.changes, self._follow)
        jobs.observe("pods", pods.changes, self._follow_pods)
        jobs.observe("this node", self._own_node_changes, self._follow_node)

    @property
    def _own_node(self) -> ClusterNode | None:
        return self._nodes.get(f"{self._agent.cluster_name}/{self._agent.node_name}")

    async def _own_node_changes(self) -> AsyncIterator[None]:
        name = f"{self._agent.cluster_name}/{self._agent.node_name}"
        seen = self._nodes.get(name)
        while True:
            if seen is not None:
                yield
            seen = await self._nodes.wait_changed(name, seen)

    async def _follow_node(self, _: None) -> None:
        self._update_keys(one.id for one in self._endpoints.all())
        self._first.done()

    async def _follow(self, changes: Sequence[Change[int, Endpoint]]) -> None:
        self._update_keys(change.key for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[tuple[str, str], Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._update_keys(
            one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed
        )

    def _update_keys(self, numbers: Iterable[int]) -> None:
        node = self._own_node
        if node is None:
            return
        with self._keys.txn() as rows:
            for number in numbers:
                keys = self._keys_of(self._endpoints.get(number), node)
                for key in set(self._keys_by_endpoint.pop(number, ())) - {row.key for row in keys}:
                    rows.delete(key)
                for row in keys:
                    rows.put(row)
                if keys:
                    self._keys_by_endpoint[number] = [row.key for row in keys]

    def _keys_of(self, endpoint: Endpoint | None, node: ClusterNode) -> list[OwnKey]:
        if endpoint is None or not endpoint.identity:
            return []
        pod = self._pods.get((endpoint.pod_namespace, endpoint.pod_name))
        ports = [
            SharedPort(port.name, port.container_port, port.protocol)
            for port in (pod.named_ports if pod is not None else ())
        ]
        host = node.node_ip(Family.IPV4) or node.node_ip(Family.IPV6)
        ports.sort(key=lambda port: (port.name, port.port))
        return list(address_keys(endpoint, node.name, host, ports, node.endpoint_key))

    def _keys_in_store(self) -> dict[str, str]:
        """Return the keys in the store with this node's address: a previous agent wrote them."""
        node = self._own_node
        own = {str(each.ip) for each in node.addresses} if node is not None else set()
        return {f"{IPS}{row.address}": row.value for row in self._addresses.all() if row.node in own}


def shared_nodes(shared: SharedTables) -> SharedNodes:
    """Provide the nodes of the kvstore for the table ``nodes``."""
    return shared.nodes


cell = group(
    module(
        "shared-tables",
        "Nodes and pod addresses in the kvstore",
        provide(SharedTables, shared_nodes, shared_pods),
    ),
    module(
        "shared",
        "This node's keys in the kvstore, and claims of other nodes' pods",
        provide(SharedKeys, SharedClaims),
        invoke(SharedKeys, SharedClaims),
    ),
)
