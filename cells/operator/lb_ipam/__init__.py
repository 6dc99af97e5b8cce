"""Services of type LoadBalancer get addresses: of CiliumLoadBalancerIPPools, or of nodes.

Controller: services, pools, nodes and their backends in, the tables ``lb-service-annotations``,
            ``lb-pool-requests`` and ``node-ipam-requests`` out.
Reconciler: those tables in, the status of services and the conditions of pools out.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, LBIPAMSettings, Metrics.   Gives: LBIPAM, NodeIPAM.
Why:        one function of everything there is says who has what; what a service has it keeps as long as it
            may, over restarts as well.
"""

from typing import Final

from cells.operator.api_server import ClusterAPI
from cells.operator.lb_ipam.metrics import tell
from cells.operator.lb_ipam.node_ipam import NodeIPAM
from cells.operator.lb_ipam.service import LBIPAM
from cells.operator.lb_ipam.settings import LBIPAMSettings
from cells.operator.lb_ipam.wishes import PoolWish, ServiceWish
from cells.operator.lb_ipam.writer import PoolWriter, ServiceWriter
from lifecycle import Jobs, Reconciler, Table, config, invoke, minutes, module, provide

__all__ = ["LBIPAM", "LBIPAMSettings", "NodeIPAM", "PoolWish", "ServiceWish", "cell"]

AGAIN: Final = minutes(1)


def service_wishes() -> Table[ServiceWish]:
    """What services do not say yet, by namespace and name."""
    return Table("lb-service-annotations", key=lambda one: (one.namespace, one.name))


def pool_wishes() -> Table[PoolWish]:
    """What pools do not say yet, by name."""
    return Table("lb-pool-requests", key=lambda one: one.name)


def write(
    server: ClusterAPI, services: Table[ServiceWish], pools: Table[PoolWish], ipam: LBIPAM, jobs: Jobs
) -> None:
    """Have wishes written, where there can be any."""
    if not ipam.active:
        return
    to_services = Reconciler(services, ServiceWriter(server), full_every=AGAIN, put_early=True)
    to_pools = Reconciler(pools, PoolWriter(server), full_every=AGAIN, put_early=True)
    jobs.observe("write-services", to_services)
    jobs.observe("write-pools", to_pools)


cell = module(
    "lb-ipam",
    "Addresses of load balancers",
    config(LBIPAMSettings),
    provide(service_wishes, pool_wishes, LBIPAM, NodeIPAM),
    invoke(write, tell, NodeIPAM),
)
