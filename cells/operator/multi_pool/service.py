"""Keeps the ledger up to date with CiliumPodIPPools and CiliumNodes.

Needs: OperatorOptions, MultiPoolSettings, ClusterAPI, ClusterObjects, the table of wishes.
Gives: MultiPool.
"""

from __future__ import annotations

from typing import Final, cast

import anyio

from cells.kubernetes import CILIUM_NODES, CILIUM_POD_IP_POOLS, Key, api
from cells.operator.api_server import ClusterAPI
from cells.operator.multi_pool.ledger import PoolLedger, Wishes
from cells.operator.multi_pool.settings import OPTION, MultiPoolSettings, pool_spec
from cells.operator.objects import ClusterObjects
from cells.operator.options import OperatorOptions
from cells.operator.pod_cidrs import NodeWish
from lifecycle import Health, Jobs, Logger, Table

INVALID: Final = 422


class MultiPool:
    """Gives out ranges once every pool and every CiliumNode is known."""

    def __init__(
        self,
        options: OperatorOptions,
        settings: MultiPoolSettings,
        server: ClusterAPI,
        objects: ClusterObjects,
        wishes: Table[NodeWish],
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.active = options.ipam == "multi-pool"
        """Whether there are pools to give from."""
        self.ledger = PoolLedger()
        """Who has what."""
        self._settings = settings
        self._server = server
        self._wishes = wishes
        self._health = health.child("pools")
        self._log = log
        self._defined = anyio.Event()
        if self.active:
            self._pools = objects.table(CILIUM_POD_IP_POOLS)
            self._nodes = objects.table(CILIUM_NODES)
            jobs.one_shot("follow-pools", self._follow_pools)
            jobs.one_shot("allocate", self._allocate)

    async def _follow_pools(self) -> None:
        """Make those that were asked for, then follow all. Raises KubernetesError: it is tried again."""
        await self._pools.wait_initialized()
        for name, text in self._settings.auto_create_cilium_pod_ip_pools.items():
            if self._pools.get(("", name)) is None and await self._create(name, text):
                await self._pools.wait_for(("", name))
        feed = self._pools.changes()
        while True:
            changes = feed.take()
            changed = {cast("Key", one.key)[1]: one.row for one in changes}
            for name in (name for name, row in changed.items() if row is None):
                for node in self.ledger.users(name):
                    self._log.warning("pool still in use by node", pool=name, node=node)
            before = dict(self.ledger.faults)
            self._publish(self.ledger.define(changed))
            self._tell_faults(before)
            self._defined.set()
            await feed.wait()

    async def _create(self, name: str, text: str) -> bool:
        """Make a pool; False if there cannot be such a one."""
        body = {
            "apiVersion": CILIUM_POD_IP_POOLS.api_version,
            "kind": CILIUM_POD_IP_POOLS.kind,
            "metadata": {"name": name},
            "spec": pool_spec(text),
        }
        try:
            await self._server.client.create(CILIUM_POD_IP_POOLS, body)
        except api.ConflictError as error:
            if not error.exists:
                raise
        except api.ApiError as error:
            if error.code != INVALID:
                raise
            self._log.error("cannot create CiliumPodIPPool", pool=name, option=OPTION, error=str(error))
            return False
        else:
            self._log.info("Created CiliumPodIPPool resource", pool=name)
        return True

    async def _allocate(self) -> None:
        """Everything that changed since the last time, in one step; the first time all that is held."""
        await self._nodes.wait_initialized()
        await self._defined.wait()
        async for changes in self._nodes.changes():
            self._publish(self.ledger.update({cast("Key", one.key)[1]: one.row for one in changes}))

    def _publish(self, wishes: Wishes) -> None:
        with self._wishes.txn() as txn:
            for name, wish in wishes.items():
                if wish is None:
                    txn.delete(name)
                    continue
                if wish.error and wish.says:
                    self._log.warning("node has not all it asks for", node=name, error=wish.error)
                txn.put(wish)

    def _tell_faults(self, before: dict[str, str]) -> None:
        faults = self.ledger.faults
        for name, why in faults.items():
            if before.get(name) != why:
                self._log.error("pool cannot be as it is defined", pool=name, error=why)
        if faults:
            self._health.degraded("; ".join(f"{name}: {why}" for name, why in sorted(faults.items())))
        else:
            self._health.ok("all pools are as defined")
