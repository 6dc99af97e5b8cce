"""What this node tells through the store: itself, and its pods' addresses.

Controller: endpoints, pods and this node in, keys out, which the store is made to hold.
Needs:  KVStore, Table[Endpoint], Table[Pod], ReadTable[ClusterNode], SharedTables, ExposedEndpoints.
Gives:  SharedKeys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from cells.cluster.kvstore import IPS, KVStore, OwnKey, keep_keys
from cells.cluster.nodes import ClusterNode
from cells.cluster.shared.addresses import NamedPort, SharedAddress, address_keys
from cells.cluster.shared.nodes import node_key
from cells.cluster.shared.tables import SharedTables
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.ipam import Family
from cells.kubernetes import Pod
from lifecycle import Change, Jobs, ReadTable, Table, Tables, after


@after(ExposedEndpoints)
class SharedKeys:
    """Keeps the keys; none goes before restored endpoints and this node are known."""

    def __init__(
        self,
        agent: AgentConfig,
        store: KVStore,
        endpoints: Table[Endpoint],
        pods: Table[Pod],
        nodes: ReadTable[ClusterNode],
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
        self._keys: Table[OwnKey] = Table("shared-address-keys", key=lambda row: row.key)
        self._of: dict[int, list[str]] = {}
        """The keys of each endpoint."""
        if not store.enabled:
            return
        self._first = self._keys.initializer("endpoints")
        own = nodes.filter(lambda node: node.local, name="own-shared-node")
        node_keys = own.flat_map(lambda node: (node_key(node),), key=lambda row: row.key, name="node-keys")
        self._node_keys = keep_keys(store, node_keys, jobs=jobs, tables=tables, after=[shared.nodes])
        self._address_keys = keep_keys(
            store, self._keys, jobs=jobs, tables=tables, left=self._left, after=[shared.addresses]
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
        self._tell(one.id for one in self._endpoints.all())
        self._first.done()

    async def _follow(self, changes: Sequence[Change[Endpoint]]) -> None:
        self._tell(int(str(change.key)) for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._tell(one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed)

    def _tell(self, numbers: Iterable[int]) -> None:
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
            NamedPort(port.name, port.container_port, port.protocol)
            for port in (pod.named_ports if pod is not None else ())
        ]
        host = node.node_ip(Family.IPV4) or node.node_ip(Family.IPV6)
        ports.sort(key=lambda port: (port.name, port.port))
        return list(address_keys(endpoint, node.name, host, ports, node.encryption_key))

    def _left(self) -> dict[str, str]:
        """Keys that say that this node has them: a former agent's of pods that are gone."""
        node = self._own
        own = {str(each.ip) for each in node.addresses} if node is not None else set()
        return {f"{IPS}{row.address}": row.value for row in self._addresses.all() if row.node in own}

    # What others do to them

    async def _look_at_addresses(self, changes: Sequence[Change[SharedAddress]]) -> None:
        for change in changes:
            wanted = self._keys.get(f"{IPS}{change.key}")
            if wanted is not None and (change.row is None or change.row.value != wanted.value):
                self._address_keys.trigger()
                return

    async def _look_at_nodes(self, changes: Sequence[Change[ClusterNode]]) -> None:
        node = self._own
        gone = {change.key for change in changes if change.row is None}
        if node is not None and node.full_name in gone:
            self._node_keys.trigger()
