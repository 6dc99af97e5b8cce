"""How the endpoint cell is put together.

Needs: AgentConfig, Controllers, Maps, PolicyMaps, Datapath, Collector, Ipam.   Gives: cell.
"""

from collections.abc import Iterable

from cells import metrics
from cells.config import AgentConfig
from cells.datapath import Collector, Datapath
from cells.endpoint.aftercare import Aftercare
from cells.endpoint.changes import EndpointChanges
from cells.endpoint.enforcement import PolicyEnforcement
from cells.endpoint.identity import Identities
from cells.endpoint.kernel import EndpointAddresses, EndpointMaps, EndpointPrograms
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import Endpoint
from cells.endpoint.policy import NodePolicy, PolicySettings
from cells.endpoint.regeneration import Regenerations
from cells.endpoint.rows import KernelMaps
from cells.endpoint.state_files import StateFiles
from cells.ipam import Ipam
from cells.maps import Maps, PolicyMaps
from lifecycle import Logger, Member, Table, config, module, provide, provide_private


def endpoint_table() -> Table[Endpoint]:
    """The ``endpoints`` table, by endpoint id."""
    return Table("endpoints", key=lambda endpoint: endpoint.id)


def endpoint_maps(maps: Maps, policies: PolicyMaps, collector: Collector) -> EndpointMaps:
    """The node's maps, as endpoints use them."""
    return KernelMaps(maps, policies, collector)


def endpoint_programs(datapath: Datapath) -> EndpointPrograms:
    """The node's datapath, as endpoints use it."""
    return datapath


def endpoint_addresses(ipam: Ipam) -> EndpointAddresses:
    """The node's address allocator, as endpoints use it."""
    return ipam


def state_files(agent: AgentConfig) -> StateFiles:
    """The node's state directory."""
    return StateFiles(agent.state)


def endpoints(
    agent: AgentConfig,
    *,
    table: Table[Endpoint],
    identities: Identities,
    maps: EndpointMaps,
    programs: EndpointPrograms,
    addresses: EndpointAddresses,
    files: StateFiles,
    aftercare: Aftercare,
    policy: NodePolicy,
    log: Logger,
) -> Endpoints:
    """The node's endpoints."""
    return Endpoints(
        table=table,
        identities=identities,
        maps=maps,
        programs=programs,
        addresses=addresses,
        files=files,
        aftercare=aftercare,
        policy=policy,
        cluster_name=agent.cluster_name,
        log=log,
    )


def endpoint_metrics(all_endpoints: Endpoints, policy: NodePolicy) -> Member[metrics.Collector]:
    """Endpoints as metrics."""

    async def collect() -> Iterable[metrics.Family]:
        from cells.endpoint.metrics import families

        return families(all_endpoints, policy)

    return metrics.Collector("endpoint", collect)


cell = module(
    "endpoint",
    "Endpoints of this node",
    config(PolicySettings),
    provide(
        endpoint_table,
        endpoint_maps,
        endpoint_programs,
        endpoint_addresses,
        state_files,
        Identities,
        Aftercare,
        endpoints,
        Regenerations,
        EndpointChanges,
        PolicyEnforcement,
        endpoint_metrics,
    ),
    provide_private(NodePolicy),
)
