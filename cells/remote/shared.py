"""What nodes share through the store: themselves, and their pods' addresses.

Source and controller: keys of the store in; rows of the table ``nodes`` and claims in the ipcache out. This
        node and its endpoints in; its own keys out.

Why: without an API server, and with so many pods that it would be too much for one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Sequence
from ipaddress import ip_address
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio.lowlevel

from cells.base.addresses import Family
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix
from cells.cluster.nodes import SharedNodes
from cells.cluster.nodes.node import ClusterNode
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
from lifecycle import Change, Jobs, ReadTable, Table, Tables, after, group, invoke, module, provide

__all__ = ["AddressClaims", "SharedTables", "cell"]


# All nodes and their pods in the store, as tables.
#
# Source: keys below nodes/v1 and ip/v1 in; ``shared-nodes`` and ``shared-addresses`` out.


class SharedTables:
    """Two tables, by the keys less their prefixes; empty, and complete, where there is no store."""

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


# Addresses of other nodes' pods, as claims in the ipcache.
#
# Controller: ``shared-addresses``, or those of remote clusters, in, claims out.

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
STRETCH: Final = 100
"""Addresses taken in before others get their turn on the event loop: a few milliseconds."""


class ClaimingRow(Protocol):
    """A row of a table of addresses."""

    @property
    def node(self) -> str:
        """The address of its node; empty if unknown."""
        ...

    @property
    def claim(self) -> IpcacheEntry | None:
        """What it claims in the ipcache; None: nothing."""
        ...


Row = TypeVar("Row", bound=ClaimingRow)


class AddressClaims(Generic[Key, Row]):
    """Claims what a table has, but addresses of this node's pods."""

    def __init__(
        self, addresses: ReadTable[Key, Row], nodes: ReadTable[str, ClusterNode], ipcache: Ipcache
    ) -> None:
        self._addresses = addresses
        self._nodes = nodes
        self._ipcache = ipcache
        self._claimed: dict[Key, tuple[str, Prefix]] = {}

    async def follow(self, changes: Sequence[Change[Key, Row]] | None) -> None:
        """Claim what has changed; None: look at everything. Raises OSError: then look at everything."""
        keys = [change.key for change in changes] if changes is not None else self._all()
        for stretch in _stretches(keys):
            self._take(stretch)
            await anyio.lowlevel.checkpoint()

    def _all(self) -> list[Key]:
        return list({*self._claimed, *self._addresses.keys()})

    def _take(self, keys: Iterable[Key]) -> None:
        claimed: dict[Key, IpcacheEntry] = {}
        for key in keys:
            row = self._addresses.get(key)
            claim = row.claim if row is not None and not self._is_here(row.node) else None
            before = self._claimed.get(key)
            if before is not None and (claim is None or (claim.resource, claim.prefix) != before):
                self._ipcache.withdraw(before[0], [before[1]])
                del self._claimed[key]
            if claim is not None:
                claimed[key] = claim
        self._ipcache.upsert(*claimed.values())
        self._claimed.update((key, (claim.resource, claim.prefix)) for key, claim in claimed.items())

    def _is_here(self, node: str) -> bool:
        try:
            ip = ip_address(node)
        except ValueError:
            return False
        return any(found.local for found in self._nodes.by("address").get(ip))


class SharedClaims:
    """Follows the table once this node is known; no leftover of the map goes before all of it is."""

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
            jobs.observe("claim", self._rounds, self._follow)

    async def _rounds(self) -> AsyncIterator[Sequence[Change[str, SharedAddress]] | None]:
        """None at the beginning: everything is to be looked at.

        Identities come first: no rule would deny by a number without known labels.
        """
        await self._identities.table.wait_initialized()
        await self._addresses.wait_initialized()
        changes = self._addresses.changes(self._addresses.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: Sequence[Change[str, SharedAddress]] | None) -> None:
        """Raises OSError where the ipcache cannot follow: then all is looked at again."""
        await self._claims.follow(changes)
        if changes is None:
            self._first.done()


