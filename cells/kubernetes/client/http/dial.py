"""Connections to servers: TCP, a proxy if there is one, TLS if the URL says so.

Needs: anyio.   Gives: Dialler.
"""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

import anyio

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http.connection import Connection
from cells.kubernetes.client.http.proxies import Proxy, proxy_of, tunnel
from cells.kubernetes.client.http.streams import Stream, TcpStream, TlsStream

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

    async def dial(self, server: str) -> Connection:
        """To the server of a URL. Raises UnreachableError."""
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        try:
            with anyio.fail_after(self._within):
                return Connection(server, await self._stream(parts.scheme, host, port))
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
        return TcpStream(await anyio.connect_tcp(host, port), self._keep_alive)


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
    told = error.strerror if isinstance(error, socket.gaierror) else str(error)
    return told or "the connection broke off"
