"""Sends queries to DNS servers over UDP and TCP, from pods' addresses or the node's."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import struct
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

import anyio

from cells.base.addresses import text_of
from cells.proxy.dns.sockets import Address, query_socket, reset_on_close

# TCP: length-prefixed messages, and a connection to the server for each connection of a pod.
#
# Source: RFC 1035, section 4.2.2; RFC 7766, section 6.2.

TIMEOUT_SECONDS: Final = 10.0
"""Timeout in seconds of an answer, and of the next query on a connection."""
PORT_IN_USE: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next message; None at the end, or after PATIENCE. Raises IncompleteReadError."""
    with anyio.move_on_after(TIMEOUT_SECONDS):
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
        except asyncio.IncompleteReadError:
            return None
        return await reader.readexactly(size)
    return None


async def close_connection(writer: asyncio.StreamWriter) -> None:
    """Close a connection; reset it if the client does not read its remaining answers. Raises OSError."""
    writer.close()
    with anyio.move_on_after(TIMEOUT_SECONDS):
        await writer.wait_closed()
        return
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class ServerConnection:
    """The TCP connection to the server for one pod's connection, opened by the first query.

    It is opened again if the server closed it.
    """

    def __init__(self, server: Address, identity: int, client: Address | None) -> None:
        """``client``: the source address and port; None for the node's."""
        self._server = server
        self._identity = identity
        self._client = client
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, data: bytes) -> bytes:
        """Send a query and return the server's next message. Raises OSError, EOFError."""
        reused = self._streams is not None
        try:
            return await self._exchange(data)
        except (ConnectionError, EOFError):
            self.close()
            if not reused:
                raise
        except BaseException:
            self.close()  # a late answer would be read as that to the next query
            raise
        return await self._exchange(data)  # servers close idle connections

    async def _exchange(self, data: bytes) -> bytes:
        reader, writer = self._streams = self._streams or await self._connect()
        writer.write(len(data).to_bytes(2, "big") + data)
        answer = await read_message(reader)
        if answer is None:
            raise EOFError("the server ended the connection")
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await self._open(self._client)
        except OSError as error:
            if self._client is None or error.errno not in PORT_IN_USE:
                raise
        return await self._open(None)

    async def _open(self, client: Address | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, port = self._server
        sock = query_socket(address.version, self._identity, socket.SOCK_STREAM, client)
        try:
            if client is not None:
                reset_on_close(sock)
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            return await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        """Close the connection, if it is open."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()


# UDP from the node's address: sockets are reused, with one query at a time.
#
# Why: creating, connecting, registering and closing a socket takes longer than all other work for a query.
#      A socket serves few queries and is closed after a short idle time, so that its port stays hard to guess
#      for an attacker who spoofs answers (RFC 5452).

MAX_QUERIES: Final = 64
"""Maximum number of queries per socket."""
IDLE_SECONDS: Final = 2.0
"""Seconds after which an idle socket is closed."""
LARGEST: Final = 65535

Key = tuple[Address, int]
"""The server, and the identity of the pod."""
OnReply = Callable[[bytes | OSError], bool]
"""Called with a datagram or an error; returns True if it ends the wait."""


class ServerSocket:
    """A UDP socket connected to a server, with at most one outstanding query."""

    __slots__ = ("_owner", "idle_since", "key", "on_reply", "sock", "uses")

    def __init__(self, owner: NodeSockets, key: Key, sock: socket.socket) -> None:
        self._owner = owner
        self.key = key
        self.sock = sock
        self.on_reply: OnReply | None = None
        self.uses = 0
        self.idle_since = 0.0

    def cancel(self) -> None:
        """Cancel the query."""
        self._owner.cancel(self)


class NodeSockets:
    """The UDP sockets with the node's address of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: dict[Key, list[ServerSocket]] = {}
        self._all: set[ServerSocket] = set()
        self._sweep = loop.call_later(IDLE_SECONDS, self._close_idle)

    def send(self, server: Address, identity: int, data: bytes, on_reply: OnReply) -> ServerSocket:
        """Send a query; call ``on_reply`` with each datagram until it returns True. Raises OSError."""
        key = server, identity
        while idle := self._idle.get(key):
            server_socket = idle.pop()
            try:
                return self._send_on(server_socket, data, on_reply)
            except OSError:  # an ICMP error of an earlier query: try another socket
                continue
        return self._send_on(self._open(key), data, on_reply)

    def _send_on(self, server_socket: ServerSocket, data: bytes, on_reply: OnReply) -> ServerSocket:
        server_socket.on_reply = on_reply
        server_socket.uses += 1
        try:
            server_socket.sock.send(data)
        except OSError:
            self._close(server_socket)
            raise
        return server_socket

    def cancel(self, server_socket: ServerSocket) -> None:
        """Cancel a query; its socket is closed, so a late answer is dropped."""
        server_socket.on_reply = None
        self._close(server_socket)

    def close(self) -> None:
        """Close all sockets."""
        self._sweep.cancel()
        for server_socket in list(self._all):
            self._close(server_socket)

    def _open(self, key: Key) -> ServerSocket:
        (address, port), identity = key
        sock = query_socket(address.version, identity, socket.SOCK_DGRAM)
        try:
            sock.connect((str(address), port))
        except OSError:
            sock.close()
            raise
        server_socket = ServerSocket(self, key, sock)
        self._all.add(server_socket)
        self._loop.add_reader(sock, self._ready, server_socket)
        return server_socket

    def _ready(self, server_socket: ServerSocket) -> None:
        if server_socket not in self._all:
            return
        received: bytes | OSError
        try:
            received = server_socket.sock.recv(LARGEST)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            received = error
        on_reply = server_socket.on_reply
        if on_reply is None:  # a late answer
            if isinstance(received, OSError):
                self._close(server_socket)
            return
        if not on_reply(received):
            return
        server_socket.on_reply = None
        if server_socket not in self._all:
            return
        if isinstance(received, OSError) or server_socket.uses >= MAX_QUERIES:
            self._close(server_socket)
            return
        server_socket.idle_since = self._loop.time()
        self._idle.setdefault(server_socket.key, []).append(server_socket)

    def _close(self, server_socket: ServerSocket) -> None:
        if server_socket not in self._all:
            return
        self._all.discard(server_socket)
        idle = self._idle.get(server_socket.key)
        if idle is not None and server_socket in idle:
            idle.remove(server_socket)
        self._loop.remove_reader(server_socket.sock)
        server_socket.sock.close()

    def _close_idle(self) -> None:
        since = self._loop.time() - IDLE_SECONDS
        for key, idle in list(self._idle.items()):
            for server_socket in [one for one in idle if one.idle_since < since]:
                self._close(server_socket)
            if not idle:
                del self._idle[key]
        self._sweep = self._loop.call_later(IDLE_SECONDS, self._close_idle)


# UDP from the pod's address: the socket is bound to the address and port of the query.
#
# Why:    servers and the policies of other nodes see the pod's address. The datapath delivers answers to this
#         socket while it exists, otherwise to the pod.
# Source: ip(7) IP_TRANSPARENT; Cilium 1.17, dnsproxy-enable-transparent-mode.
#
# Resolvers send A and AAAA queries from one port, so a socket may have several pending queries. It is closed
# with the last one.

SOCKETS_PER_CALLBACK: Final = 64
"""Sockets read per callback of the event loop."""

Query = tuple[str, int, bytes]
"""The server's address and port in the form of recvfrom(2), and the query's ID (its first two bytes)."""


class PodSocket:
    """A UDP socket bound to a pod's address and port."""

    def __init__(self, owner: PodSockets, key: Address, identity: int) -> None:
        self._owner = owner
        self.key = key
        self._pending: dict[Query, list[OnReply]] = {}
        self.sock = query_socket(key[0].version, identity, socket.SOCK_DGRAM, key)

    @property
    def is_pending(self) -> bool:
        """Whether any query is pending."""
        return bool(self._pending)

    def send(self, server: Address, data: bytes, on_reply: OnReply) -> PodQuery:
        """Send a query. Raises OSError."""
        to = text_of(server[0]), server[1]
        self.sock.sendto(data, to)
        query = (*to, data[:2])
        pending = self._pending.get(query)
        if pending is None:
            self._pending[query] = [on_reply]
        else:
            pending.append(on_reply)
        return PodQuery(self, query, on_reply)

    def received(self) -> None:
        """Read a datagram, and pass it to the queries to its server with its ID."""
        try:
            data, sender = self.sock.recvfrom(LARGEST)
        except OSError:  # an ICMP error, which the pod receives, too
            return
        query = _canonical(sender[0]), sender[1], data[:2]
        for on_reply in self._pending.get(query, ()):
            if on_reply(data):
                self.remove(query, on_reply)
                return

    def remove(self, query: Query, on_reply: OnReply) -> None:
        """Remove a query; the last one closes the socket."""
        pending = self._pending.get(query, [])
        if on_reply in pending:
            pending.remove(on_reply)
        if not pending:
            self._pending.pop(query, None)
        if not self._pending:
            self._owner.close_socket(self)


class PodQuery:
    """A pending query of a PodSocket."""

    __slots__ = ("_on_reply", "_query", "_socket")

    def __init__(self, sock: PodSocket, query: Query, on_reply: OnReply) -> None:
        self._socket = sock
        self._query = query
        self._on_reply = on_reply

    def cancel(self) -> None:
        """Cancel the query."""
        self._socket.remove(self._query, self._on_reply)


class PodSockets:
    """The UDP sockets with pods' addresses of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._all: dict[Address, PodSocket] = {}
        self._by_descriptor: dict[int, PodSocket] = {}
        # A nested epoll instance: add_reader() for each socket would cost more than the query.
        self._epoll = select.epoll()
        loop.add_reader(self._epoll, self._received)

    def send(
        self, client: Address, server: Address, identity: int, data: bytes, on_reply: OnReply
    ) -> PodQuery:
        """Send a client's query; call ``on_reply`` with each datagram until it returns True.

        Raises OSError: EADDRINUSE if a process of the node has bound the port on the wildcard address.
        """
        sock = self._all.get(client)
        if sock is None:
            sock = self._all[client] = PodSocket(self, client, identity)
            self._by_descriptor[sock.sock.fileno()] = sock
            self._epoll.register(sock.sock, select.EPOLLIN)
        try:
            return sock.send(server, data, on_reply)
        except OSError:
            if not sock.is_pending:
                self.close_socket(sock)
            raise

    def close_socket(self, one: PodSocket) -> None:
        """Close a socket."""
        if self._all.get(one.key) is one:
            del self._all[one.key], self._by_descriptor[one.sock.fileno()]
            one.sock.close()  # this also removes it from the epoll instance

    def _received(self) -> None:
        if len(self._by_descriptor) == 1:
            (only,) = self._by_descriptor.values()
            return only.received()
        for descriptor, _ in self._epoll.poll(0, SOCKETS_PER_CALLBACK):
            one = self._by_descriptor.get(descriptor)
            if one is not None:
                one.received()
        return None

    def close(self) -> None:
        """Close all sockets."""
        for one in list(self._all.values()):
            self.close_socket(one)
        self._loop.remove_reader(self._epoll)
        self._epoll.close()


@lru_cache(maxsize=1024)
def _canonical(text: str) -> str:
    """Return an address as text_of() formats it."""
    return text_of(ip_address(text))
