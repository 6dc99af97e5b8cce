"""IPAM mode cluster-pool: allocates a pod CIDR of each family to each CiliumNode.

Table ``cilium-node-requests``: the pending changes of CiliumNodes. A reconciler writes them to
``spec.ipam.podCIDRs`` and ``status.ipam.operator-status``.

Existing allocations are adopted before new ones are made, so that no two nodes get one range after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from cells.kubernetes.client.errors import KubernetesError
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, AllocatedPool
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.objects import ClusterObjects
from cells.operator.options import ServedCluster
from cells.operator.pod_cidrs.ledger import (
    CidrPools,
    Ledger,
    Network,
    NodePatch,
    PoolError,
    PoolsPatch,
    parsed,
    reported_ranges,
)
from lifecycle import (
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Reconciler,
    Settings,
    Table,
    config,
    invoke,
    minutes,
    module,
    provide,
)
from lifecycle.tables import BatchFailures

__all__ = [
    "AGAIN",
    "CidrPools",
    "Network",
    "NodePatch",
    "NodeWriter",
    "PodCIDRSettings",
    "PodCIDRs",
    "PoolError",
    "PoolsPatch",
    "cell",
    "parsed",
    "reported_ranges",
]


# The pools that nodes' ranges are allocated from.


class PodCIDRSettings(Settings, frozen=True):
    """Settings of the pod-cidrs cell; used in IPAM mode cluster-pool."""

    cluster_pool_ipv4_cidr: tuple[str, ...] = ()
    """IPv4 networks from which nodes' ranges are allocated; the first with a free range."""

    cluster_pool_ipv4_mask_size: int = 24
    """Prefix length of a node's IPv4 range."""

    cluster_pool_ipv6_cidr: tuple[str, ...] = ()
    """IPv6 networks from which nodes' ranges are allocated; the first with a free range."""

    cluster_pool_ipv6_mask_size: int = 112
    """Prefix length of a node's IPv6 range."""

    def faults(self) -> Iterator[str]:
        """Yield invalid settings, in Cilium's words."""
        for version, cidrs, mask in (
            (4, self.cluster_pool_ipv4_cidr, self.cluster_pool_ipv4_mask_size),
            (6, self.cluster_pool_ipv6_cidr, self.cluster_pool_ipv6_mask_size),
        ):
            try:
                CidrPools(version, cidrs, mask)
            except PoolError as error:
                yield f"cluster-pool-ipv{version}-cidr: unable to initialize IPv{version} allocator: {error}"


# Keeps the ledger up to date with CiliumNodes.


