"""rtnetlink without pyroute2: links, addresses, routes and filters of pods and the node.

Edge: the kernel's network configuration, by batches of packed messages.
Why:    adding a pod with pyroute2 takes 10 to 30 ms; these batches take 0.4 ms.
"""

from cells.netlink.links import HostLinks
from lifecycle import module, provide

__all__ = ["cell"]


cell = module("netlink", "Links, addresses and filters of the node and its pods", provide(HostLinks))
