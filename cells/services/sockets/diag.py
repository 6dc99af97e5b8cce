"""Sockets of a network namespace: those connected to some peers, and their end.

Needs: CAP_NET_ADMIN; CONFIG_INET_DIAG_DESTROY, CONFIG_INET_UDP_DIAG.   Gives: SocketDiag, DiagSocket.
Source: sock_diag(7), include/uapi/linux/inet_diag.h; net/ipv4/udp_diag.c, tcp_diag.c.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Final, NamedTuple, Self

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_SOCK_DESTROY: Final = 21
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_INTERFACE_ANY: Final = 0

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST_BODY = struct.Struct("=BBBBI")  # struct inet_diag_req_v2, then its id
_ID = struct.Struct("!HH16s16s")  # struct inet_diag_sockid, then interface and cookie
_ID_TAIL = struct.Struct("=IQ")
_MESSAGE = struct.Struct("=BBBB")  # struct inet_diag_msg, then its id

# Of enum tcp_states: established, syn sent, fin wait 1 and 2, close wait, last ack, closing.
_WITH_PEER: Final = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11


class DiagSocket(NamedTuple):
    """A socket with a peer, as the kernel describes it."""

    family: int
    cookie: int
    peer: IPv4Address | IPv6Address
    """An IPv4 address also where an IPv6 socket has it mapped."""
    port: int
    """Of the peer."""
    id: bytes
    """The kernel's own words, to end it by."""


class SocketDiag:
    """A netlink socket of the network namespace that the calling thread is in. All raise OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()

    def with_peers(self, protocol: int) -> Iterator[DiagSocket]:
        """Every socket of the protocol, TCP or UDP, that has a peer."""
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST_BODY.pack(family, protocol, 0, 0, _WITH_PEER) + bytes(48)
            self._send(_SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, body)
            yield from self._answers(family)

    def destroy(self, found: DiagSocket, protocol: int) -> bool:
        """End the socket: its owner gets ECONNABORTED. False if it has ended, or is not this one any more."""
        body = _REQUEST_BODY.pack(found.family, protocol, 0, 0, _WITH_PEER) + found.id
        self._send(_SOCK_DESTROY, _REQUEST | _ACK, body)
        data = self._socket.recv(1 << 16)
        (code,) = struct.unpack_from("=i", data, _HEADER.size)
        if -code in {errno.ENOENT, errno.ESTALE}:
            return False
        if -code == errno.EOPNOTSUPP:
            raise OSError(-code, "sockets cannot be ended: the kernel has no CONFIG_INET_DIAG_DESTROY")
        if code:
            raise OSError(-code, os.strerror(-code))
        return True

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)

    def _answers(self, family: int) -> Iterator[DiagSocket]:
        while True:
            data = self._socket.recv(1 << 18)
            at = 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
                    if -code == errno.ENOENT:
                        text = "sockets cannot be listed: the kernel has no CONFIG_INET_UDP_DIAG"
                        raise OSError(-code, text)
                    raise OSError(-code, os.strerror(-code))
                yield _described(family, data[at + _HEADER.size : at + length])
                at += (length + 3) & ~3


def _described(family: int, message: bytes) -> DiagSocket:
    name = message[_MESSAGE.size : _MESSAGE.size + _ID.size + _ID_TAIL.size]
    _, port, _, peer = _ID.unpack_from(name)
    _, cookie = _ID_TAIL.unpack_from(name, _ID.size)
    # The interface is no part of what a socket is looked up by, and may be gone.
    identity = name[: _ID.size] + _ID_TAIL.pack(_INTERFACE_ANY, cookie)
    return DiagSocket(family, cookie, _address(family, peer), port, identity)


def _address(family: int, data: bytes) -> IPv4Address | IPv6Address:
    if family == socket.AF_INET:
        return IPv4Address(data[:4])
    address = IPv6Address(data)
    return address.ipv4_mapped or address
