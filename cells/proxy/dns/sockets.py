"""Sockets of a transparent proxy: listeners, raw sockets for UDP answers, sockets towards servers.

The datapath assigns packets to the listeners (bpf_sk_assign); their destination is the server that the pod
queried. UDP answers leave with that server's address through a raw socket, because a socket bound to the
server's address and port would receive packets for a server on this node.

Source: ip(7) IP_TRANSPARENT, IP_ORIGDSTADDR, IP_PKTINFO; ipv6(7); raw(7); RFC 768.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from functools import lru_cache
from typing import Final

from cells.base.addresses import IPAddress, address_of, text_of

_IP_TRANSPARENT, _IPV6_TRANSPARENT = 19, 75
_IP_RECVORIGDSTADDR, _IPV6_RECVORIGDSTADDR = 20, 74
_ORIGINAL_DESTINATION: Final = (
    (socket.IPPROTO_IP, _IP_RECVORIGDSTADDR),
    (socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR),
)
_IP_PKTINFO = 8
_SO_ATTACH_FILTER, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_MARK = 26, 32, 33, 36
_IPV6_CHECKSUM: Final = 7
_PKTINFO4 = struct.Struct("=I4s4s")
_PKTINFO6 = struct.Struct("=16sI")
_UDP = struct.Struct(">HHHH")
_PSEUDO4 = struct.Struct(">4s4sHHHHHH")
"""The pseudo header of the UDP checksum and the UDP header (RFC 768)."""
_ANY4: Final = bytes(4)
_LARGEST: Final = 65535 - 8 - 40
BUFFER_SIZE: Final = 4 << 20
"""Size of socket buffers in bytes; larger than net.core.rmem_max and wmem_max on most nodes."""
EGRESS_PROXY: Final = 0x0B00
"""Mark of packets that a proxy sends; the upper half holds the pod's identity."""

Address = tuple[IPAddress, int]
"""Address and port."""


def udp_listener(family: socket.AddressFamily, port: int) -> socket.socket:
    """Open the UDP listener on the loopback address. Raises OSError."""
    listener = _listener(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET:
            listener.setsockopt(socket.IPPROTO_IP, _IP_RECVORIGDSTADDR, 1)
        else:
            listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_SIZE)
        listener.bind((loopback(family), port))
    except BaseException:
        listener.close()
        raise
    return listener


def tcp_listener(family: socket.AddressFamily, port: int) -> socket.socket:
    """Open the TCP listener on the loopback address. Raises OSError."""
    listener = _listener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _mark(listener, EGRESS_PROXY)  # accepted sockets inherit it
        listener.bind((loopback(family), port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def loopback(family: socket.AddressFamily) -> str:
    """Return the loopback address of a family."""
    return "127.0.0.1" if family == socket.AF_INET else "::1"


def _listener(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _make_transparent(sock, family)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _mark(sock: socket.socket, mark: int) -> None:
    """Set the mark of a socket; setsockopt() takes it as a signed number."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, mark - (mark >> 31 << 32))


def _make_transparent(sock: socket.socket, family: socket.AddressFamily) -> None:
    if family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, _IP_TRANSPARENT, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)


def original_destination(ancillary: list[tuple[int, int, bytes]]) -> Address | None:
    """Return the original destination of a datagram from its control messages."""
    for level, kind, data in ancillary:
        if (level, kind) in _ORIGINAL_DESTINATION:
            return _destination(data)
    return None


@lru_cache(maxsize=4096)
def _destination(data: bytes) -> Address:
    """Parse a struct sockaddr_in or sockaddr_in6."""
    (family,) = struct.unpack_from("=H", data)
    packed = data[4:8] if family == socket.AF_INET else data[8:24]
    return address_of(packed), int.from_bytes(data[2:4], "big")


class UDPAnswers:
    """Sends UDP datagrams with any source address and port, until it is closed."""

    def __init__(self, family: socket.AddressFamily) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._socket = socket.socket(family, kind, socket.IPPROTO_UDP)
        try:
            _drop_received(self._socket)
            _make_transparent(self._socket, family)
            _mark(self._socket, EGRESS_PROXY)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, BUFFER_SIZE)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, 6)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes, source: Address, to: Address) -> None:
        """Send a datagram. Raises OSError; BlockingIOError if the device is busy."""
        (address, port), (client, client_port) = source, to
        size = len(data) + _UDP.size
        if len(data) > _LARGEST:
            raise OSError(90, "Message too long")
        packed = address.packed
        if len(packed) == 4:
            pseudo = _PSEUDO4.pack(
                packed, client.packed, socket.IPPROTO_UDP, size, port, client_port, size, 0
            )
            header = _UDP.pack(port, client_port, size, _checksum(pseudo + data))
            info = socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO4.pack(0, packed, _ANY4)
        else:
            header = _UDP.pack(port, client_port, size, 0)  # the kernel fills in the checksum
            info = socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(packed, 0)
        self._socket.sendmsg((header, data), (info,), 0, (text_of(client), 0))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _checksum(data: bytes) -> int:
    """Return the UDP checksum (RFC 1071); never 0, which means no checksum."""
    if len(data) % 2:
        data += b"\0"
    # The ones' complement sum of 16-bit words is the whole number modulo 0xFFFF, since 2**16 is 1 there.
    return ~(int.from_bytes(data, "big") % 0xFFFF) & 0xFFFF


def _drop_received(sock: socket.socket) -> None:
    """Attach a filter that drops all packets: a raw socket would get a copy of each UDP datagram."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def query_socket(
    version: int, identity: int, kind: socket.SocketKind, client: Address | None = None
) -> socket.socket:
    """Return an unconnected socket for queries of a pod with this identity. Raises OSError.

    ``client``: the pod's address and port to bind to; by default the kernel chooses the node's.
    """
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if not identity >> 24:
            _mark(sock, EGRESS_PROXY | (identity & 0xFFFF) << 16 | identity >> 16)
        if client is not None:
            _make_transparent(sock, family)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((text_of(client[0]), client[1]))
    except BaseException:
        sock.close()
        raise
    return sock


def reset_on_close(sock: socket.socket) -> None:
    """Make close(2) reset the connection, so that the pod can reuse its port at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
