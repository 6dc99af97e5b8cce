"""Pods of other nodes, as far as this node knows them: by name or address, with their node and named ports.

Needs: tables of pods, remote endpoints, nodes, and addresses in the kvstore.   Gives: OtherNodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from ipaddress import ip_address
from typing import NamedTuple

from cells.cluster.endpoints import RemoteEndpoint
from cells.cluster.nodes import ClusterNode
from cells.cluster.shared import SharedTables
from cells.ipam import IPAddress
from cells.kubernetes import Pod
from cells.policy.control import NamedPort, of_pod, of_remote
from lifecycle import ReadTable, Table

SOMEWHERE = "its node"


class RemotePod(NamedTuple):
    """A pod of another node."""

    name: str
    """Namespace and name."""
    address: IPAddress
    node: str
    """The node's name; ``its node`` where that is not known."""


class OtherNodes:
    """Looks pods up where this node's agent knows them from: objects, the kvstore, CiliumEndpoints."""

    def __init__(
        self,
        pods: Table[Pod],
        remote: Table[RemoteEndpoint] | None,
        shared: SharedTables | None,
        nodes: ReadTable[ClusterNode] | None,
    ) -> None:
        self._pods = pods
        self._remote = remote
        self._shared = shared
        self._nodes = nodes

    def pod(self, name: str) -> RemotePod | None:
        """The pod of this namespace and name; None where none is known, or no address of it."""
        namespace, _, short = name.partition("/")
        row = self._remote.get((namespace, short)) if self._remote is not None else None
        if row is not None and row.prefixes:
            address = ip_address(row.prefixes[-1].partition("/")[0])
            return RemotePod(name, address, self._node_at(row.node))
        for one in self._shared.addresses.all() if self._shared is not None else ():
            if (one.namespace, one.pod) == (namespace, short):
                return RemotePod(name, ip_address(one.prefix.partition("/")[0]), self._node_at(one.node))
        pod = self._pods.get((namespace, short))
        if pod is not None and pod.addresses and not pod.finished:
            return RemotePod(name, ip_address(pod.addresses[0]), pod.spec.node_name or SOMEWHERE)
        return None

    def at(self, address: IPAddress) -> RemotePod | None:
        """The pod that has an address."""
        prefix = f"{address}/{address.max_prefixlen}"
        for row in self._remote.all() if self._remote is not None else ():
            if prefix in row.prefixes:
                return RemotePod(f"{row.namespace}/{row.name}", address, self._node_at(row.node))
        shared = self._shared.addresses.get(str(address)) if self._shared is not None else None
        if shared is not None and shared.pod:
            return RemotePod(f"{shared.namespace}/{shared.pod}", address, self._node_at(shared.node))
        for pod in self._pods.by("address").get(str(address)):
            return RemotePod("/".join(pod.key), address, pod.spec.node_name or SOMEWHERE)
        return None

    def names(self) -> Collection[str]:
        """All that are known, by namespace and name."""
        found = {"/".join(pod.key) for pod in self._pods.all()}
        found |= {"/".join(row.key) for row in self._remote.all()} if self._remote is not None else set()
        if self._shared is not None:
            found |= {f"{one.namespace}/{one.pod}" for one in self._shared.addresses.all() if one.pod}
        return found

    def is_host_network(self, name: str) -> bool:
        """Whether a pod has no network of its own."""
        namespace, _, short = name.partition("/")
        pod = self._pods.get((namespace, short))
        return pod is not None and pod.spec.host_network

    def ports(self, name: str) -> list[NamedPort]:
        """The ports that a pod's containers name."""
        namespace, _, short = name.partition("/")
        if (pod := self._pods.get((namespace, short))) is not None:
            return sorted(of_pod(pod))
        row = self._remote.get((namespace, short)) if self._remote is not None else None
        return sorted(of_remote(row)) if row is not None else []

    def node_of(self, address: IPAddress) -> ClusterNode | None:
        """The other node that has the address, itself or in the ranges of its pods."""
        return next((node for node in self._others() if _has(node, address)), None)

    def is_node(self, address: IPAddress) -> ClusterNode | None:
        """The node, this one too, that has the address itself."""
        found = self._nodes.by("address").get(address) if self._nodes is not None else ()
        return next(iter(found), None)

    def _others(self) -> Iterator[ClusterNode]:
        return (node for node in (self._nodes.all() if self._nodes is not None else ()) if not node.local)

    def _node_at(self, text: str) -> str:
        try:
            node = self.is_node(ip_address(text))
        except ValueError:
            node = None
        return node.name if node is not None else SOMEWHERE


def _has(node: ClusterNode, address: IPAddress) -> bool:
    return any(address == each.ip for each in node.addresses) or any(
        address in network for network in node.all_cidrs()
    )
