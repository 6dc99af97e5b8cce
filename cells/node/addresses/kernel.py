"""What the kernel would send from to somewhere outside.

Needs: nothing.   Gives: DefaultRoute.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import closing
from ipaddress import ip_address
from typing import Final

from cells.ipam import Family, IPAddress
from cells.node.netlink import news

OUTSIDE: Final = {
    Family.IPV4: (socket.AF_INET, "198.41.0.4"),
    Family.IPV6: (socket.AF_INET6, "2001:503:ba3e::2:30"),
}
"""Addresses on the Internet (a.root-servers.net) to which nodes have no route but the default one.

Nothing is sent there. Addresses reserved for documentation would not do: some nodes blackhole them.
"""
_PORT: Final = 9  # discard

_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_PREFIX_LENGTH: Final = 17
"""Where an rtmsg says how long the destination's prefix is, behind the header of 16 bytes."""
DEFAULT_ROUTES: Final = news.passing(
    (news.kinds(_RTM_NEWROUTE, _RTM_DELROUTE), news.Field(news.LOAD_BYTE, _PREFIX_LENGTH, (0,)))
)


class DefaultRoute:
    """The kernel's choice of a source, by connecting a datagram socket."""

    def source(self, family: Family) -> IPAddress | None:
        """The address packets over the default route are from; None when there is no such route."""
        kind, outside = OUTSIDE[family]
        try:
            with closing(socket.socket(kind, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as probe:
                probe.connect((outside, _PORT))
                return ip_address(probe.getsockname()[0])
        except OSError:  # no route, or no such family on this node
            return None

    def hints(self) -> AsyncIterator[None]:
        """One item at once, then whenever a default route came or went."""
        return news.hints(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, DEFAULT_ROUTES)
