"""The operator: the work that a cluster needs done once, as one module of all its cells."""

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
"""The cells that run only while this operator holds the lease."""

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
