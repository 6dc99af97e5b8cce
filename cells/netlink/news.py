"""Events of the kernel that something changed, without reading what.

Source: rtnetlink(7); classic BPF of linux/filter.h, which stops in the kernel what no reader wants: pods
make a lot of news. pyroute2, which could read the messages, would take 0.1 s and 13 MB to import.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import anyio
from anyio import wait_readable

__all__ = [
    "DROP",
    "EQUAL",
    "LOAD_BYTE",
    "LOAD_HALF",
    "LOAD_WORD",
    "MASK",
    "PASS",
    "RETURN",
    "TYPE",
    "Field",
    "Filter",
    "hints",
    "kinds",
    "passing",
    "subscribed",
]

_SO_ATTACH_FILTER: Final = 26

Filter = Sequence[tuple[int, int, int, int]]
"""Instructions: code, jump if true, jump if false, operand."""

LOAD_WORD: Final = 0x20
LOAD_HALF: Final = 0x28
LOAD_BYTE: Final = 0x30
EQUAL: Final = 0x15
MASK: Final = 0x54
RETURN: Final = 0x06
PASS: Final = 0xFFFFFFFF
DROP: Final = 0
TYPE: Final = 4
"""Where a message's type is."""


class Field(NamedTuple):
    """A condition on a message: the number at ``offset`` is one of ``values``, as the filter reads it."""

    load: int
    offset: int
    values: tuple[int, ...]


def kinds(*types: int) -> Field:
    """The message is of one of these types (RTM_*)."""
    return Field(LOAD_HALF, TYPE, tuple(map(socket.htons, types)))


def passing(*alternatives: Sequence[Field]) -> Filter:
    """The filter that lets messages pass for which all fields of one of the alternatives hold."""
    code: list[tuple[int, int, int, int]] = []
    for fields in alternatives:
        size = sum(1 + len(field.values) for field in fields) + 1
        end = len(code) + size
        for load, offset, values in fields:
            code.append((load, 0, 0, offset))
            for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
                otherwise = 0 if left else end - len(code) - 1
                code.append((EQUAL, left, otherwise, value))
        code.append((RETURN, 0, 0, PASS))
    return [*code, (RETURN, 0, 0, DROP)]


@asynccontextmanager
async def subscribed(
    groups: int, wanted: Filter, protocol: int = socket.NETLINK_ROUTE
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """While it is open, the callable waits until a message of ``groups`` that ``wanted`` lets pass has come.

    ``groups`` is a mask of RTMGRP_*, or of groups of another ``protocol``. The
    callable raises OSError when messages were lost: open it anew.
    """
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, protocol) as events:
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


async def hints(
    groups: int, wanted: Filter, settle: float = 0.05, *, protocol: int = socket.NETLINK_ROUTE
) -> AsyncIterator[None]:
    """One item right after subscribing (what came before was missed), then one per burst of messages.

    ``settle``: seconds that a burst is gathered. Raises what :func:`subscribed` does.
    """
    async with subscribed(groups, wanted, protocol) as changed:
        yield
        while True:
            await changed()
            with anyio.move_on_after(settle):
                while True:
                    await changed()
            yield
