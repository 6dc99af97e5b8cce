"""Connections to servers: TCP, a proxy if there is one, TLS for https."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import time
from collections import defaultdict, deque
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import anyio

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http import HttpConnection, Incoming, Stream, TcpStream, TlsStream

__all__ = ["ConnectionPool", "Dialler"]


# Ways through a proxy to a server: a tunnel of HTTP, or SOCKS.
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
    """Its address, and our credentials."""

    scheme: str
    host: str
    port: int
    user: str
    password: str

    @property
    def authorization(self) -> bytes:
        """The authorization header for an HTTP proxy, if it needs one."""
        if not self.user:
            return b""
        pair = base64.b64encode(f"{self.user}:{self.password}".encode())
        return b"Proxy-Authorization: Basic " + pair + b"\r\n"


def proxy_of(url: str) -> Proxy:
    """Of a URL that was checked."""
    parts = urlsplit(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return Proxy(parts.scheme, parts.hostname or "", parts.port or _PROXY_PORTS[parts.scheme], user, password)


async def tunnel(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """What follows on the stream is between us and this server. Raises UnreachableError."""
    if proxy.scheme.startswith("socks5"):
        await _socks(stream, proxy, host, port)
    else:
        await _connect(stream, proxy, host, port)


async def _connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    line = f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n".encode()
    await stream.send(line + proxy.authorization + b"\r\n")
    answer = Incoming()
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
    name = host.encode("idna")
    await stream.send(bytes((5, 1, 0, 3, len(name))) + name + port.to_bytes(2))
    _, refused, _, kind = await reader.take(4)
    if refused:
        why = REFUSALS.get(refused, f"code {refused}")
        raise UnreachableError(f"{reader.name} does not reach {host}:{port}: {why}")
    sizes = {1: 4, 4: 16}
    length = sizes[kind] if kind in sizes else (await reader.take(1))[0]
    await reader.take(length + 2)  # the address the proxy speaks from
    reader.finished()


class _Reader:
    """So many bytes of what comes."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._held = b""
        self.name = name

    async def take(self, size: int) -> bytes:
        while len(self._held) < size:
            part = await self._stream.receive()
            if not part:
                raise UnreachableError(f"{self.name} closed the connection")
            self._held += part
        found, self._held = self._held[:size], self._held[size:]
        return found

    def finished(self) -> None:
        if self._held:
            raise UnreachableError(f"{self.name} sent more than it was asked for")


PORTS: Final = {"http": 80, "https": 443}


class Dialler:
    """Makes connections, each within a time."""

    def __init__(
        self,
        *,
        context: ssl.SSLContext | None,
        server_name: str = "",
        proxy_url: str = "",
        within: float,
        keep_alive: float,
    ) -> None:
        """``context``: for https. ``within``: seconds. ``keep_alive``: seconds between two probes of TCP."""
        self._context = context
        self._server_name = server_name
        self._proxy: Proxy | None = proxy_of(proxy_url) if proxy_url else None
        self._within = within
        self._keep_alive = keep_alive

    def head(self, server: str) -> tuple[bytes, bytes]:
        """What comes before the path in a request's target, and header lines that every request has."""
        parts = urlsplit(server)
        lines = b"Host: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        if self._proxy is not None and self._forwards(parts.scheme):
            return server.encode(), lines + self._proxy.authorization
        return parts.path.encode(), lines

    async def dial(self, server: str) -> HttpConnection:
        """To the server of a URL. Raises UnreachableError."""
        return HttpConnection(server, await self.stream(server))

    async def stream(self, server: str) -> Stream:
        """Bytes to the server of a URL, and back. Raises UnreachableError."""
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        try:
            with anyio.fail_after(self._within):
                return await self._stream(parts.scheme, host, port)
        except TimeoutError as error:
            raise UnreachableError(f"{host}:{port}: no connection within {self._within:g} s") from error
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise UnreachableError(f"{host}:{port}: {_reason(error)}") from error

    async def _stream(self, scheme: str, host: str, port: int) -> Stream:
        proxy = self._proxy
        stream = await self._to_proxy(proxy) if proxy else await self._tcp(host, port)
        try:
            if proxy is not None and proxy.scheme == "https":
                stream = await _secured(stream, ssl.create_default_context(), proxy.host)
            if proxy is not None and not self._forwards(scheme):
                await tunnel(stream, proxy, host, port)
            if scheme == "https":
                assert self._context is not None  # noqa: S101  # there is one where a server has https
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

    def _forwards(self, scheme: str) -> bool:
        """Whether requests go to the proxy itself, which sends them on."""
        return scheme == "http" and self._proxy is not None and not self._proxy.scheme.startswith("socks5")

    async def _tcp(self, host: str, port: int) -> Stream:
        return await TcpStream.connect(host, port, self._keep_alive)


async def _secured(stream: Stream, context: ssl.SSLContext, name: str) -> Stream:
    secured = TlsStream(stream, context, name)
    await secured.handshake()
    return secured


def _reason(error: BaseException) -> str:
    """Why, in the words of the system: of several addresses tried, those of the first."""
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
    """So many requests at once; the connection used last is used again first."""

    def __init__(self, dialler: Dialler, *, most: int, within: float, keep_alive: float) -> None:
        """``within``: seconds to wait for a turn. ``keep_alive``: seconds a connection may be idle."""
        self.dialler = dialler
        self._most = most
        self._within = within
        self._keep_alive = keep_alive
        self._turns = anyio.Semaphore(most)
        self._idle: dict[str, deque[HttpConnection]] = defaultdict(deque)
        self._used: set[HttpConnection] = set()
        self._closed = False

    async def take(self, server: str) -> HttpConnection:
        """A connection to the server, until it is given back. Raises UnreachableError."""
        try:
            self._turns.acquire_nowait()
        except anyio.WouldBlock:
            await self._turn()
        try:
            await self._forget_old()
            idle, found = self._idle[server], None
            while idle and found is None:
                found = idle.pop()
                if found.stale:
                    await found.aclose()
                    found = None
            found = found or await self.dialler.dial(server)
        except BaseException:
            self._turns.release()
            raise
        self._used.add(found)
        return found

    async def give(self, connection: HttpConnection) -> None:
        """It is not used any more."""
        self._used.discard(connection)
        connection.answer.release()
        self._turns.release()
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
        for one in (*idle, *self._used):
            await one.aclose()

    async def _turn(self) -> None:
        try:
            with anyio.fail_after(self._within):
                await self._turns.acquire()
        except TimeoutError as error:
            raise UnreachableError(
                f"{self._most} requests are under way, and none ended within {self._within:g} s"
            ) from error

    async def _forget_old(self) -> None:
        since = time.monotonic() - self._keep_alive
        old = []
        for idle in self._idle.values():
            while idle and idle[0].idle_since < since:
                old.append(idle.popleft())
        for one in old:  # meanwhile others may come and go
            await one.aclose()
