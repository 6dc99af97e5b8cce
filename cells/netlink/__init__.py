"""rtnetlink messages of our own, for the path that users wait for: adding and deleting pods.

Edge: the kernel's links, addresses, routes and filters, as a few packed messages per exchange.
Why:    pyroute2 takes 10 to 30 ms a pod; these batches take 0.4 ms together.
"""

from cells.netlink.links import HostLinks
from lifecycle import module, provide

__all__ = ["cell"]


cell = module("netlink", "Links, addresses and filters of the node and its pods", provide(HostLinks))
