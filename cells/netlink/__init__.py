"""rtnetlink by hand, for the path that users wait for: adding and deleting pods.

Edge: the kernel's links, addresses, routes and filters, as a few packed messages per exchange.
Needs:  Lifecycle.   Gives: HostLinks (this node's links), PodLink (a pod's, over a socket handed over).
Why:    pyroute2 takes 10 to 30 ms a pod; these batches take 0.4 ms together.
"""

from cells.netlink import news
from cells.netlink.connection import NetlinkError
from cells.netlink.links import CreatedLink, HostLinks
from cells.netlink.mac import mac_text, parse_mac, random_mac
from cells.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair
from cells.netlink.pod import PodLink
from cells.netlink.rows import LinkInfo
from lifecycle import module, provide

__all__ = [
    "CreatedLink",
    "HostLinks",
    "IPAddress",
    "IPInterface",
    "IPNetwork",
    "LinkInfo",
    "NetlinkError",
    "PodLink",
    "VethPair",
    "cell",
    "mac_text",
    "news",
    "parse_mac",
    "random_mac",
]

cell = module("netlink", "Links, addresses and filters of the node and its pods", provide(HostLinks))
