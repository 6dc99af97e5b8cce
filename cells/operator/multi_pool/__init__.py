"""IPAM mode multi-pool: allocates ranges of CiliumPodIPPools to CiliumNodes as agents request them.

Table ``cilium-node-requests``: the pending changes of CiliumNodes. A reconciler writes them to
``spec.ipam.pools.allocated`` and ``status.ipam.operator-status``.

Agents request addresses and release ranges; the operator only adds ranges. Existing allocations are adopted
before new ones are made. No address is allocated to two nodes, even if pools overlap or change while in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any, Final

import anyio
from msgspec import field

from cells.kubernetes.client.errors import ApiError, ConflictError
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.cilium_pools import CILIUM_POD_IP_POOLS
from cells.operator.api_server import ClusterAPI
from cells.operator.multi_pool.ledger import NodePatches, PoolLedger
from cells.operator.objects import ClusterObjects
from cells.operator.options import ServedCluster
from cells.operator.pod_cidrs import AGAIN, NodePatch, NodeWriter
from lifecycle import (
    Health,
    Jobs,
    Logger,
    Reconciler,
    Settings,
    Table,
    config,
    invoke,
    module,
    provide,
)

__all__ = ["MultiPool", "MultiPoolSettings", "cell"]


# Pools that the operator creates at its start unless pools of these names exist.

OPTION = "auto-create-cilium-pod-ip-pools"


class MultiPoolSettings(Settings, frozen=True):
    """Settings of the multi-pool cell; used in IPAM mode multi-pool."""

    auto_create_cilium_pod_ip_pools: dict[str, str] = field(default_factory=dict)
    """CiliumPodIPPools that are created at the start unless they exist:
    NAME=ipv4-cidrs:CIDR,CIDR;ipv4-mask-size:N;ipv6-cidrs:CIDR;ipv6-mask-size:N, separated by commas.
    """

    def faults(self) -> Iterator[str]:
        """Yield invalid settings, in Cilium's words."""
        for name, text in self.auto_create_cilium_pod_ip_pools.items():
            try:
                pool_spec(text)
            except ValueError as error:
                yield f"{OPTION}: {name}={text}: {error}"


def pool_spec(text: str) -> dict[str, Any]:
    """Return ``spec`` of a CiliumPodIPPool. Raises ValueError; missing fields are left to the API server."""
    spec: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(";")):
        key, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"{part}: expected KEY:VALUE, as in ipv4-mask-size:24")
        family, _, what = key.partition("-")
        if family not in {"ipv4", "ipv6"} or what not in {"cidrs", "mask-size"}:
            raise ValueError(
                f"{key}: expected ipv4-cidrs, ipv4-mask-size, ipv6-cidrs or ipv6-mask-size before the colon"
            )
        found: Any = _mask(key, value) if what == "mask-size" else _cidrs(key, int(family[-1]), value)
        spec.setdefault(family, {})["maskSize" if what == "mask-size" else "cidrs"] = found
    return spec


def _mask(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f'invalid value for key "{key}": {value}: expected a prefix length') from None


def _cidrs(key: str, version: int, value: str) -> list[str]:
    cidrs = value.split(",")
    for one in cidrs:
        try:
            right = "/" in one and ip_network(one, strict=False).version == version
        except ValueError:
            right = False
        if not right:
            raise ValueError(f'invalid value for key "{key}": {one}: expected an IPv{version} network')
    return cidrs


# Keeps the ledger up to date with CiliumPodIPPools and CiliumNodes.

INVALID: Final = 422


class MultiPool:
    """Allocates ranges, once pools and CiliumNodes are synchronized."""

    def __init__(
        self,
        cluster: ServedCluster,
        settings: MultiPoolSettings,
        server: ClusterAPI,
        objects: ClusterObjects,
        patches: Table[str, NodePatch],
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.active = cluster.ipam == "multi-pool"
        """Whether the IPAM mode is multi-pool."""
        self.ledger = PoolLedger()
        """The ranges of each node."""
        self._settings = settings
        self._server = server
        self._patches = patches
        self._health = health.child("pools")
        self._log = log
        self._defined = anyio.Event()
        if self.active:
            self._pools = objects.table(CILIUM_POD_IP_POOLS)
            self._nodes = objects.table(CILIUM_NODES)
            jobs.one_shot("follow-pools", self._follow_pools)
            jobs.one_shot("allocate", self._allocate)

    async def _follow_pools(self) -> None:
        """Create the configured pools, then follow all. Raises KubernetesError; the job is retried."""
        await self._pools.wait_initialized()
        for name, text in self._settings.auto_create_cilium_pod_ip_pools.items():
            if self._pools.get(("", name)) is None and await self._create(name, text):
                await self._pools.wait_for(("", name))
        feed = self._pools.changes()
        while True:
            changes = feed.take()
            changed = {one.key[1]: one.row for one in changes}
            for name in (name for name, row in changed.items() if row is None):
                for node in self.ledger.users(name):
                    self._log.warning("pool still in use by node", pool=name, node=node)
            before = dict(self.ledger.faults)
            self._publish(self.ledger.define(changed))
            self._report_faults(before)
            self._defined.set()
            await feed.wait()

    async def _create(self, name: str, text: str) -> bool:
        """Create a pool; return False if the API server rejects it."""
        body = {
            "apiVersion": CILIUM_POD_IP_POOLS.api_version,
            "kind": CILIUM_POD_IP_POOLS.kind,
            "metadata": {"name": name},
            "spec": pool_spec(text),
        }
        try:
            await self._server.client.create(CILIUM_POD_IP_POOLS, body)
        except ConflictError as error:
            if not error.exists:
                raise
        except ApiError as error:
            if error.code != INVALID:
                raise
            self._log.error("cannot create CiliumPodIPPool", pool=name, option=OPTION, error=str(error))
            return False
        else:
            self._log.info("Created CiliumPodIPPool resource", pool=name)
        return True

    async def _allocate(self) -> None:
        """Process all pending changes in one step; the first step adopts the existing allocations."""
        await self._nodes.wait_initialized()
        await self._defined.wait()
        async for changes in self._nodes.changes():
            self._publish(self.ledger.update({one.key[1]: one.row for one in changes}))

    def _publish(self, patches: NodePatches) -> None:
        with self._patches.txn() as txn:
            for name, patch in patches.items():
                if patch is None:
                    txn.delete(name)
                    continue
                if patch.error and patch.error_changed:
                    self._log.warning("node lacks requested addresses", node=name, error=patch.error)
                txn.put(patch)

    def _report_faults(self, before: dict[str, str]) -> None:
        faults = self.ledger.faults
        for name, why in faults.items():
            if before.get(name) != why:
                self._log.error("pool definition cannot be applied", pool=name, error=why)
        if faults:
            self._health.degraded("; ".join(f"{name}: {why}" for name, why in sorted(faults.items())))
        else:
            self._health.ok("all pool definitions are applied")


def write(server: ClusterAPI, patches: Table[str, NodePatch], pools: MultiPool, jobs: Jobs) -> None:
    """Start the reconciler of CiliumNodes, if the mode is active."""
    if pools.active:
        jobs.observe("write", Reconciler(patches, NodeWriter(server), full_every=AGAIN, put_early=True))


cell = module(
    "multi-pool",
    "Pod ranges of nodes, from the pools that they request",
    config(MultiPoolSettings),
    provide(MultiPool),
    invoke(write),
)
