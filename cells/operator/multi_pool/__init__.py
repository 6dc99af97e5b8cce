"""Multi-pool: every CiliumNode gets ranges of the pools it asks for, as many as it asks for.

Controller: CiliumPodIPPools and CiliumNodes in, the table ``cilium-node-requests`` out: what nodes do not say
            yet.
Reconciler: that table in, ``spec.ipam.pools.allocated`` and ``status.ipam.operator-status`` of CiliumNodes
            out.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, MultiPoolSettings, the table.   Gives: MultiPool.
Why:        agents ask for addresses and give back ranges, the operator only adds. What nodes hold is adopted
            before anything is given out, and no address is ever given to two nodes, not even by pools that
            overlap or have changed under use.
"""

from cells.operator.api_server import ClusterAPI
from cells.operator.multi_pool.service import MultiPool
from cells.operator.multi_pool.settings import MultiPoolSettings
from cells.operator.pod_cidrs import AGAIN, NodeWish, NodeWriter
from lifecycle import Jobs, Reconciler, Table, config, invoke, module, provide

__all__ = ["MultiPool", "MultiPoolSettings", "cell"]


def write(server: ClusterAPI, wishes: Table[NodeWish], pools: MultiPool, jobs: Jobs) -> None:
    """Have wishes written, where there can be any."""
    if pools.active:
        jobs.observe("write", Reconciler(wishes, NodeWriter(server), full_every=AGAIN, put_early=True))


cell = module(
    "multi-pool",
    "Ranges of nodes out of pools that they choose",
    config(MultiPoolSettings),
    provide(MultiPool),
    invoke(write),
)