def _stretches(items: Iterable[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while stretch := list(islice(rest, STRETCH)):
        yield stretch


# What this node writes into the store: itself, and its pods' addresses.
#
# Controller: endpoints, pods and this node in, keys out, which the store is made to hold.


@after(ExposedEndpoints)
class SharedKeys:
    """Keeps the keys; none goes before restored endpoints and this node are known."""

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
        self._of: dict[int, list[str]] = {}
        """The keys of each endpoint."""
        if not store.enabled:
            return
        self._first = self._keys.initializer("endpoints")
        own = nodes.filter(lambda node: node.local, name="own-shared-node")
        node_keys = own.flat_map(
            lambda node: (node_key(node, agent.cluster_id),), key=lambda row: row.key, name="node-keys"
        )
        self._node_keys = keep_keys(
            store, node_keys, "nodes/v1", jobs=jobs, tables=tables, after=[shared.nodes]
        )
        self._address_keys = keep_keys(
            *(store, self._keys, "ip/v1"),
            jobs=jobs,
            tables=tables,
            left=self._left,
            after=[shared.addresses],
        )
        jobs.observe("endpoints", endpoints.changes, self._follow)
        jobs.observe("pods", pods.changes, self._follow_pods)
        jobs.observe("this node", self._own_row, self._follow_node)
        jobs.observe("addresses in the store", shared.addresses.changes, self._look_at_addresses)
        jobs.observe("nodes in the store", shared.nodes.changes, self._look_at_nodes)

    @property
    def _own(self) -> ClusterNode | None:
        return self._nodes.get(f"{self._agent.cluster_name}/{self._agent.node_name}")

    async def _own_row(self) -> AsyncIterator[None]:
        name = f"{self._agent.cluster_name}/{self._agent.node_name}"
        seen = self._nodes.get(name)
        while True:
            if seen is not None:
                yield
            seen = await self._nodes.wait_changed(name, seen)

    async def _follow_node(self, _: None) -> None:
        self._report(one.id for one in self._endpoints.all())
        self._first.done()

    async def _follow(self, changes: Sequence[Change[int, Endpoint]]) -> None:
        self._report(change.key for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[tuple[str, str], Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._report(one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed)

    def _report(self, numbers: Iterable[int]) -> None:
        node = self._own
        if node is None:
            return
        with self._keys.txn() as rows:
            for number in numbers:
                keys = self._keys_of(self._endpoints.get(number), node)
                for key in set(self._of.pop(number, ())) - {row.key for row in keys}:
                    rows.delete(key)
                for row in keys:
                    rows.put(row)
                if keys:
                    self._of[number] = [row.key for row in keys]

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

    def _left(self) -> dict[str, str]:
        """Keys of this node in the store: an earlier agent's of deleted pods."""
        node = self._own
        own = {str(each.ip) for each in node.addresses} if node is not None else set()
        return {f"{IPS}{row.address}": row.value for row in self._addresses.all() if row.node in own}

    # What others do to them

    async def _look_at_addresses(self, changes: Sequence[Change[str, SharedAddress]]) -> None:
        """Deleted keys are written again at once.

        Overwritten ones are left to the periodic comparison: two nodes that claim one address would overwrite
        each other's key as fast as they can.
        """
        if any(change.row is None and f"{IPS}{change.key}" in self._keys for change in changes):
            self._address_keys.trigger()

    async def _look_at_nodes(self, changes: Sequence[Change[str, ClusterNode]]) -> None:
        node = self._own
        removed = {change.key for change in changes if change.row is None}
        if node is not None and node.full_name in removed:
            self._node_keys.trigger()


def shared_nodes(shared: SharedTables) -> SharedNodes:
    """Nodes from the store."""
    return shared.nodes


cell = group(
    module(
        "shared-tables", "What other nodes have written to the store", provide(SharedTables, shared_nodes)
    ),
    module(
        "shared",
        "This node in the store, and addresses of others' pods from it",
        provide(SharedKeys, SharedClaims),
        invoke(SharedKeys, SharedClaims),
    ),
)
