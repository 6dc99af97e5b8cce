"""Endpoints outlive the agent: what the last one left is read, believed where it still holds, and taken on.

Reconciler, once, in four steps that others order themselves by:
OldEndpoints (read from disk) → RestoredEndpoints (addresses, ids and identities claimed, left-overs removed)
→ ExposedEndpoints (visible) → RegeneratedEndpoints (the kernel made right where it was not).
What an endpoint with unreadable state, or with a policy map that cannot be opened, has, stays
reserved until its link goes: QuarantinedEndpoints.

Why: pods keep talking while there is no agent; they must not notice that one comes back.
"""

from cells.datapath.datapath import Datapath
from cells.endpoint.host import HostEndpoint
from cells.endpoint.restore.clear import Clearing
from cells.endpoint.restore.edges import (
    KernelLinkEvents,
    KernelStaleMaps,
    LinkEvents,
    LxcRow,
    PreviousAgent,
    RestoreAddresses,
    RestoreLinks,
    StaleMaps,
)
from cells.endpoint.restore.exposed import ExposedEndpoints, QuarantinedEndpoints, RegeneratedEndpoints
from cells.endpoint.restore.restored import EndpointClaims, OldEndpoints, RestoredEndpoints
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


# How the endpoint restore cell is put together.


@after(HostEndpoint)
def stale_maps(maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> StaleMaps:
    """The node's maps, as restore looks at them: after the host endpoint has taken its own."""
    return KernelStaleMaps(maps, local, policies)


def restore_links(links: HostLinks) -> RestoreLinks:
    """The node's links, as restore looks at them."""
    return links


def previous_agent(datapath: Datapath) -> PreviousAgent:
    """What Cilium's agent left, as the datapath finds it."""
    return datapath


def link_events() -> LinkEvents:
    """News from the kernel."""
    return KernelLinkEvents()


def restore_addresses(ipam: Ipam) -> RestoreAddresses:
    """The node's address allocator, as restore uses it."""
    return ipam


@after(ExposedEndpoints)
def pods_exposed() -> PodsExposed:
    """The moment from which all endpoints are known."""
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
    provide_private(EndpointClaims, Clearing, link_events, QuarantinedEndpoints),
    invoke(QuarantinedEndpoints, RegeneratedEndpoints),
)
