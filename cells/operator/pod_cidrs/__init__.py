"""Pod CIDRs: every CiliumNode gets a range of each family out of the cluster's pools.

Controller: CiliumNodes in, the table ``cilium-node-requests`` out: what a node's object does not say yet.
Reconciler: that table in, ``spec.ipam.podCIDRs`` and ``status.ipam.operator-status`` of CiliumNodes out.
Why:        what nodes hold is adopted before anything is given out, so no two nodes get one range, whatever
            happened while no operator ran.
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


# The pools that nodes get their ranges from.


class PodCIDRSettings(Settings, frozen=True):
    """Settings of the pod-cidrs cell; they count in IPAM mode cluster-pool."""

    cluster_pool_ipv4_cidr: tuple[str, ...] = ()
    """IPv4 networks that nodes get their ranges from; the first that is not full."""

    cluster_pool_ipv4_mask_size: int = 24
    """Prefix length of a node's IPv4 range."""

    cluster_pool_ipv6_cidr: tuple[str, ...] = ()
    """IPv6 networks that nodes get their ranges from; the first that is not full."""

    cluster_pool_ipv6_mask_size: int = 112
    """Prefix length of a node's IPv6 range."""

    def faults(self) -> Iterator[str]:
        """In Cilium's words."""
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
    """Gives out ranges once every CiliumNode is known. The start fails for pools that cannot be."""

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
        """Whether ranges are ours to give."""
        self.ledger: Ledger | None = None
        """Who has what, once the hook has run."""
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
        """Everything that changed since the last time, in one step; the first time all that is held."""
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
    """The pools of a family. Raises HiveError, in Cilium's words."""
    name = f"cluster-pool-ipv{version}-cidr"
    if enabled and not cidrs:
        raise HiveError(f"{name} must be provided when using ClusterPool")
    if cidrs and not enabled:
        raise HiveError(f"{name} must not be set if IPv{version} is disabled")
    try:
        return CidrPools(version, cidrs, mask)
    except PoolError as error:
        raise HiveError(f"unable to initialize IPv{version} allocator: {error}") from error


# Writes what CiliumNodes do not say yet.
#
# Why: merge patches: two fields are the operator's, the others are not touched, so nothing an agent writes at
#      the same moment is lost. The uid names the node that is meant: one made anew under the name is another.
#      Ranges of pools are written by agents, too, who give them back: they are read, compared with what was
#      decided upon, and written over that version of the object alone.

AT_ONCE: Final = 8
"""Requests under way together; more of them make each dearer, and nothing faster."""


def with_pools(patch: NodePatch, pools: PoolsPatch, live: dict[str, Any]) -> dict[str, Any] | None:
    """The object with its new ranges; None for another node, or one that has other ranges by now.

    That one is looked at as it comes by the watch.
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
    """CiliumNodes, as far as the operator writes them."""

    async def put(self, batch: Mapping[str, NodePatch]) -> None:
        """Write them, several at a time. Raises BatchError."""
        waiting = iter(batch.values())
        with BatchFailures(KubernetesError) as failures:

            async def work() -> None:
                for patch in waiting:
                    with failures.of(patch.name):
                        await self.write_if_there(patch)

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
"""How often what nodes still do not say is written again."""


def node_patches() -> Table[str, NodePatch]:
    """What CiliumNodes do not say yet, by node."""
    return Table("cilium-node-requests", key=lambda one: one.name)


def write(server: ClusterAPI, patches: Table[str, NodePatch], pod_cidrs: PodCIDRs, jobs: Jobs) -> None:
    """Queue writes, where there can be any."""
    if pod_cidrs.active:
        jobs.observe("write", Reconciler(patches, NodeWriter(server), full_every=AGAIN, put_early=True))


cell = module(
    "pod-cidrs",
    "Pod ranges of nodes, from the cluster's pools",
    config(PodCIDRSettings),
    provide(node_patches, PodCIDRs),
    invoke(write),
)
