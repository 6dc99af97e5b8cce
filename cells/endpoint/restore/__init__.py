"""Restores the endpoints of the previous agent: reads, validates and adopts their state.

Runs once at the start, in four steps by which other cells order their hooks: OldEndpoints (read from disk) →
RestoredEndpoints (addresses, ids and identities claimed, stale state removed) → ExposedEndpoints (listed) →
RegeneratedEndpoints (kernel state repaired). An endpoint with unreadable state, or with a policy map
that cannot be opened, keeps its resources until its link is deleted: QuarantinedEndpoints.

Why: pods communicate while no agent runs; a restart must not affect them.
"""

from cells.datapath.datapath import Datapath
from cells.endpoint.host import HostEndpoint
from cells.endpoint.restore.interfaces import (
    KernelLinkEvents,
    KernelStaleMaps,
    LinkEvents,
    LxcRow,
    PreviousAgent,
    RestoreAddresses,
    RestoreLinks,
    StaleMaps,
)
from cells.endpoint.restore.regeneration import ExposedEndpoints, QuarantinedEndpoints, RegeneratedEndpoints
from cells.endpoint.restore.restored import EndpointClaims, OldEndpoints, RestoredEndpoints
from cells.endpoint.restore.stale_state import StaleStateCleanup
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.netlink.links import HostLinks
from cells.node.ipam import Ipam
from cells.node.local_addresses import LocalAddresses
from cells.node.router import RestoredPods
from cells.observe.bootstrap import PodsExposed
from lifecycle import after, invoke, module, provide, provide_private

__all__ = [
    "ExposedEndpoints",
    "LinkEvents",
    "LxcRow",
    "OldEndpoints",
    "PreviousAgent",
    "QuarantinedEndpoints",
    "RegeneratedEndpoints",
    "RestoreAddresses",
    "RestoreLinks",
    "RestoredEndpoints",
    "StaleMaps",
    "cell",
]


# Assembly of the cell.


@after(HostEndpoint)
def stale_maps(maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> StaleMaps:
    """Provide the node's maps for restore, after the host endpoint has adopted its policy map."""
    return KernelStaleMaps(maps, local, policies)


def restore_links(links: HostLinks) -> RestoreLinks:
    """Provide the node's links for restore."""
    return links


def previous_agent(datapath: Datapath) -> PreviousAgent:
    """Provide the datapath's access to programs of Cilium's agent."""
    return datapath


def link_events() -> LinkEvents:
    """Provide the kernel's notifications of deleted links."""
    return KernelLinkEvents()


def restore_addresses(ipam: Ipam) -> RestoreAddresses:
    """Provide the node's IPAM for restore."""
    return ipam


@after(ExposedEndpoints)
def pods_exposed() -> PodsExposed:
    """Provide the barrier after which all endpoints are listed."""
    return PodsExposed()


cell = module(
    "endpoint-restore",
    "Endpoints that outlive a restart of the agent",
    provide(
        stale_maps,
        restore_links,
        restore_addresses,
        previous_agent,
        OldEndpoints,
        ExposedEndpoints,
        RegeneratedEndpoints,
        pods_exposed,
    ),
    provide(RestoredEndpoints, as_=(RestoredPods,)),
    provide_private(EndpointClaims, StaleStateCleanup, link_events, QuarantinedEndpoints),
    invoke(QuarantinedEndpoints, RegeneratedEndpoints),
)
