"""Exchanges with the kernel that begin before their answers are wanted."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from cells.netlink.connection import Connection, NetlinkError, answers, open_socket
from cells.netlink.wire import Message, Request
from lifecycle import HiveError

__all__ = ["Ahead"]


# Requests that a thread sends while the event loop goes on: the kernel takes 0.2 ms to make a pair of links.
#
# One exchange at a time. The thread is C's and takes no lock of the interpreter; with a thread of Python's,
# each system call would be a change of hands.

LIBRARY = Path(__file__).resolve().parent / "ahead" / "objects" / "libahead.so"


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY), use_errno=True)
    except OSError as error:
        raise HiveError(f"{LIBRARY} cannot be loaded: {error}: compile it with: make install") from error
    library.exchange_open.restype = ctypes.c_void_p
    library.exchange_open.argtypes = [ctypes.c_int]
    library.exchange_start.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32]
    library.exchange_finish.restype = ctypes.c_int64
    library.exchange_finish.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    library.exchange_close.restype = None
    library.exchange_close.argtypes = [ctypes.c_void_p]
    return library


class Ahead:
    """A netlink socket of this network namespace, and the thread that uses it. Close it when done."""

    def __init__(self) -> None:
        """Raises OSError when there is no socket or no thread, HiveError without the library."""
        self._library = _library()
        self._fd = open_socket()
        self._exchange = self._library.exchange_open(self._fd)
        if not self._exchange:
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), "no thread for netlink requests")
        self._connection = Connection(self._fd)
        self._answer = ctypes.c_void_p()
        self._requests: tuple[Request, ...] = ()
        self._first = 0

    def start(self, *requests: Request) -> None:
        """Have these sent as one datagram. Raises NetlinkError when an answer is still to be fetched."""
        first, datagram = self._connection.prepared(requests)
        last = first + len(requests) - 1
        error = self._library.exchange_start(self._exchange, datagram, len(datagram), last)
        if error:
            raise NetlinkError(error, requests[-1].what, "handing it over")
        self._requests, self._first = requests, first

    def finish(self) -> list[Message]:
        """The answers, waited for: what Connection.run() returns, or raises."""
        length = self._library.exchange_finish(self._exchange, ctypes.byref(self._answer))
        requests, first = self._requests, self._first
        if length < 0:
            raise NetlinkError(-length, requests[-1].what if requests else "no request was started")
        return answers(requests, first, lambda _: ctypes.string_at(self._answer, length))

    def close(self) -> None:
        """End the thread once it has done what it was given; fetch that first."""
        self._library.exchange_close(self._exchange)
        os.close(self._fd)
