"""The node's devices in the real kernel.

Needs: HostLinks to list them, a socket of its own to be told of changes.   Gives: NetlinkKernel.

What an event says is not even read: a hint is all it is. pyroute2, which could read it, would take 0.1 s and
13 MB to import. A pod makes a handful of link events, and one of its link's IPv6 address: a socket
filter keeps those in the kernel.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio import wait_readable

from cells.devices.device import Device
from cells.devices.source import Kernel
from cells.netlink import HostLinks, IPAddress

PODS = ("lxc", "tmp")
"""How names of pods' links begin: ``lxc`` for good, ``tmp`` until the stock plugin has moved a peer."""

_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR = 20, 21
_LINK_LOCAL = 0x0A0000FD  # the first word of an ifaddrmsg, but its length and flags: AF_INET6, RT_SCOPE_LINK
_IFLA_IFNAME = 3
_SO_ATTACH_FILTER = 26

# Classic BPF (linux/filter.h): load word or half at an absolute offset, jump if equal, mask, return.
_LOAD_WORD, _LOAD_HALF, _EQUAL, _MASK, _RETURN = 0x20, 0x28, 0x15, 0x54, 0x06
# Offsets in a message: nlmsghdr 16, then ifaddrmsg 8, or ifinfomsg 16 and an attribute's header 4.
_TYPE, _ADDRESS, _FIRST_ATTRIBUTE, _NAME = 4, 16, 34, 36
_PASS, _DROP = 0xFFFFFFFF, 0

FILTER = (
    (_LOAD_HALF, 0, 0, _TYPE),
    (_EQUAL, 9, 0, socket.htons(_RTM_NEWADDR)),
    (_EQUAL, 8, 0, socket.htons(_RTM_DELADDR)),
    (_EQUAL, 1, 0, socket.htons(_RTM_NEWLINK)),
    (_EQUAL, 0, 9, socket.htons(_RTM_DELLINK)),
    (_LOAD_HALF, 0, 0, _FIRST_ATTRIBUTE),
    (_EQUAL, 0, 7, socket.htons(_IFLA_IFNAME)),
    (_LOAD_WORD, 0, 0, _NAME),
    (_MASK, 0, 0, 0xFFFFFF00),
    (_EQUAL, 5, 0, int.from_bytes(b"lxc\0", "big")),
    (_EQUAL, 4, 3, int.from_bytes(b"tmp\0", "big")),
    (_LOAD_WORD, 0, 0, _ADDRESS),
    (_MASK, 0, 0, 0xFF0000FF),
    (_EQUAL, 1, 0, _LINK_LOCAL),
    (_RETURN, 0, 0, _PASS),
    (_RETURN, 0, 0, _DROP),
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

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Links and addresses. A socket that overran (ENOBUFS) or broke raises from the wait."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as events:
            code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in FILTER))
            program = struct.pack("@HP", len(FILTER), ctypes.addressof(code))
            events.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            events.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR))

            async def changed() -> None:
                await wait_readable(events)
                try:
                    while events.recv(1):  # the rest of a datagram is dropped
                        pass
                except BlockingIOError:
                    return
                except OSError as error:
                    number = error.errno or errno.EIO
                    raise OSError(number, f"netlink events were lost: {os.strerror(number)}") from error

            yield changed


def link_local6(address: IPAddress) -> bool:
    """Whether it is an IPv6 address that every link has by itself, and that means nothing off the link."""
    return address.version == 6 and address.is_link_local


def netlink_kernel(links: HostLinks) -> Kernel:
    """The real kernel of the device table."""
    return NetlinkKernel(links)
