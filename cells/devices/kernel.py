"""The node's devices in the real kernel.

Needs: HostLinks to list them, a socket of its own to be told of changes.   Gives: NetlinkKernel.

What an event says is not even read: a hint is all it is. pyroute2, which could read it, would take 0.1 s and
13 MB to import. A pod makes a handful of link events: a socket filter keeps those in the kernel.
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
from cells.netlink import HostLinks

PODS = ("lxc", "tmp")
"""How names of pods' links begin: ``lxc`` for good, ``tmp`` until the stock plugin has moved a peer."""

_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_IFLA_IFNAME = 3
_SO_ATTACH_FILTER = 26

# Classic BPF (linux/filter.h): load word or half at an absolute offset, jump if equal, mask, return.
_LOAD_WORD, _LOAD_HALF, _EQUAL, _MASK, _RETURN = 0x20, 0x28, 0x15, 0x54, 0x06
_TYPE, _FIRST_ATTRIBUTE, _NAME = (
    4,
    34,
    36,
)  # offsets in a message: nlmsghdr 16, ifinfomsg 16, attribute header 4
_PASS, _DROP = 0xFFFFFFFF, 0

FILTER = (
    (_LOAD_HALF, 0, 0, _TYPE),
    (_EQUAL, 1, 0, socket.htons(_RTM_NEWLINK)),
    (_EQUAL, 0, 6, socket.htons(_RTM_DELLINK)),
    (_LOAD_HALF, 0, 0, _FIRST_ATTRIBUTE),
    (_EQUAL, 0, 4, socket.htons(_IFLA_IFNAME)),
    (_LOAD_WORD, 0, 0, _NAME),
    (_MASK, 0, 0, 0xFFFFFF00),
    (_EQUAL, 2, 0, int.from_bytes(b"lxc\0", "big")),
    (_EQUAL, 1, 0, int.from_bytes(b"tmp\0", "big")),
    (_RETURN, 0, 0, _PASS),
    (_RETURN, 0, 0, _DROP),
)
"""Lets everything through but news of links with names of :data:`PODS`."""


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
                tuple(addresses.get(link.ifindex, ())),
            )
            for link in self._links.links(without=PODS)
        ]

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Links and IPv4 addresses. A socket that overran (ENOBUFS) or broke raises from the wait."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as events:
            code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in FILTER))
            program = struct.pack("@HP", len(FILTER), ctypes.addressof(code))
            events.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            events.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR))

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


def netlink_kernel(links: HostLinks) -> Kernel:
    """The real kernel of the device table."""
    return NetlinkKernel(links)
