"""rtnetlink by hand, for the path that users wait for: adding and deleting pods.

Edge: the kernel's links, addresses, routes and filters, as a few packed messages per exchange.
Needs:  Lifecycle.   Gives: HostLinks (this node's links), PodLink (a pod's, over a socket handed over),
        VxlanLinks (the tunnel's device), and NodeNetwork, which is pyroute2 for what neither a pod nor the
        start waits for.
Why:    pyroute2 takes 10 to 30 ms a pod; these batches take 0.4 ms together.
"""

from cells.node.netlink import news
from cells.node.netlink.connection import ForeignRouteError, NetlinkError
from cells.node.netlink.inventory import (
    AddressRow,
    LinkRow,
    RouteRow,
    foreign_routes,
    list_addresses,
    list_links,
    list_routes,
    nftables_rows,
)
from cells.node.netlink.links import (
    CreatedLink,
    HostLinks,
    all_routes,
    is_present,
    programs_of,
    routes_over,
    take_off_xdp,
    xdp_of,
)
from cells.node.netlink.mac import mac_text, parse_mac, random_mac
from cells.node.netlink.marked import Marked, leave_marked, take_marked
from cells.node.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair
from cells.node.netlink.namespaces import own_netns_cookie, run_in_each
from cells.node.netlink.network import NodeNetwork
from cells.node.netlink.pod import PodLink
from cells.node.netlink.rows import LinkInfo, LinkPrograms, RouteInfo, XdpPrograms
from cells.node.netlink.vxlan import FoundVxlan, VxlanLinks
from lifecycle import module, provide

__all__ = [
    "AddressRow",
    "CreatedLink",
    "ForeignRouteError",
    "FoundVxlan",
    "HostLinks",
    "IPAddress",
    "IPInterface",
    "IPNetwork",
    "LinkInfo",
    "LinkPrograms",
    "LinkRow",
    "Marked",
    "NetlinkError",
    "NodeNetwork",
    "PodLink",
    "RouteInfo",
    "RouteRow",
    "VethPair",
    "VxlanLinks",
    "XdpPrograms",
    "all_routes",
    "cell",
    "foreign_routes",
    "is_present",
    "leave_marked",
    "list_addresses",
    "list_links",
    "list_routes",
    "mac_text",
    "news",
    "nftables_rows",
    "own_netns_cookie",
    "parse_mac",
    "programs_of",
    "random_mac",
    "routes_over",
    "run_in_each",
    "take_marked",
    "take_off_xdp",
    "xdp_of",
]

cell = module("netlink", "Links, addresses and filters of the node and its pods", provide(HostLinks))
