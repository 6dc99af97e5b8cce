"""How the endpoint restore cell is put together.

Needs: Ipam, HostLinks, Maps, PolicyMaps and the endpoint cell.   Gives: cell.
"""

from cells.endpoint_restore.edges import LeftMaps, LinkEvents, RestoreAddresses, RestoreLinks
from cells.endpoint_restore.exposed import ExposedEndpoints, RegeneratedEndpoints
from cells.endpoint_restore.kept import KeptEndpoints
from cells.endpoint_restore.left_maps import KernelLeftMaps
from cells.endpoint_restore.link_events import KernelLinkEvents
from cells.endpoint_restore.old import OldEndpoints
from cells.endpoint_restore.restored import RestoredEndpoints
from cells.ipam import Ipam
from cells.maps import Maps, PolicyMaps
from cells.netlink import HostLinks
from lifecycle import invoke, module, provide, provide_private


def left_maps(maps: Maps, policies: PolicyMaps) -> LeftMaps:
    """The node's maps, as restore looks at them."""
    return KernelLeftMaps(maps, policies)


def restore_links(links: HostLinks) -> RestoreLinks:
    """The node's links, as restore looks at them."""
    return links


def link_events() -> LinkEvents:
    """News from the kernel."""
    return KernelLinkEvents()


def restore_addresses(ipam: Ipam) -> RestoreAddresses:
    """The node's address allocator, as restore uses it."""
    return ipam


cell = module(
    "endpoint-restore",
    "Endpoints of before the restart",
    provide(
        left_maps,
        restore_links,
        restore_addresses,
        OldEndpoints,
        RestoredEndpoints,
        ExposedEndpoints,
        RegeneratedEndpoints,
    ),
    provide_private(link_events, KeptEndpoints),
    invoke(KeptEndpoints, RegeneratedEndpoints),
)
