"""The node's devices in the real kernel.

Needs: HostLinks to list them, news of them.   Gives: NetlinkKernel.

A pod makes a handful of link events, and one of its link's IPv6 address: a filter keeps those in the kernel.
"""

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from cells.node.devices.device import Device
from cells.node.devices.source import Kernel
from cells.node.netlink import HostLinks, IPAddress, news

PODS = ("lxc", "tmp")
"""How names of pods' links begin: ``lxc`` for good, ``tmp`` until the stock plugin has moved a peer."""

_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR = 20, 21
_LINK_LOCAL = 0x0A0000FD  # the first word of an ifaddrmsg, but its length and flags: AF_INET6, RT_SCOPE_LINK
_IFLA_IFNAME = 3

# Offsets in a message: nlmsghdr 16, then ifaddrmsg 8, or ifinfomsg 16 and an attribute's header 4.
_ADDRESS, _FIRST_ATTRIBUTE, _NAME = 16, 34, 36

FILTER = (
    (news.LOAD_HALF, 0, 0, news.TYPE),
    (news.EQUAL, 9, 0, socket.htons(_RTM_NEWADDR)),
    (news.EQUAL, 8, 0, socket.htons(_RTM_DELADDR)),
    (news.EQUAL, 1, 0, socket.htons(_RTM_NEWLINK)),
    (news.EQUAL, 0, 9, socket.htons(_RTM_DELLINK)),
    (news.LOAD_HALF, 0, 0, _FIRST_ATTRIBUTE),
    (news.EQUAL, 0, 7, socket.htons(_IFLA_IFNAME)),
    (news.LOAD_WORD, 0, 0, _NAME),
    (news.MASK, 0, 0, 0xFFFFFF00),
    (news.EQUAL, 5, 0, int.from_bytes(b"lxc\0", "big")),
    (news.EQUAL, 4, 3, int.from_bytes(b"tmp\0", "big")),
    (news.LOAD_WORD, 0, 0, _ADDRESS),
    (news.MASK, 0, 0, 0xFF0000FF),
    (news.EQUAL, 1, 0, _LINK_LOCAL),
    (news.RETURN, 0, 0, news.PASS),
    (news.RETURN, 0, 0, news.DROP),
)
"""Lets everything through but news of links with names of :data:`PODS`, and of link-local IPv6 addresses."""


class NetlinkKernel:
    """Lists with packed messages, watches without reading any."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def devices(self) -> list[Device]:
        """Every link but the pods'; 1 ms for a hundred."""
        addresses = self._links.addresses()
        return [
            Device(
                link.ifindex,
                link.name,
                link.kind,
                link.mac,
                link.mtu,
                link.up,
                tuple(address for address in addresses.get(link.ifindex, ()) if not link_local6(address.ip)),
            )
            for link in self._links.links(without=PODS)
        ]

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Links and addresses. A socket that overran (ENOBUFS) or broke raises from the wait."""
        return news.subscribed(_RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR, FILTER)


def link_local6(address: IPAddress) -> bool:
    """Whether it is an IPv6 address that every link has by itself, and that means nothing off the link."""
    return address.version == 6 and address.is_link_local


def netlink_kernel(links: HostLinks) -> Kernel:
    """The real kernel of the device table."""
    return NetlinkKernel(links)
