"""Pods of other nodes: their addresses in the ipcache, with identity and node.

Source: CiliumEndpoint objects, or CiliumEndpointSlices, in; claims of prefixes out. Pods of manifests, too.
Why:    by its address alone a packet is known to be a pod's, and which pod's.
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
    endpoint_objects,
    remote_endpoints,
    stretches,
)
from cells.config import AgentConfig
from cells.endpoint import KubernetesPods
from cells.kubernetes.objects.core import Namespace, Pod
from cells.kubernetes.settings import ObjectSource
from lifecycle import Change, Health, Jobs, Member, ReadTable, config, group, invoke, module, provide

__all__ = ["cell"]


# Pods of other nodes by their Pod objects, for agents that share manifests and nothing else.
#
# Source: tables of pods, namespaces and nodes in; claims in the ipcache out.
# Why:    without an API server or a kvstore nodes do not agree upon numbers of identities, and publish no
#         CiliumEndpoints. Manifests say all that an identity is made of, so each node gives the labels of
#         other nodes' pods numbers of its own. Packets need none: this node knows their source by its
#         address.

PodKey = tuple[str, str]
NOWHERE: Final = IPv4Address(0)


class _Known(msgspec.Struct, frozen=True):
    """What is claimed of a pod."""

    identity: int
    claims: tuple[IpcacheEntry, ...]


class ManifestPods:
    """Follows pods of other nodes; before all are known no leftover of the ipcache goes, and no rule counts.

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
        self._known: dict[PodKey, _Known] = {}
        self._refused: dict[PodKey, str] = {}
        self._identified = identities.table.initializer("manifest-pods")
        """Rules are not known without it: restored endpoints would be closed to the pods they select."""
        self._claimed = ipcache.table.initializer("manifest-pods")
        jobs.observe("pods", self._rounds, self._follow)
        jobs.observe("namespaces", objects.namespaces.changes, self._follow_namespaces)
        jobs.observe("nodes", nodes.changes, self._follow_nodes)

    async def _rounds(self) -> AsyncIterator[Collection[PodKey] | None]:
        """The pods to look at; None at the beginning: all."""
        await self._pods.wait_initialized()
        await self._namespaces.wait_initialized()
        await self._nodes.wait_initialized()
        changes = self._pods.changes(self._pods.revision)
        yield None
        async for batch in changes:
            yield {change.key for change in batch}

    async def _follow(self, keys: Collection[PodKey] | None) -> None:
        if keys is None:
            await self._look(self._all())
            self._identified.done()
            self._claimed.done()
        else:
            await self._look(keys)

    async def _follow_namespaces(self, changes: list[Change[tuple[str, str], Namespace]]) -> None:
        """A namespace's labels are its pods'."""
        names = {change.key[1] for change in changes}
        await self._look({key for key in self._all() if key[0] in names})

    async def _follow_nodes(self, _: list[Change[str, ClusterNode]]) -> None:
        """Addresses of nodes are the ways to their pods."""
        await self._look(self._all())

    def _all(self) -> set[PodKey]:
        return {pod.key for pod in self._pods.all()} | self._known.keys()

    async def _look(self, keys: Collection[PodKey]) -> None:
        """Claim what these pods have. Raises OSError if the ipcache cannot be updated."""
        if not self._pods.initialized or not self._namespaces.initialized:
            return  # the first round looks at all of them
        for stretch in stretches(keys):
            for key in stretch:
                self._set(key, self._wanted(key))
            await anyio.lowlevel.checkpoint()
        self._report()

    def _wanted(self, key: PodKey) -> tuple[Pod, tuple[str, ...]] | None:
        """A pod of another node that packets come from, and its security labels."""
        pod = self._pods.get(key)
        if pod is None or not self._is_elsewhere(pod) or pod.finished or not pod.addresses:
            return None
        return pod, texts(self._identities.filter.split(self._objects.labels_of(pod))[0])

    def _is_elsewhere(self, pod: Pod) -> bool:
        node = pod.spec.node_name
        return bool(node) and node != self._agent.node_name and not pod.spec.host_network

    def _set(self, key: PodKey, wanted: tuple[Pod, tuple[str, ...]] | None) -> None:
        before, known = self._known.get(key), None
        self._refused.pop(key, None)
        if wanted is not None:
            try:
                known = self._acquired(key, *wanted)
            except (NoIdentityError, ValueError) as error:
                self._refused[key] = str(error)
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
            self._known[key] = known
        else:
            self._known.pop(key, None)

    def _acquired(self, key: PodKey, pod: Pod, labels: tuple[str, ...]) -> _Known:
        """An identity of this node's own for a pod, and the claims of its addresses.

        Raises NoIdentityError, and ValueError for an address that is none.
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
                tunnel_endpoint=self._way_to(pod),
            )
            for address in addresses
        )
        return _Known(found.id, claims)

    def _way_to(self, pod: Pod) -> IPv4Address:
        """The address of its node that packets to it are tunnelled to."""
        node = self._nodes.get(f"{self._agent.cluster_name}/{pod.spec.node_name}")
        address = node.node_ip(Family.IPV4) if node is not None else None
        return address if isinstance(address, IPv4Address) else NOWHERE

    def _report(self) -> None:
        """What is known, and what policies by label do not select."""
        pods = [pod for pod in self._pods.all() if self._is_elsewhere(pod) and not pod.finished]
        nodes = {node.name for node in self._nodes.all() if not node.local}
        silent = sorted(nodes - {pod.spec.node_name for pod in pods})
        parts = [f"{len(self._known)} pods of other nodes are known by their manifests"]
        if late := sum(not pod.addresses for pod in pods):
            parts.append(f"{late} have no address in status.podIPs, no policy by labels selects them")
        if silent:
            named = ", ".join(silent[:3]) + (", ..." if len(silent) > 3 else "")
            parts.append(f"of {named} there is no Pod, no policy by labels selects pods there")
        if self._refused:
            key, why = next(iter(self._refused.items()))
            parts.append(f"{len(self._refused)} have no identity, {key[0]}/{key[1]}: {why}")
            self._health.degraded("; ".join(parts))
        else:
            self._health.ok("; ".join(parts))


def _pod_resource(key: PodKey) -> str:
    """Which object the claims are of."""
    return f"pod/{key[0]}/{key[1]}"


def endpoint_features(objects: EndpointObjects) -> Member[Collector]:
    """Whether CiliumEndpointSlices are read, as a feature in use."""
    return features(
        "endpoint-features", lambda: {"controlplane_cilium_endpoint_slices_enabled": objects.slices}
    )


cell = group(
    module(
        "remote-endpoints",
        "Where pods of other nodes are read from",
        config(ClusterEndpointSettings),
        provide(endpoint_objects, endpoint_features, remote_endpoints),
    ),
    module(
        "cluster-endpoints",
        "Pods of other nodes",
        provide(RemoteEndpoints, ManifestPods),
        invoke(RemoteEndpoints, ManifestPods),
    ),
)
