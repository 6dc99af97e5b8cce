"""Being told by the kernel that something changed, without reading what.

For:   cells that list anew after each hint.   Needs: a netlink socket of its own.
Gives: subscribed(), and the words its filters are written in.
Source: rtnetlink(7); classic BPF of linux/filter.h, which keeps in the kernel what would wake nobody up: pods
make a lot of news. pyroute2, which could read the messages, would take 0.1 s and 13 MB to import.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from anyio import wait_readable

_SO_ATTACH_FILTER: Final = 26

Filter = Sequence[tuple[int, int, int, int]]
"""Instructions: code, jump if true, jump if false, operand."""

LOAD_WORD: Final = 0x20
LOAD_HALF: Final = 0x28
EQUAL: Final = 0x15
MASK: Final = 0x54
RETURN: Final = 0x06
PASS: Final = 0xFFFFFFFF
DROP: Final = 0
TYPE: Final = 4
"""Where a message's type is."""


@asynccontextmanager
async def subscribed(groups: int, wanted: Filter) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """While it is open, the callable waits until a message of ``groups`` that ``wanted`` lets pass has come.

    ``groups`` is a mask of RTMGRP_*. The callable raises OSError when messages were lost: open it anew.
    """
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as events:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in wanted))
        program = struct.pack("@HP", len(wanted), ctypes.addressof(code))
        events.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        events.bind((0, groups))

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
