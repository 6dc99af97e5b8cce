"""News from the kernel that a link was removed.

For:   KeptEndpoints.   Needs: a netlink socket of its own.   Gives: KernelLinkEvents.
Source: rtnetlink(7). A socket filter keeps all other news of links in the kernel: pods make a lot of it.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from anyio import wait_readable

_RTMGRP_LINK: Final = 0x1
_RTM_DELLINK: Final = 17
_SO_ATTACH_FILTER: Final = 26

# Classic BPF (linux/filter.h): load a half word, jump if equal, return. A message's type is at offset 4.
_FILTER: Final = (
    (0x28, 0, 0, 4),
    (0x15, 0, 1, socket.htons(_RTM_DELLINK)),
    (0x06, 0, 0, 0xFFFFFFFF),
    (6, 0, 0, 0),
)


class KernelLinkEvents:
    """The real :class:`~cells.endpoint_restore.edges.LinkEvents`."""

    @asynccontextmanager
    async def removals(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """What an event says is not read: the links are listed anew. OSError when the socket overran."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as events:
            code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in _FILTER))
            program = struct.pack("@HP", len(_FILTER), ctypes.addressof(code))
            events.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            events.bind((0, _RTMGRP_LINK))

            async def removed() -> None:
                await wait_readable(events)
                try:
                    while events.recv(1):  # the rest of a datagram is dropped
                        pass
                except BlockingIOError:
                    return
                except OSError as error:
                    number = error.errno or errno.EIO
                    raise OSError(number, f"netlink events were lost: {os.strerror(number)}") from error

            yield removed
