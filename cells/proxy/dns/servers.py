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
from cells.proxy.dns.sockets import Address, end_at_once, upstream

# TCP: messages, and the proxy's connection to the server of a pod's connection.
#
# Source: RFC 1035, section 4.2.2; RFC 7766, section 6.2.

PATIENCE: Final = 10.0
"""Timeout in seconds of an answer, and of the next query on a connection."""
TAKEN: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})


async def message(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next message; None at the end, or after PATIENCE. Raises IncompleteReadError."""
    with anyio.move_on_after(PATIENCE):
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
        except asyncio.IncompleteReadError:
            return None
        return await reader.readexactly(size)
    return None


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection; reset it if the client does not read its remaining answers. Raises OSError."""
    writer.close()
    with anyio.move_on_after(PATIENCE):
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
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, data: bytes) -> bytes:
        """Send a query and return the server's next message. Raises OSError, EOFError."""
        used = self._ends is not None
        try:
            return await self._asked(data)
        except (ConnectionError, EOFError):
            self.close()
            if not used:
                raise
        except BaseException:
            self.close()  # an answer may come yet, and would be taken for the next one
            raise
        return await self._asked(data)  # servers close idle connections

    async def _asked(self, data: bytes) -> bytes:
        reader, writer = self._ends = self._ends or await self._connect()
        writer.write(len(data).to_bytes(2, "big") + data)
        answer = await message(reader)
        if answer is None:
            raise EOFError("the server ended the connection")
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await self._connected(self._client)
        except OSError as error:
            if self._client is None or error.errno not in TAKEN:
                raise
        return await self._connected(None)

    async def _connected(self, client: Address | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, port = self._server
        made = upstream(address.version, self._identity, socket.SOCK_STREAM, client)
        try:
            if client is not None:
                end_at_once(made)
            await asyncio.get_running_loop().sock_connect(made, (str(address), port))
            return await asyncio.open_connection(sock=made)
        except BaseException:
            made.close()
            raise

    def close(self) -> None:
        """Close the connection, if it is open."""
        ends, self._ends = self._ends, None
        if ends is not None:
            ends[1].close()


# UDP from the node's address: sockets are reused, one query at a time each.
#
# Why: making, connecting, watching and closing a socket takes longer than the rest of a query. Each one
#      serves few queries and short pauses only: an attacker who forges answers must guess its port anew (RFC
#      5452).

USES: Final = 64
"""Maximum number of queries per socket."""
IDLE: Final = 2.0
"""Seconds after which an idle socket is closed."""
LARGEST: Final = 65535

Key = tuple[Address, int]
"""The server, and the identity of the pod."""
OnReply = Callable[[bytes | OSError], bool]
"""Called with a datagram or an error; returns True if it ends the wait."""


class ServerSocket:
    """A UDP socket connected to a server, with at most one outstanding query."""

    __slots__ = ("_of", "key", "made", "on_reply", "since", "uses")

    def __init__(self, of: Upstream, key: Key, made: socket.socket) -> None:
        self._of = of
        self.key = key
        self.made = made
        self.on_reply: OnReply | None = None
        self.uses = 0
        self.since = 0.0

    def give_up(self) -> None:
        """Cancel the query."""
        self._of.give_up(self)


class Upstream:
    """The UDP sockets with the node's address of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: dict[Key, list[ServerSocket]] = {}
        self._all: set[ServerSocket] = set()
        self._sweep = loop.call_later(IDLE, self._close_idle)

    def ask(self, server: Address, identity: int, data: bytes, on_reply: OnReply) -> ServerSocket:
        """Send a query; call ``on_reply`` with each datagram until it returns True. Raises OSError."""
        key = server, identity
        while idle := self._idle.get(key):
            line = idle.pop()
            try:
                return self._send(line, data, on_reply)
            except OSError:  # an ICMP error of an earlier query; another socket has none
                continue
        return self._send(self._connected(key), data, on_reply)

    def _send(self, line: ServerSocket, data: bytes, on_reply: OnReply) -> ServerSocket:
        line.on_reply = on_reply
        line.uses += 1
        try:
            line.made.send(data)
        except OSError:
            self._close(line)
            raise
        return line

    def give_up(self, line: ServerSocket) -> None:
        """Cancel a query; its socket is closed, so a late answer is dropped."""
        line.on_reply = None
        self._close(line)

    def close(self) -> None:
        """Close all sockets."""
        self._sweep.cancel()
        for line in list(self._all):
            self._close(line)

    def _connected(self, key: Key) -> ServerSocket:
        (address, port), identity = key
        made = upstream(address.version, identity, socket.SOCK_DGRAM)
        try:
            made.connect((str(address), port))
        except OSError:
            made.close()
            raise
        line = ServerSocket(self, key, made)
        self._all.add(line)
        self._loop.add_reader(made, self._ready, line)
        return line

    def _ready(self, line: ServerSocket) -> None:
        if line not in self._all:
            return
        received: bytes | OSError
        try:
            received = line.made.recv(LARGEST)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            received = error
        on_reply = line.on_reply
        if on_reply is None:  # a late answer
            if isinstance(received, OSError):
                self._close(line)
            return
        if not on_reply(received):
            return
        line.on_reply = None
        if line not in self._all:
            return
        if isinstance(received, OSError) or line.uses >= USES:
            self._close(line)
            return
        line.since = self._loop.time()
        self._idle.setdefault(line.key, []).append(line)

    def _close(self, line: ServerSocket) -> None:
        if line not in self._all:
            return
        self._all.discard(line)
        idle = self._idle.get(line.key)
        if idle is not None and line in idle:
            idle.remove(line)
        self._loop.remove_reader(line.made)
        line.made.close()

    def _close_idle(self) -> None:
        since = self._loop.time() - IDLE
        for key, idle in list(self._idle.items()):
            for line in [one for one in idle if one.since < since]:
                self._close(line)
            if not idle:
                del self._idle[key]
        self._sweep = self._loop.call_later(IDLE, self._close_idle)


# UDP from the pod's address: the socket is bound to the address and port of the query.
#
# Why:    the server and policies of other nodes see the pod. The datapath delivers answers to this socket
#         while it exists, else to the pod.
# Source: ip(7) IP_TRANSPARENT; Cilium 1.17, dnsproxy-enable-transparent-mode.
#
# A resolver asks for A and AAAA from one port, so a socket has several queries; it is closed with the last.

AT_ONCE: Final = 64
"""Sockets read per callback of the event loop."""

Query = tuple[str, int, bytes]
"""The server's address and port in the form of recvfrom(2), and the query's ID (its first two bytes)."""


class PodSocket:
    """A UDP socket bound to a pod's address and port."""

    def __init__(self, of: PodSockets, key: Address, identity: int) -> None:
        self._of = of
        self.key = key
        self._waiting: dict[Query, list[OnReply]] = {}
        self.made = upstream(key[0].version, identity, socket.SOCK_DGRAM, key)

    @property
    def waits(self) -> bool:
        """Whether any query is pending."""
        return bool(self._waiting)

    def ask(self, server: Address, data: bytes, on_reply: OnReply) -> Waiting:
        """Send a query. Raises OSError."""
        to = text_of(server[0]), server[1]
        self.made.sendto(data, to)
        query = (*to, data[:2])
        waiting = self._waiting.get(query)
        if waiting is None:
            self._waiting[query] = [on_reply]
        else:
            waiting.append(on_reply)
        return Waiting(self, query, on_reply)

    def received(self) -> None:
        """Read a datagram, and pass it to the queries to its server with its ID."""
        try:
            data, sender = self.made.recvfrom(LARGEST)
        except OSError:  # an ICMP error, which reaches the pod, too
            return
        query = _canonical(sender[0]), sender[1], data[:2]
        for on_reply in self._waiting.get(query, ()):
            if on_reply(data):
                self.forget(query, on_reply)
                return

    def forget(self, query: Query, on_reply: OnReply) -> None:
        """Remove a query; the last one closes the socket."""
        waiting = self._waiting.get(query, [])
        if on_reply in waiting:
            waiting.remove(on_reply)
        if not waiting:
            self._waiting.pop(query, None)
        if not self._waiting:
            self._of.close_one(self)


class Waiting:
    """A pending query of a PodSocket."""

    __slots__ = ("_made", "_on_reply", "_query")

    def __init__(self, made: PodSocket, query: Query, on_reply: OnReply) -> None:
        self._made = made
        self._query = query
        self._on_reply = on_reply

    def give_up(self) -> None:
        """Cancel the query."""
        self._made.forget(self._query, self._on_reply)


class PodSockets:
    """The UDP sockets with pods' addresses of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._all: dict[Address, PodSocket] = {}
        self._by_descriptor: dict[int, PodSocket] = {}
        # An epoll of our own, which the loop watches: add_reader() of each socket costs more than a query.
        self._ready = select.epoll()
        loop.add_reader(self._ready, self._received)

    def ask(self, client: Address, server: Address, identity: int, data: bytes, on_reply: OnReply) -> Waiting:
        """Send a client's query; call ``on_reply`` with each datagram until it returns True.

        Raises OSError: EADDRINUSE if a process of the node has bound the port on the wildcard address.
        """
        made = self._all.get(client)
        if made is None:
            made = self._all[client] = PodSocket(self, client, identity)
            self._by_descriptor[made.made.fileno()] = made
            self._ready.register(made.made, select.EPOLLIN)
        try:
            return made.ask(server, data, on_reply)
        except OSError:
            if not made.waits:
                self.close_one(made)
            raise

    def close_one(self, one: PodSocket) -> None:
        """Close a socket."""
        if self._all.get(one.key) is one:
            del self._all[one.key], self._by_descriptor[one.made.fileno()]
            one.made.close()  # and is watched no more

    def _received(self) -> None:
        if len(self._by_descriptor) == 1:
            (only,) = self._by_descriptor.values()
            return only.received()
        for descriptor, _ in self._ready.poll(0, AT_ONCE):
            one = self._by_descriptor.get(descriptor)
            if one is not None:
                one.received()
        return None

    def close(self) -> None:
        """Close all sockets."""
        for one in list(self._all.values()):
            self.close_one(one)
        self._loop.remove_reader(self._ready)
        self._ready.close()


@lru_cache(maxsize=1024)
def _canonical(text: str) -> str:
    """Return an address as text_of() formats it."""
    return text_of(ip_address(text))
