"""Connections to servers: TCP, an optional proxy, and TLS for https."""

from __future__ import annotations

import asyncio
import base64
import os
import select
import socket
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import anyio
import anyio.lowlevel
from anyio.abc import SocketAttribute

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http import READ, HttpConnection, IncomingResponse, Stream, TlsStream

__all__ = ["ConnectionPool", "Dialler"]


# Bytes over TCP.

UNANSWERED_PROBES: Final = 3
"""Number of unanswered keepalive probes that end a silent connection."""


class ReceiveBuffer(asyncio.Protocol):
    """Bytes that have arrived on a connection, and are not read yet.

    Why: a stream of anyio reads only while a task waits, which costs two system calls per event of a watch,
    and yields to the event loop after each write.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.ended = False
        """Whether no more bytes will arrive."""
        self.error: Exception | None = None
        """The error that ended the connection."""
        self._size = 0
        self._transport: asyncio.Transport | None = None
        self._reads = True
        self._reader: asyncio.Future[None] | None = None
        self._writable = anyio.Event()
        self._writable.set()

    async def wait_readable(self) -> None:
        """Wait until there are bytes to read, or the end."""
        while not self.parts and not self.ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> bytes:
        """Return all bytes that have arrived; empty at the end."""
        found = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self._size = 0
        if not self._reads and self._transport is not None:
            self._reads = True
            self._transport.resume_reading()
        return found

    async def written(self) -> None:
        """Wait while the write buffer is full."""
        if not self._writable.is_set():
            await self._writable.wait()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ---- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # of a TCP socket
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self._size += len(data)
        if self._size > READ and self._reads and self._transport is not None:
            self._reads = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self.ended = True
        self._wake()
        return True  # the other side may still read

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self.error, self._transport = True, exc, None
        self._writable.set()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = anyio.Event()

    def resume_writing(self) -> None:
        self._writable.set()


class TcpStream:
    """A TCP connection with keepalive probes."""

    def __init__(self, transport: asyncio.Transport, received: ReceiveBuffer, keep_alive: float) -> None:
        self._transport = transport
        self._received = received
        self._socket: socket.socket = transport.get_extra_info("socket")
        if keep_alive >= 1:
            seconds = int(keep_alive)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED_PROBES)

    @classmethod
    async def connect(cls, host: str, port: int, keep_alive: float) -> TcpStream:
        """Connect to an address or a name; of several addresses the first that answers. Raises OSError."""
        stream = await anyio.connect_tcp(host, port)
        with ExitStack() as on_failure:
            try:
                connected = stream.extra(SocketAttribute.raw_socket).dup()  # noqa: S610  # of anyio
                on_failure.callback(connected.close)  # also if the next step is cancelled
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()  # the duplicate descriptor keeps the connection open
            loop = asyncio.get_running_loop()
            transport, received = await loop.create_connection(ReceiveBuffer, sock=connected)
            on_failure.pop_all()
        return cls(transport, received, keep_alive)

    @property
    def readable(self) -> bool:
        """See Stream."""
        if self._received.parts or self._received.ended:
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def receive(self) -> bytes:
        """See Stream."""
        await self._received.wait_readable()
        if not self._received.parts:
            self._check()
        return self._received.take()

    async def send(self, data: bytes) -> None:
        """See Stream."""
        self._check()
        self._transport.write(data)
        await self._received.written()
        self._check()

    async def aclose(self) -> None:
        """See Stream."""
        self._transport.abort()
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()  # the event loop then closes the socket

    def _check(self) -> None:
        if self._received.error is not None:
            raise anyio.BrokenResourceError from self._received.error
        if self._transport.is_closing():
            raise anyio.ClosedResourceError


# Tunnels through a proxy: HTTP CONNECT, or SOCKS.
#
# Source: RFC 9110, 9.3.6 (CONNECT); RFC 1928 and 1929 (SOCKS 5); client-go's proxy-url.

_PROXY_PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
REFUSALS: Final = {
    1: "general failure",
    2: "not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "time to live expired",
    7: "command not supported",
    8: "kind of address not supported",
}


class Proxy(NamedTuple):
    """A proxy's address, and the credentials for it."""

    scheme: str
    host: str
    port: int
    user: str
    password: str

    @property
    def authorization(self) -> bytes:
        """The authorization header for an HTTP proxy; empty without credentials."""
        if not self.user:
            return b""
        pair = base64.b64encode(f"{self.user}:{self.password}".encode())
        return b"Proxy-Authorization: Basic " + pair + b"\r\n"

    def forwards(self, scheme: str) -> bool:
        """Whether the proxy forwards plain requests to servers of this scheme, without a tunnel."""
        return scheme == "http" and not self.scheme.startswith("socks5")


