"""Pod CIDRs: every CiliumNode gets a range of each family out of the cluster's pools.

Controller: CiliumNodes in, the table ``cilium-node-requests`` out: what a node's object does not say yet.
Reconciler: that table in, ``spec.ipam.podCIDRs`` and ``status.ipam.operator-status`` of CiliumNodes out.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, PodCIDRSettings.   Gives: PodCIDRs.
Why:        what nodes hold is adopted before anything is given out, so no two nodes get one range, whatever
            happened while no operator ran.
"""

from cells.operator.api_server import ClusterAPI
from cells.operator.pod_cidrs.allocator import Network, PoolError, Pools, parsed
from cells.operator.pod_cidrs.ledger import NodeWish, PoolsWish, ranges_said
from cells.operator.pod_cidrs.service import PodCIDRs
from cells.operator.pod_cidrs.settings import PodCIDRSettings
from cells.operator.pod_cidrs.writer import NodeWriter
from lifecycle import Jobs, Reconciler, Table, config, invoke, minutes, module, provide

__all__ = [
    "AGAIN",
    "Network",
    "NodeWish",
    "NodeWriter",
    "PodCIDRSettings",
    "PodCIDRs",
    "PoolError",
    "Pools",
    "PoolsWish",
    "cell",
    "parsed",
    "ranges_said",
]

AGAIN = minutes(1)
"""How often what nodes still do not say is written again."""


def node_wishes() -> Table[NodeWish]:
    """What CiliumNodes do not say yet, by node."""
    return Table("cilium-node-requests", key=lambda one: one.name)


def write(server: ClusterAPI, wishes: Table[NodeWish], pod_cidrs: PodCIDRs, jobs: Jobs) -> None:
    """Have wishes written, where there can be any."""
    if pod_cidrs.active:
        jobs.observe("write", Reconciler(wishes, NodeWriter(server), full_every=AGAIN, put_early=True))


cell = module(
    "pod-cidrs",
    "Ranges of nodes out of the cluster's pools",
    config(PodCIDRSettings),
    provide(node_wishes, PodCIDRs),
    invoke(write),
)
