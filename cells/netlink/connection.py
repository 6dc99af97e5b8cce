"""Netlink sockets: batches of requests in one datagram, and notifications of changes.

rtnetlink, xfrm, nftables and WireGuard requests of the agent go through Connection; wire.py encodes them.

The kernel answers a request within the send call, so reading never waits: the socket is non-blocking, and a
missing answer is an error. Only the last request asks for an acknowledgement; the kernel reports failures of
the others anyway (netlink(7)). So a batch is one send and, on success, one receive.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

import anyio
from anyio import wait_readable

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
    "AsyncExchange",
    "Field",
    "Filter",
    "ForeignRouteError",
    "NetlinkError",
    "connected",
    "message_filter",
    "notifications",
    "of_types",
    "open_socket",
    "subscribed",
]


_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NETLINK_GET_STRICT_CHK = 12
_ANSWER = struct.Struct("=IHHIIi")  # nlmsghdr, then the negative errno of an NLMSG_ERROR
_RECEIVE = 32768  # the largest datagram of netlink_dump()
_DUMP_TRIES = 10
_LIBRARY = Path(__file__).resolve().parent / "ahead" / "objects" / "libahead.so"


class NetlinkError(OSError, HiveError):
    """Raised when the kernel refuses a request.

    ``what`` names the request; ``errno`` and the text have the reason.
    """

    def __init__(self, number: int, what: str, reason: str = "") -> None:
        super().__init__(number, os.strerror(number) + (f" ({reason})" if reason else ""))
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str, str]]:
        return type(self), (self.errno or 0, self.what, self.reason)

    def __str__(self) -> str:
        return f"{self.what}: {self.strerror}"


class ForeignRouteError(HiveError):
    """Raised instead of replacing a route that another program or an administrator has set."""

    def __init__(self, destination: object, way: str) -> None:
        super().__init__(
            f"a route to {destination} of another owner exists ({way}): it is left in place;"
            " remove it, or give the node another range"
        )


def open_socket(*, strict: bool = False, protocol: int = socket.NETLINK_ROUTE) -> int:
    """Open a bound, non-blocking netlink socket in the current network namespace; the caller closes it.

    ``strict``: the kernel applies the filters of dump requests (Linux 4.20 and later).
    """
    opened = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol
    )
    try:
        opened.bind((0, 0))
        opened.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        opened.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        if strict:
            opened.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
    except BaseException:
        opened.close()
        raise
    return opened.detach()


class Connection:
    """Requests over one netlink socket, from one thread at a time. The caller owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sequence = 0

    def run(self, *requests: Request) -> list[Message]:
        """Send the requests as one datagram and return the dumped rows or replies.

        The kernel processes all requests in order, even after a failure: a batch is not a transaction. Raises
        NetlinkError for the first failed request.
        """
        first, datagram = self.prepared(requests)
        try:
            os.write(self._fd, datagram)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, requests[-1].what, "sending to netlink") from error
        return answers(requests, first, self._receive)

    def dump(self, request: Request) -> list[Message]:
        """Return the rows of a dump; repeat the dump if the table changed meanwhile (NLM_F_DUMP_INTR)."""
        for _ in range(_DUMP_TRIES):
            rows = self.run(request)
            if not any(row.flags & NLM_F_DUMP_INTR for row in rows):
                return rows
        raise NetlinkError(errno.EAGAIN, request.what, f"changed during each of {_DUMP_TRIES} tries")

    def prepared(self, requests: Sequence[Request]) -> tuple[int, bytes]:
        """Return the sequence number of the batch's first request, and the datagram."""
        first = self._sequence + 1
        self._sequence = (self._sequence + len(requests)) & 0x7FFFFFFF
        return first, encode(requests, first, acknowledge=not _expects_reply(requests[-1]))

    def _receive(self, what: str) -> bytes:
        try:
            return os.read(self._fd, _RECEIVE)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, what, "on reading the answer") from error


@contextmanager
def connected(*, strict: bool = False, protocol: int = socket.NETLINK_ROUTE) -> Iterator[Connection]:
    """Open a connection over its own socket (see open_socket()), for a worker thread. Raises OSError."""
    fd = open_socket(strict=strict, protocol=protocol)
    try:
        yield Connection(fd)
    finally:
        os.close(fd)


def answers(requests: Sequence[Request], first: int, receive: Callable[[str], bytes]) -> list[Message]:
    """Return the replies to a batch numbered from ``first`` on; ``receive`` returns the next datagram.

    Raises NetlinkError for the first failed request, and whatever ``receive`` raises.
    """
    final = requests[-1]
    replies: list[Message] = []
    failure: NetlinkError | None = None
    datagram = receive(final.what)
    if len(datagram) >= _ANSWER.size:  # usually the acknowledgement: no request failed
        _, kind, _, answered, _, code = _ANSWER.unpack_from(datagram)
        if kind == NLMSG_ERROR and answered == first + len(requests) - 1 and not code:
            return replies
    while True:
        for message in messages(datagram):
            position = message.sequence - first
            if not 0 <= position < len(requests):
                continue  # answers an earlier, aborted exchange
            if message.type in {NLMSG_ERROR, NLMSG_DONE}:
                failure = failure or _failure(requests[position], message)
            else:
                replies.append(message)
            if position == len(requests) - 1 and _ends(message, final):
                if failure is not None:
                    raise failure
                return replies
        datagram = receive(final.what)