def proxy_of(url: str) -> Proxy:
    """Parse a URL that was validated before."""
    parts = urlsplit(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return Proxy(parts.scheme, parts.hostname or "", parts.port or _PROXY_PORTS[parts.scheme], user, password)


async def tunnel(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """Connect a stream through the proxy to a server. Raises UnreachableError."""
    if proxy.scheme.startswith("socks5"):
        await _socks(stream, proxy, host, port)
    else:
        await _connect(stream, proxy, host, port)


async def _connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    line = f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n".encode()
    await stream.send(line + proxy.authorization + b"\r\n")
    answer = IncomingResponse()
    while not answer.started:
        answer.feed(await stream.receive())
    answer.release()
    if not 200 <= answer.status < 300:
        raise UnreachableError(f"proxy {proxy.host}:{proxy.port} answers {answer.status} to CONNECT {name}")
    if answer.parts:
        raise UnreachableError(f"proxy {proxy.host}:{proxy.port} sent more than it was asked for")


async def _socks(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    reader = _Reader(stream, f"proxy {proxy.host}:{proxy.port}")
    method = 2 if proxy.user else 0  # of RFC 1928: a name and a password, or nothing
    await stream.send(bytes((5, 1, method)))
    version, chosen = await reader.take(2)
    if (version, chosen) != (5, method):
        raise UnreachableError(f"{reader.name} rejects the credentials, or is not a SOCKS 5 proxy")
    if method:
        user, password = proxy.user.encode()[:255], proxy.password.encode()[:255]
        await stream.send(bytes((1, len(user))) + user + bytes((len(password),)) + password)
        if (await reader.take(2))[1]:
            raise UnreachableError(f"{reader.name} refuses {proxy.user}")
    await stream.send(bytes((5, 1, 0)) + _socks_address(host) + port.to_bytes(2))
    _, refused, _, kind = await reader.take(4)
    if refused:
        why = REFUSALS.get(refused, f"code {refused}")
        raise UnreachableError(f"{reader.name} does not reach {host}:{port}: {why}")
    sizes = {1: 4, 4: 16}
    length = sizes[kind] if kind in sizes else (await reader.take(1))[0]
    await reader.take(length + 2)  # the address that the proxy connects from
    reader.finished()


def _socks_address(host: str) -> bytes:
    """Return type and address, or a name that the proxy resolves (RFC 1928, 5)."""
    try:
        ip = ip_address(host)
    except ValueError:
        name = host.encode("idna")
        return bytes((3, len(name))) + name
    return bytes((1 if ip.version == 4 else 4,)) + ip.packed


class _Reader:
    """Reads an exact number of bytes."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._buffer = b""
        self.name = name

    async def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            part = await self._stream.receive()
            if not part:
                raise UnreachableError(f"{self.name} closed the connection")
            self._buffer += part
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def finished(self) -> None:
        if self._buffer:
            raise UnreachableError(f"{self.name} sent more than it was asked for")


PORTS: Final = {"http": 80, "https": 443}


class Dialler:
    """Opens connections to servers, with a timeout."""

    def __init__(
        self,
        *,
        context: ssl.SSLContext | None,
        server_name: str = "",
        proxies: Mapping[str, Proxy],
        within: float,
        keep_alive: float,
    ) -> None:
        """``context``: for https. ``proxies``: by server. ``within``: timeout in seconds.

        ``keep_alive``: seconds between two keepalive probes.
        """
        self._context = context
        self._server_name = server_name
        self._proxies = proxies
        self._within = within
        self._keep_alive = keep_alive

    def head(self, server: str) -> tuple[bytes, bytes]:
        """Return the prefix of request targets, and the header lines of every request."""
        parts = urlsplit(server)
        lines = b"Host: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        proxy = self._proxies.get(server)
        if proxy is not None and proxy.forwards(parts.scheme):
            return server.encode(), lines + proxy.authorization
        return parts.path.encode(), lines

    async def dial(self, server: str) -> HttpConnection:
        """Open an HTTP connection to a server's URL. Raises UnreachableError."""
        return HttpConnection(server, await self.stream(server))

    async def stream(self, server: str) -> Stream:
        """Open a stream of bytes to a server's URL. Raises UnreachableError."""
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        try:
            with anyio.fail_after(self._within):
                return await self._stream(self._proxies.get(server), parts.scheme, host, port)
        except TimeoutError as error:
            raise UnreachableError(f"{host}:{port}: no connection within {self._within:g} s") from error
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise UnreachableError(f"{host}:{port}: {_reason(error)}") from error

    async def _stream(self, proxy: Proxy | None, scheme: str, host: str, port: int) -> Stream:
        stream = await self._to_proxy(proxy) if proxy else await self._tcp(host, port)
        try:
            if proxy is not None and proxy.scheme == "https":
                stream = await _secured(stream, ssl.create_default_context(), proxy.host)
            if proxy is not None and not proxy.forwards(scheme):
                await tunnel(stream, proxy, host, port)
            if scheme == "https":
                assert self._context is not None  # noqa: S101  # created if any server has https
                stream = await _secured(stream, self._context, self._server_name or host)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def _to_proxy(self, proxy: Proxy) -> Stream:
        try:
            return await self._tcp(proxy.host, proxy.port)
        except OSError as error:
            raise UnreachableError(f"proxy {proxy.host}:{proxy.port}: {_reason(error)}") from error

    async def _tcp(self, host: str, port: int) -> Stream:
        return await TcpStream.connect(host, port, self._keep_alive)


async def _secured(stream: Stream, context: ssl.SSLContext, name: str) -> Stream:
    secured = TlsStream(stream, context, name)
    await secured.handshake()
    return secured


def _reason(error: BaseException) -> str:
    """Return the system's error text; of several attempted addresses, the first one's."""
    if isinstance(error, BaseExceptionGroup):
        return _reason(error.exceptions[0])
    if isinstance(error.__cause__, OSError | BaseExceptionGroup):
        return _reason(error.__cause__)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
    return reason or "the connection broke off"


# Connections that stay open for the next request.


class ConnectionPool:
    """Limits concurrent requests, and reuses the most recently used connection first."""

    def __init__(self, dialler: Dialler, *, most: int, within: float, keep_alive: float) -> None:
        """``within``: seconds to wait for a free slot. ``keep_alive``: seconds a connection may be idle."""
        self.dialler = dialler
        self._most = most
        self._within = within
        self._keep_alive = keep_alive
        self._slots = anyio.Semaphore(most)
        self._idle: dict[str, deque[HttpConnection]] = defaultdict(deque)
        self._in_use: set[HttpConnection] = set()
        self._closed = False

    async def acquire(self, server: str) -> HttpConnection:
        """Return a connection to the server; the caller returns it by release(). Raises UnreachableError."""
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            await self._wait_for_slot()
        try:
            await self._close_old()
            idle, found = self._idle[server], None
            while idle and found is None:
                found = idle.pop()
                if found.stale:
                    await found.aclose()
                    found = None
            found = found or await self.dialler.dial(server)
        except BaseException:
            self._slots.release()
            raise
        self._in_use.add(found)
        return found

    async def release(self, connection: HttpConnection) -> None:
        """Return a connection to the pool, or close it if it cannot be reused."""
        self._in_use.discard(connection)
        connection.release()
        self._slots.release()
        if connection.reusable and not self._closed:
            connection.idle_since = time.monotonic()
            self._idle[connection.server].append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        """Abort all connections, including those in use."""
        self._closed = True
        idle = [one for each in self._idle.values() for one in each]
        self._idle.clear()
        for one in (*idle, *self._in_use):
            await one.aclose()

    async def _wait_for_slot(self) -> None:
        try:
            with anyio.fail_after(self._within):
                await self._slots.acquire()
        except TimeoutError as error:
            raise UnreachableError(
                f"{self._most} requests are under way, and none ended within {self._within:g} s"
            ) from error

    async def _close_old(self) -> None:
        since = time.monotonic() - self._keep_alive
        old = []
        for idle in self._idle.values():
            while idle and idle[0].idle_since < since:
                old.append(idle.popleft())
        for one in old:  # other tasks may change the pool meanwhile
            await one.aclose()
