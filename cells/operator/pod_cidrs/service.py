"""Keeps the ledger up to date with CiliumNodes.

Needs: OperatorOptions, PodCIDRSettings, ClusterObjects, the table of wishes.   Gives: PodCIDRs.
"""

from __future__ import annotations

from typing import cast

from cells.kubernetes import CILIUM_NODES, Key
from cells.operator.objects import ClusterObjects
from cells.operator.options import OperatorOptions
from cells.operator.pod_cidrs.allocator import PoolError, Pools
from cells.operator.pod_cidrs.ledger import Ledger, NodeWish
from cells.operator.pod_cidrs.settings import PodCIDRSettings
from lifecycle import HiveError, Hook, Jobs, Lifecycle, Logger, Table


class PodCIDRs:
    """Gives out ranges once every CiliumNode is known. The start fails for pools that cannot be."""

    def __init__(
        self,
        options: OperatorOptions,
        settings: PodCIDRSettings,
        objects: ClusterObjects,
        wishes: Table[NodeWish],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._options = options
        self._settings = settings
        self._nodes = objects.table(CILIUM_NODES)
        self._wishes = wishes
        self._log = log
        self.active = options.ipam == "cluster-pool"
        """Whether ranges are ours to give."""
        self.ledger: Ledger | None = None
        """Who has what, once the hook has run."""
        if self.active:
            lifecycle.append(Hook("find the pools", self._start))
            jobs.one_shot("allocate", self._run)

    async def _start(self) -> None:
        options, settings = self._options, self._settings
        self.ledger = Ledger(
            pools(
                4, options.enable_ipv4, settings.cluster_pool_ipv4_cidr, settings.cluster_pool_ipv4_mask_size
            ),
            pools(
                6, options.enable_ipv6, settings.cluster_pool_ipv6_cidr, settings.cluster_pool_ipv6_mask_size
            ),
        )

    async def _run(self) -> None:
        """Everything that changed since the last time, in one step; the first time all that is held."""
        await self._nodes.wait_initialized()
        ledger = self.ledger
        assert ledger is not None  # noqa: S101  # its hook has run
        async for changes in self._nodes.changes():
            changed = {cast("Key", one.key)[1]: one.row for one in changes}
            wishes = ledger.update(changed)
            with self._wishes.txn() as txn:
                for name, wish in wishes.items():
                    if wish is None:
                        txn.delete(name)
                        continue
                    txn.put(wish)
                    self._tell(wish)

    def _tell(self, wish: NodeWish) -> None:
        if wish.error:
            self._log.warning("node has no ranges, or not these", node=wish.name, error=wish.error)
        elif wish.cidrs:
            self._log.debug("node has its ranges", node=wish.name, cidrs=wish.cidrs)


def pools(version: int, enabled: bool, cidrs: tuple[str, ...], mask: int) -> Pools:
    """The pools of a family. Raises HiveError, in Cilium's words."""
    name = f"cluster-pool-ipv{version}-cidr"
    if enabled and not cidrs:
        raise HiveError(f"{name} must be provided when using ClusterPool")
    if cidrs and not enabled:
        raise HiveError(f"{name} must not be set if IPv{version} is disabled")
    try:
        return Pools(version, cidrs, mask)
    except PoolError as error:
        raise HiveError(f"unable to initialize IPv{version} allocator: {error}") from error
