"""Pods of other nodes in the ipcache: each address with its identity and tunnel endpoint.

In:   CiliumEndpoints or CiliumEndpointSlices (RemoteEndpoints), or Pods of manifests (ManifestPods).
Out:  claims in the ipcache.
Why:  the datapath finds the identity of a packet's source by its address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from ipaddress import IPv4Address, ip_address
from typing import Final

import anyio.lowlevel
import msgspec

from cells.base.addresses import Family
from cells.base.labels import texts
from cells.base.metrics import Collector, features
from cells.cluster.identity.identities import ClusterAllocator, Identities, NodeAllocator, NoIdentityError
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source, prefix_of
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.remote_endpoints import (
    ClusterEndpointSettings,
    EndpointObjects,
    RemoteEndpoints,
    chunks,
    endpoint_objects,
    remote_endpoints,
)
from cells.config import AgentConfig
from cells.endpoint import KubernetesPods
from cells.kubernetes.objects.core import Namespace, Pod
from cells.kubernetes.settings import ObjectSource
from lifecycle import Change, Health, Jobs, Member, ReadTable, config, group, invoke, module, provide

__all__ = ["cell"]


# Pods of other nodes by their Pod objects, for agents that read manifests and have no API server or kvstore.
#
# Why: these nodes do not agree on identity numbers, and publish no CiliumEndpoints. The manifests have all
#      labels of an identity, so each node allocates its own numbers for other nodes' pods. Packets need not
#      carry the number: the receiving node looks it up by the source address.

PodKey = tuple[str, str]
NO_TUNNEL_ENDPOINT: Final = IPv4Address(0)


class _PodClaims(msgspec.Struct, frozen=True):
    """The identity and claims of a pod."""

    identity: int
    claims: tuple[IpcacheEntry, ...]


class ManifestPods:
    """Claims the addresses of pods on other nodes.

    Until all are processed, no leftover of the ipcache is deleted and no restored endpoint gets new rules.
    CiliumEndpoints and CiliumIdentities in the same manifests take precedence.
    """

    def __init__(
        self,
        agent: AgentConfig,
        source: ObjectSource,
        allocator: ClusterAllocator | None,
        objects: KubernetesPods,
        nodes: ReadTable[str, ClusterNode],
        *,
        identities: Identities,
        ipcache: Ipcache,
        jobs: Jobs,
        health: Health,
    ) -> None:
        alone = allocator is None or isinstance(allocator, NodeAllocator)
        if source is not ObjectSource.MANIFESTS or not alone:
            return
        self._agent = agent
        self._objects = objects
        self._pods = objects.pods
        self._namespaces = objects.namespaces
        self._nodes = nodes
        self._identities = identities
        self._ipcache = ipcache
        self._health = health.child("pods-by-manifests")
        self._claimed_pods: dict[PodKey, _PodClaims] = {}
        self._rejected: dict[PodKey, str] = {}
        self._identified = identities.table.initializer("manifest-pods")
        """Policy waits for these identities: without them restored endpoints would deny the pods that rules
        select.
        """
        self._claimed = ipcache.table.initializer("manifest-pods")
        jobs.observe("pods", self._batches, self._follow)
        jobs.observe("namespaces", objects.namespaces.changes, self._follow_namespaces)
        jobs.observe("nodes", nodes.changes, self._follow_nodes)

    async def _batches(self) -> AsyncIterator[Collection[PodKey] | None]:
        """Yield None, for all pods, once the tables are initialized; then the keys of changed pods."""
        await self._pods.wait_initialized()
        await self._namespaces.wait_initialized()
        await self._nodes.wait_initialized()
        changes = self._pods.changes(self._pods.revision)
        yield None
        async for batch in changes:
            yield {change.key for change in batch}

    async def _follow(self, keys: Collection[PodKey] | None) -> None:
        if keys is None:
            await self._update(self._all())
            self._identified.done()
            self._claimed.done()
        else:
            await self._update(keys)

    async def _follow_namespaces(self, changes: list[Change[tuple[str, str], Namespace]]) -> None:
        """Update the pods of changed namespaces: namespace labels are part of identities."""
        names = {change.key[1] for change in changes}
        await self._update({key for key in self._all() if key[0] in names})

    async def _follow_nodes(self, _: list[Change[str, ClusterNode]]) -> None:
        """Update all pods: node addresses are their tunnel endpoints."""
        await self._update(self._all())

    def _all(self) -> set[PodKey]:
        return {pod.key for pod in self._pods.all()} | self._claimed_pods.keys()

    async def _update(self, keys: Collection[PodKey]) -> None:
        """Update the claims of these pods. Raises OSError if the ipcache cannot be written."""
        if not self._pods.initialized or not self._namespaces.initialized:
            return  # the first batch contains all pods
        for chunk in chunks(keys):
            for key in chunk:
                self._update_pod(key, self._remote_pod(key))
            await anyio.lowlevel.checkpoint()
        self._report_health()

    def _remote_pod(self, key: PodKey) -> tuple[Pod, tuple[str, ...]] | None:
        """Return a running pod of another node with its identity labels, or None."""
        pod = self._pods.get(key)
        if pod is None or not self._on_other_node(pod) or pod.finished or not pod.addresses:
            return None
        return pod, texts(self._identities.filter.split(self._objects.labels_of(pod))[0])

    def _on_other_node(self, pod: Pod) -> bool:
        node = pod.spec.node_name
        return bool(node) and node != self._agent.node_name and not pod.spec.host_network

    def _update_pod(self, key: PodKey, wanted: tuple[Pod, tuple[str, ...]] | None) -> None:
        before, known = self._claimed_pods.get(key), None
        self._rejected.pop(key, None)
        if wanted is not None:
            try:
                known = self._acquire(key, *wanted)
            except (NoIdentityError, ValueError) as error:
                self._rejected[key] = str(error)
        claims = known.claims if known is not None else ()
        left = {one.prefix for one in before.claims} - {one.prefix for one in claims} if before else set()
        try:
            if left:
                self._ipcache.withdraw(_pod_resource(key), left)
            if known is not None and (before is None or before.claims != known.claims):
                self._ipcache.upsert(*known.claims)
        except OSError:
            if known is not None:
                self._identities.release(known.identity)
            raise
        if before is not None:
            self._identities.release(before.identity)
        if known is not None:
            self._claimed_pods[key] = known
        else:
            self._claimed_pods.pop(key, None)

    def _acquire(self, key: PodKey, pod: Pod, labels: tuple[str, ...]) -> _PodClaims:
        """Acquire an identity for the pod, and return the claims of its addresses.

        Raises NoIdentityError, and ValueError for an invalid address.
        """
        addresses = [ip_address(text) for text in pod.addresses]
        left = self._ipcache.leftovers.get(prefix_of(addresses[0]))
        previous = left.identity if left is not None else 0
        found = self._identities.acquire_now(labels, previous)
        if found is None:
            raise NoIdentityError(f"labels {', '.join(labels)} have no identity")
        claims = tuple(
            IpcacheEntry(
                prefix=prefix_of(address),
                identity=found.id,
                source=Source.KUBERNETES,
                resource=_pod_resource(key),
                tunnel_endpoint=self._tunnel_endpoint_of(pod),
            )
            for address in addresses
        )
        return _PodClaims(found.id, claims)

    def _tunnel_endpoint_of(self, pod: Pod) -> IPv4Address:
        """Return the IPv4 address of the pod's node; 0.0.0.0 if it is unknown."""
        node = self._nodes.get(f"{self._agent.cluster_name}/{pod.spec.node_name}")
        address = node.node_ip(Family.IPV4) if node is not None else None
        return address if isinstance(address, IPv4Address) else NO_TUNNEL_ENDPOINT

    def _report_health(self) -> None:
        """Report the number of pods, and which pods and nodes policies by labels cannot select."""
        pods = [pod for pod in self._pods.all() if self._on_other_node(pod) and not pod.finished]
        nodes = {node.name for node in self._nodes.all() if not node.local}
        without_pods = sorted(nodes - {pod.spec.node_name for pod in pods})
        parts = [f"{len(self._claimed_pods)} pods of other nodes are known from manifests"]
        if without_address := sum(not pod.addresses for pod in pods):
            parts.append(
                f"{without_address} have no address in status.podIPs: policies by labels do not select them"
            )
        if without_pods:
            named = ", ".join(without_pods[:3]) + (", ..." if len(without_pods) > 3 else "")
            parts.append(f"there is no Pod of {named}: policies by labels do not select pods there")
        if self._rejected:
            key, why = next(iter(self._rejected.items()))
            parts.append(f"{len(self._rejected)} have no identity, {key[0]}/{key[1]}: {why}")
            self._health.degraded("; ".join(parts))
        else:
            self._health.ok("; ".join(parts))


def _pod_resource(key: PodKey) -> str:
    """Return the resource of the pod's claims."""
    return f"pod/{key[0]}/{key[1]}"


def endpoint_features(objects: EndpointObjects) -> Member[Collector]:
    """Whether CiliumEndpointSlices are read, as a feature in use."""
    return features(
        "endpoint-features", lambda: {"controlplane_cilium_endpoint_slices_enabled": objects.slices}
    )


cell = group(
    module(
        "remote-endpoints",
        "Pods of other nodes, from CiliumEndpoints or slices",
        config(ClusterEndpointSettings),
        provide(endpoint_objects, endpoint_features, remote_endpoints),
    ),
    module(
        "cluster-endpoints",
        "Pods of other nodes in the ipcache",
        provide(RemoteEndpoints, ManifestPods),
        invoke(RemoteEndpoints, ManifestPods),
    ),
)
