"""The pod's side: address, routes, up, over a netlink socket that was opened inside the pod's namespace.

Needs: the socket's descriptor, which stays the caller's.   Gives: PodLink.
"""

import errno
import os
from ipaddress import IPv4Address, IPv4Network

from cells.netlink import messages as m
from cells.netlink.connection import Connection, NetlinkError

_EVERYWHERE = IPv4Network("0.0.0.0/0")


class PodLink:
    """The links of one pod. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._connection = Connection(fd)

    def configure(
        self, ifindex: int, name: str, address: IPv4Address, gateway: IPv4Address, mtu: int
    ) -> None:
        """Up, ``address``/32, ``gateway``/32 on the link, a default route through it with ``mtu``: one batch.

        Routes that exist are fine (another plugin may have made them); an address that exists is EEXIST.
        """
        self._connection.run(
            m.link_up(ifindex, name),
            m.add_address(ifindex, name, address),
            m.add_route(ifindex, IPv4Network(gateway)),
            m.add_route(ifindex, _EVERYWHERE, via=gateway, mtu=mtu),
        )

    def delete(self, name: str) -> bool:
        """Delete the link of that name, blocking 14 to 20 ms for RCU; False, at once, when there is none."""
        try:
            self._connection.run(m.delete_link_named(name))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return False
            raise
        return True
