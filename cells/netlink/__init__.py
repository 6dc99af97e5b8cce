"""Netlink without pyroute2: links, addresses, routes, filters, XFRM and nftables of the node and its pods.

Adding a pod with pyroute2 takes 10 to 30 ms; batches of packed messages take 0.4 ms. The module provides
:class:`HostLinks`; other cells call the functions of this package in worker threads.
"""

from cells.netlink.links import HostLinks
from lifecycle import module, provide

__all__ = ["cell"]


cell = module("netlink", "Links, addresses and filters of the node and its pods", provide(HostLinks))
