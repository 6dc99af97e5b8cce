"""How the endpoint restore cell is put together.

Needs: Datapath, Ipam, HostLinks, Maps, LocalAddresses, PolicyMaps and the endpoint cell.   Gives: cell.
"""

from cells.datapath import Datapath
from cells.endpoint.host import HostEndpoint
from cells.endpoint.restore.edges import (
    FormerAgent,
    LinkEvents,
    RestoreAddresses,
    RestoreLinks,
    StaleMaps,
)
from cells.endpoint.restore.exposed import ExposedEndpoints, RegeneratedEndpoints
from cells.endpoint.restore.link_events import KernelLinkEvents
from cells.endpoint.restore.old import OldEndpoints
from cells.endpoint.restore.quarantined import QuarantinedEndpoints
from cells.endpoint.restore.restored import RestoredEndpoints
from cells.endpoint.restore.stale_maps import KernelStaleMaps
from cells.ipam import Ipam
from cells.maps import Maps, PolicyMaps
from cells.node.local_addresses import LocalAddresses
from cells.node.netlink import HostLinks
from lifecycle import after, invoke, module, provide, provide_private


@after(HostEndpoint)
def stale_maps(maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> StaleMaps:
    """The node's maps, as restore looks at them: after the host endpoint has taken its own."""
    return KernelStaleMaps(maps, local, policies)


def restore_links(links: HostLinks) -> RestoreLinks:
    """The node's links, as restore looks at them."""
    return links


def former_agent(datapath: Datapath) -> FormerAgent:
    """What Cilium's agent left, as the datapath finds it."""
    return datapath


def link_events() -> LinkEvents:
    """News from the kernel."""
    return KernelLinkEvents()


def restore_addresses(ipam: Ipam) -> RestoreAddresses:
    """The node's address allocator, as restore uses it."""
    return ipam


cell = module(
    "endpoint-restore",
    "Endpoints that outlive a restart of the agent",
    provide(
        stale_maps,
        restore_links,
        restore_addresses,
        former_agent,
        OldEndpoints,
        RestoredEndpoints,
        ExposedEndpoints,
        RegeneratedEndpoints,
    ),
    provide_private(link_events, QuarantinedEndpoints),
    invoke(QuarantinedEndpoints, RegeneratedEndpoints),
)