def _expects_reply(request: Request) -> bool:
    """Whether the reply itself ends the exchange: rtnetlink types repeat in fours (new, delete, get, set)."""
    return request.type & 3 == 2 or request.flags & NLM_F_DUMP == NLM_F_DUMP


def _ends(message: Message, final: Request) -> bool:
    """Whether this is the final message for the last request."""
    if message.type == NLMSG_ERROR or not _expects_reply(final):
        return message.type == NLMSG_ERROR
    return message.type == NLMSG_DONE or final.flags & NLM_F_DUMP != NLM_F_DUMP


def _failure(request: Request, message: Message) -> NetlinkError | None:
    """The error in an NLMSG_ERROR or NLMSG_DONE; None on success or for a tolerated errno."""
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


class AsyncExchange:
    """Send requests from a C thread while the event loop continues: creating a veth pair takes 0.2 ms.

    It has its own netlink socket in the current network namespace, for one exchange at a time. Close it when
    done. The thread is a C thread because a Python thread would take the GIL again after each system call.
    """

    def __init__(self) -> None:
        """Raises OSError if no socket or thread can be created, HiveError without the library."""
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
        """Send the requests as one datagram. Raises NetlinkError EBUSY before the previous finish()."""
        first, datagram = self._connection.prepared(requests)
        last = first + len(requests) - 1
        error = self._library.exchange_start(self._exchange, datagram, len(datagram), last)
        if error:
            raise NetlinkError(error, requests[-1].what, "starting the exchange")
        self._requests, self._first = requests, first

    def finish(self) -> list[Message]:
        """Wait for the answers; return and raise like Connection.run()."""
        length = self._library.exchange_finish(self._exchange, ctypes.byref(self._answer))
        requests, first = self._requests, self._first
        if length < 0:
            raise NetlinkError(-length, requests[-1].what if requests else "no request was started")
        return answers(requests, first, lambda _: ctypes.string_at(self._answer, length))

    def close(self) -> None:
        """End the thread. Call finish() first if a request was started."""
        self._library.exchange_close(self._exchange)
        os.close(self._fd)


# Notifications. They only wake the receiver, which reads the new state; the messages are not parsed.
#
# A classic BPF filter (linux/filter.h) makes the kernel drop unwanted messages, because pods cause many.
# Source: rtnetlink(7). pyroute2, which could parse the messages, takes 0.1 s and 13 MB to import.

_SO_ATTACH_FILTER: Final = 26

Filter = Sequence[tuple[int, int, int, int]]
"""Instructions of classic BPF: code, jump if true, jump if false, operand."""

LOAD_WORD: Final = 0x20
LOAD_HALF: Final = 0x28
LOAD_BYTE: Final = 0x30
EQUAL: Final = 0x15
MASK: Final = 0x54
RETURN: Final = 0x06
PASS: Final = 0xFFFFFFFF
DROP: Final = 0
TYPE: Final = 4
"""Offset of the type in a message."""


class Field(NamedTuple):
    """A condition on a message: the number at ``offset``, as the filter loads it, is one of ``values``."""

    load: int
    offset: int
    values: tuple[int, ...]


def of_types(*types: int) -> Field:
    """A condition: the message has one of these types (RTM_*)."""
    return Field(LOAD_HALF, TYPE, tuple(map(socket.htons, types)))


def message_filter(*alternatives: Sequence[Field]) -> Filter:
    """Return a filter that accepts messages that meet all conditions of at least one alternative."""
    code: list[tuple[int, int, int, int]] = []
    for fields in alternatives:
        size = sum(1 + len(field.values) for field in fields) + 1
        end = len(code) + size
        for load, offset, values in fields:
            code.append((load, 0, 0, offset))
            for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
                mismatch = 0 if left else end - len(code) - 1
                code.append((EQUAL, left, mismatch, value))
        code.append((RETURN, 0, 0, PASS))
    return [*code, (RETURN, 0, 0, DROP)]


@asynccontextmanager
async def subscribed(
    groups: int, wanted: Filter, protocol: int = socket.NETLINK_ROUTE
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Subscribe to ``groups``; the result waits until a message arrives that ``wanted`` accepts.

    ``groups`` is a mask of RTMGRP_*, or of groups of another ``protocol``. The result raises OSError if
    messages were lost: subscribe again.
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


async def notifications(
    groups: int, wanted: Filter, settle: float = 0.05, *, protocol: int = socket.NETLINK_ROUTE
) -> AsyncIterator[None]:
    """Yield once after subscribing (earlier changes were missed), then once per burst of messages.

    ``settle``: seconds in which the messages of a burst are merged. Raises what :func:`subscribed` raises.
    """
    async with subscribed(groups, wanted, protocol) as changed:
        yield
        while True:
            await changed()
            with anyio.move_on_after(settle):
                while True:
                    await changed()
            yield