class PodCIDRs:
    """Allocates ranges, once CiliumNodes are synchronized; the start fails for invalid pools."""

    def __init__(
        self,
        cluster: ServedCluster,
        settings: PodCIDRSettings,
        objects: ClusterObjects,
        patches: Table[str, NodePatch],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._nodes = objects.table(CILIUM_NODES)
        self._patches = patches
        self._log = log
        self.active = cluster.ipam == "cluster-pool"
        """Whether the IPAM mode is cluster-pool."""
        self.ledger: Ledger | None = None
        """The ranges of each node; set by the start hook."""
        if self.active:
            lifecycle.append(Hook("find the pools", self._start))
            jobs.one_shot("allocate", self._run)

    async def _start(self) -> None:
        cluster, settings = self._cluster, self._settings
        self.ledger = Ledger(
            pools(4, cluster.ipv4, settings.cluster_pool_ipv4_cidr, settings.cluster_pool_ipv4_mask_size),
            pools(6, cluster.ipv6, settings.cluster_pool_ipv6_cidr, settings.cluster_pool_ipv6_mask_size),
        )

    async def _run(self) -> None:
        """Process all pending changes in one step; the first step adopts the existing allocations."""
        await self._nodes.wait_initialized()
        ledger = self.ledger
        assert ledger is not None  # noqa: S101  # its hook has run
        async for changes in self._nodes.changes():
            changed = {one.key[1]: one.row for one in changes}
            patches = ledger.update(changed)
            with self._patches.txn() as txn:
                for name, patch in patches.items():
                    if patch is None:
                        txn.delete(name)
                        continue
                    txn.put(patch)
                    self._report(patch)

    def _report(self, patch: NodePatch) -> None:
        if patch.error:
            self._log.warning(
                "node does not get the pod ranges it requests", node=patch.name, error=patch.error
            )
        elif patch.cidrs:
            self._log.debug("node has its pod ranges", node=patch.name, cidrs=patch.cidrs)


def pools(version: int, enabled: bool, cidrs: tuple[str, ...], mask: int) -> CidrPools:
    """Return the pools of a family. Raises HiveError, in Cilium's words."""
    name = f"cluster-pool-ipv{version}-cidr"
    if enabled and not cidrs:
        raise HiveError(f"{name} must be provided when using ClusterPool")
    if cidrs and not enabled:
        raise HiveError(f"{name} must not be set if IPv{version} is disabled")
    try:
        return CidrPools(version, cidrs, mask)
    except PoolError as error:
        raise HiveError(f"unable to initialize IPv{version} allocator: {error}") from error


# Writes the pending changes of CiliumNodes.
#
# Merge patches change only the operator's two fields, so concurrent writes of agents are not lost. The uid
# prevents writes to a recreated node. Agents write ranges of pools, too, when they release them: these are
# read, compared with those the decision was based on, and written with the object's resourceVersion.

AT_ONCE: Final = 8
"""Number of concurrent requests; more do not increase the throughput."""


def with_pools(patch: NodePatch, pools: PoolsPatch, live: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object with its new ranges, or None if it was recreated or has other ranges by now.

    Its next event of the watch is then processed.
    """
    if live["metadata"].get("uid") != patch.uid:
        return None
    ipam = live.setdefault("spec", {}).setdefault("ipam", {})
    pools_status = ipam.setdefault("pools", {})
    if (
        reported_ranges(msgspec.convert(pools_status.get("allocated") or [], list[AllocatedPool]))
        != pools.reported
    ):
        return None
    pools_status["allocated"] = msgspec.to_builtins(pools.allocated)
    return live


class NodeWriter(ObjectWriter[str, NodePatch]):
    """Writes the operator's fields of CiliumNodes."""

    async def put(self, batch: Mapping[str, NodePatch]) -> None:
        """Write several patches concurrently. Raises BatchError."""
        waiting = iter(batch.values())
        with BatchFailures(KubernetesError) as failures:

            async def work() -> None:
                for patch in waiting:
                    with failures.of(patch.name):
                        await self.write_existing(patch)

            async with anyio.create_task_group() as group:
                for _ in range(min(AT_ONCE, len(batch))):
                    group.start_soon(work)

    async def write(self, patch: NodePatch) -> None:
        """See ObjectWriter."""
        if patch.cidrs is not None:
            await self._patch(patch, {"spec": {"ipam": {"podCIDRs": list(patch.cidrs)}}})
        if patch.pools is not None:
            change = partial(with_pools, patch, patch.pools)
            await self.server.client.update(CILIUM_NODES, patch.name, change)
        if patch.error_changed:
            status = {"ipam": {"operator-status": {"error": patch.error or None}}}
            await self._patch(patch, {"status": status}, "status")

    async def _patch(self, patch: NodePatch, change: dict[str, Any], subresource: str = "") -> None:
        body = {"metadata": {"uid": patch.uid}, **change}
        await self.server.client.patch(CILIUM_NODES, patch.name, body, subresource=subresource)


AGAIN = minutes(1)
"""Interval at which pending changes are written again."""


def node_patches() -> Table[str, NodePatch]:
    """Create the table of pending changes of CiliumNodes, by node."""
    return Table("cilium-node-requests", key=lambda one: one.name)


def write(server: ClusterAPI, patches: Table[str, NodePatch], pod_cidrs: PodCIDRs, jobs: Jobs) -> None:
    """Start the reconciler of CiliumNodes, if the mode is active."""
    if pod_cidrs.active:
        jobs.observe("write", Reconciler(patches, NodeWriter(server), full_every=AGAIN, put_early=True))


cell = module(
    "pod-cidrs",
    "Pod ranges of nodes, from the cluster's pools",
    config(PodCIDRSettings),
    provide(node_patches, PodCIDRs),
    invoke(write),
)
