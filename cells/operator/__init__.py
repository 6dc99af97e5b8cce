"""The operator: what a cluster needs done once, not on every node. All its cells, as one."""

from __future__ import annotations

from typing import Final

from cells import kvstore as store
from cells.observe.metrics import Metrics
from cells.operator import (
    api_server,
    bgp,
    crds,
    endpoint_slices,
    gc,
    kvstore,
    lb_ipam,
    leader,
    multi_pool,
    nodes,
    objects,
    options,
    pod_cidrs,
    policies,
    server,
    unmanaged_pods,
)
from cells.operator.api_server import ClusterAPI
from cells.operator.leader import LeaderHive
from cells.operator.options import ServedCluster
from lifecycle import module, nest

# The operator: all its cells, as one.

LEADER: Final = (
    crds.cell,
    objects.cell,
    pod_cidrs.cell,
    multi_pool.cell,
    endpoint_slices.cell,
    nodes.cell,
    gc.cell,
    store.cell,
    kvstore.cell,
    lb_ipam.cell,
    unmanaged_pods.cell,
    policies.cell,
    bgp.cell,
)
"""What only the leader runs."""

work = nest(
    LeaderHive,
    "leader",
    "Tasks of the leader",
    *LEADER,
    share=(ClusterAPI, ServedCluster, Metrics),
)

operator = module(
    "operator",
    "Operator: tasks that a cluster needs once",
    options.cell,
    api_server.cell,
    work,
    leader.cell,
    server.cell,
)
