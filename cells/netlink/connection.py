"""A route netlink socket that sends several requests in one datagram and finds out which of them failed.

The kernel answers while it is being sent to, so nothing here waits; the socket is non-blocking, and an
answer that is not there is an error. Only the last request asks for an acknowledgement: failures of the
others are reported all the same (netlink(7)), so a batch is one send and, when it works, one receive.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Self

from cells.netlink.wire import (
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLMSG_DONE,
    NLMSG_ERROR,
    Message,
    Request,
    encode,
    error_of,
    messages,
)
from lifecycle import HiveError

__all__ = ["Ahead", "ForeignRouteError", "NetlinkError", "connected", "open_socket"]


_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NETLINK_GET_STRICT_CHK = 12
_ANSWER = struct.Struct("=IHHIIi")  # nlmsghdr, and of an NLMSG_ERROR the negative errno
_RECEIVE = 32768  # netlink_dump() never makes a larger datagram
_DUMP_TRIES = 10
_LIBRARY = Path(__file__).resolve().parent / "ahead" / "objects" / "libahead.so"


class NetlinkError(OSError, HiveError):
    """The kernel refused a request; ``what`` names it, ``errno`` and the text have the reason."""

    def __init__(self, number: int, what: str, reason: str = "") -> None:
        super().__init__(number, os.strerror(number) + (f" ({reason})" if reason else ""))
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str, str]]:
        return type(self), (self.errno or 0, self.what, self.reason)

    def __str__(self) -> str:
        return f"{self.what}: {self.strerror}"


class ForeignRouteError(HiveError):
    """Raised instead of replacing a route that another program, or a person, has set."""

    def __init__(self, destination: object, way: str) -> None:
        super().__init__(
            f"a route to {destination} of another owner exists ({way}): it is left in place;"
            " remove it, or give the node another range"
        )


def open_socket(*, strict: bool = False, protocol: int = socket.NETLINK_ROUTE) -> int:
    """A bound, non-blocking netlink socket of the current network namespace; the caller closes it.

    ``strict``: dumps heed what a request selects, where the kernel can (since 4.20).
    """
    made = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol
    )
    try:
        made.bind((0, 0))
        made.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        made.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        if strict:
            made.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
    except BaseException:
        made.close()
        raise
    return made.detach()


class Connection:
    """Requests over one netlink socket, from one thread at a time. Does not own the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sequence = 0

    def run(self, *requests: Request) -> list[Message]:
        """Send the requests as one datagram and return what was asked for (dump rows, replies).

        The kernel tries every request, in order, even after one failed: a batch is not a transaction.
        Raises NetlinkError for the first that failed.
        """
        first, datagram = self.prepared(requests)
        try:
            os.write(self._fd, datagram)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, requests[-1].what, "sending to netlink") from error
        return answers(requests, first, self._receive)

    def dump(self, request: Request) -> list[Message]:
        """The rows of a dump, asked for again when the table changed under it."""
        for _ in range(_DUMP_TRIES):
            rows = self.run(request)
            if not any(row.flags & NLM_F_DUMP_INTR for row in rows):
                return rows
        raise NetlinkError(errno.EAGAIN, request.what, f"changed during each of {_DUMP_TRIES} tries")

    def prepared(self, requests: Sequence[Request]) -> tuple[int, bytes]:
        """The sequence number of the first of a batch, and the batch as a datagram."""
        first = self._sequence + 1
        self._sequence = (self._sequence + len(requests)) & 0x7FFFFFFF
        return first, encode(requests, first, acknowledge=not _asks(requests[-1]))

    def _receive(self, what: str) -> bytes:
        try:
            return os.read(self._fd, _RECEIVE)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, what, "on reading the answer") from error


@contextmanager
def connected(*, strict: bool = False, protocol: int = socket.NETLINK_ROUTE) -> Iterator[Connection]:
    """A connection over a socket of its own, as open_socket() makes it: for a worker thread. OSError."""
    fd = open_socket(strict=strict, protocol=protocol)
    try:
        yield Connection(fd)
    finally:
        os.close(fd)


def answers(requests: Sequence[Request], first: int, receive: Callable[[str], bytes]) -> list[Message]:
    """What was asked for by a batch numbered from ``first`` on, out of the datagrams that come.

    Raises NetlinkError for the first request that failed; what ``receive`` raises.
    """
    final = requests[-1]
    replies: list[Message] = []
    failure: NetlinkError | None = None
    datagram = receive(final.what)
    if len(datagram) >= _ANSWER.size:  # the acknowledgement, most often: no request failed before it
        _, kind, _, answered, _, code = _ANSWER.unpack_from(datagram)
        if kind == NLMSG_ERROR and answered == first + len(requests) - 1 and not code:
            return replies
    while True:
        for message in messages(datagram):
            position = message.sequence - first
            if not 0 <= position < len(requests):
                continue  # left over from an exchange that broke off
            if message.type in {NLMSG_ERROR, NLMSG_DONE}:
                failure = failure or _failure(requests[position], message)
            else:
                replies.append(message)
            if position == len(requests) - 1 and _ends(message, final):
                if failure is not None:
                    raise failure
                return replies
        datagram = receive(final.what)


def _asks(request: Request) -> bool:
    """Whether the answer itself ends the exchange: rtnetlink numbers in fours (new, delete, get, set)."""
    return request.type & 3 == 2 or request.flags & NLM_F_DUMP == NLM_F_DUMP


def _ends(message: Message, final: Request) -> bool:
    """Whether this answer to the last request is the last one."""
    if message.type == NLMSG_ERROR or not _asks(final):
        return message.type == NLMSG_ERROR
    return message.type == NLMSG_DONE or final.flags & NLM_F_DUMP != NLM_F_DUMP


def _failure(request: Request, message: Message) -> NetlinkError | None:
    """The error in an NLMSG_ERROR or NLMSG_DONE, if there is one that the request does not tolerate."""
    number, reason = error_of(message)
    if not number or number in request.tolerate:
        return None
    return NetlinkError(number, request.what, reason)


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_LIBRARY), use_errno=True)
    except OSError as error:
        raise HiveError(f"{_LIBRARY} cannot be loaded: {error}: compile it with: make install") from error
    library.exchange_open.restype = ctypes.c_void_p
    library.exchange_open.argtypes = [ctypes.c_int]
    library.exchange_start.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32]
    library.exchange_finish.restype = ctypes.c_int64
    library.exchange_finish.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    library.exchange_close.restype = None
    library.exchange_close.argtypes = [ctypes.c_void_p]
    return library


class Ahead:
    """Requests that a thread sends while the event loop goes on: the kernel takes 0.2 ms to make two links.

    It has a netlink socket of this network namespace, for one exchange at a time; close it when done. The
    thread is C's and takes no lock of the interpreter: with one of Python's, each system call would be a
    change of hands.
    """

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
        """Send these as one datagram. Raises NetlinkError when an answer is still to be fetched."""
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
