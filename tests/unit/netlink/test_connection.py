"""Exchanges with a kernel that is a socket pair: what failed, and what it is called."""

import errno
import os
import pickle
import socket
import struct
from collections.abc import Iterator

import pytest

from cells.netlink.connection import Connection, NetlinkError
from cells.netlink.wire import Request, messages

NEW, GET, DUMP = 16, 18, 0x300


@pytest.fixture
def kernel() -> Iterator[socket.socket]:
    """The kernel's end; the agent's end is its attribute of that name in ``connection``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        ends[theirs.fileno()] = ours.fileno()
        yield theirs


ends: dict[int, int] = {}


@pytest.fixture
def connection(kernel: socket.socket) -> Connection:
    return Connection(ends[kernel.fileno()])


def row(sequence: int, kind: int, body: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def answer(sequence: int, number: int = 0, text: str = "") -> bytes:
    """An NLMSG_ERROR as the kernel writes it with capped and extended acknowledgements."""
    body = struct.pack("=iIHHII", -number, 16, NEW, 0, sequence, 0)
    if text:
        words = text.encode() + b"\0"
        body += struct.pack("=HH", 4 + len(words), 1) + words + bytes(-len(words) % 4)
    return row(sequence, 2, body, 0x100 | (0x200 if text else 0))


def request(what: str, kind: int = NEW, flags: int = 0, tolerate: tuple[int, ...] = ()) -> Request:
    return Request(what, kind, flags, b"\0\0\0\0", tolerate)


def test_a_batch_is_one_datagram_and_only_its_last_request_asks_for_an_answer(
    kernel: socket.socket, connection: Connection
) -> None:
    kernel.send(answer(3))
    assert connection.run(request("a"), request("b"), request("c")) == []
    sent = list(messages(kernel.recv(4096)))
    assert [(each.sequence, each.flags) for each in sent] == [(1, 1), (2, 1), (3, 5)]


def test_the_first_request_that_failed_is_named_with_the_kernels_words(
    kernel: socket.socket, connection: Connection
) -> None:
    kernel.send(answer(1, errno.EEXIST))
    kernel.send(answer(2, errno.ENETUNREACH, "Nexthop has invalid gateway"))
    kernel.send(answer(3, errno.ENODEV))
    with pytest.raises(NetlinkError) as caught:
        connection.run(request("a", tolerate=(errno.EEXIST,)), request("add route"), request("c"))
    assert str(caught.value) == "add route: Network is unreachable (Nexthop has invalid gateway)"
    assert caught.value.errno == errno.ENETUNREACH
    assert caught.value.what == "add route"


def test_an_error_survives_the_way_between_processes() -> None:
    error = NetlinkError(errno.ENODEV, "look up link x", "gone")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


def test_a_reply_ends_an_exchange_without_an_acknowledgement(
    kernel: socket.socket, connection: Connection
) -> None:
    kernel.send(row(2, NEW, b"link"))
    replies = connection.run(request("create"), request("look up", GET))
    assert [reply.body for reply in replies] == [b"link"]
    assert all(not each.flags & 4 for each in messages(kernel.recv(4096)))


def test_a_dump_ends_with_done(kernel: socket.socket, connection: Connection) -> None:
    kernel.send(row(1, NEW, b"one ", 2) + row(1, NEW, b"two ", 2))
    kernel.send(row(1, 3, b"\0\0\0\0", 2))
    assert [each.body for each in connection.dump(request("list", GET, DUMP))] == [b"one ", b"two "]


def test_a_dump_that_fails_at_its_end_raises(kernel: socket.socket, connection: Connection) -> None:
    kernel.send(row(1, 3, struct.pack("=i", -errno.ENOBUFS), 2))
    with pytest.raises(NetlinkError, match="list: No buffer space"):
        connection.dump(request("list", GET, DUMP))


def test_a_dump_that_changed_under_way_is_asked_for_again(
    kernel: socket.socket, connection: Connection
) -> None:
    kernel.send(row(1, NEW, b"old ", 2 | 0x10) + row(1, 3, b"\0\0\0\0", 2))
    kernel.send(row(2, NEW, b"new ", 2) + row(2, 3, b"\0\0\0\0", 2))
    assert [each.body for each in connection.dump(request("list", GET, DUMP))] == [b"new "]


def test_answers_to_an_exchange_that_broke_off_are_skipped(
    kernel: socket.socket, connection: Connection
) -> None:
    with pytest.raises(NetlinkError, match="first: Resource temporarily unavailable"):
        connection.run(request("first"))
    kernel.send(answer(1, errno.EPERM))
    kernel.send(answer(2))
    assert connection.run(request("second")) == []


def test_a_closed_netlink_socket_raises_an_error_with_the_request() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(NetlinkError, match="create: Bad file descriptor"):
        Connection(write).run(request("create"))
