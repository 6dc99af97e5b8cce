"""Ways through a proxy to a server: a tunnel of HTTP, or SOCKS.

Needs: a Stream to the proxy.   Gives: Proxy, proxy_of, tunnel.
Source: RFC 9110, 9.3.6 (CONNECT); RFC 1928 and 1929 (SOCKS 5); client-go's proxy-url.
"""

from __future__ import annotations

import base64
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http.answer import Incoming
from cells.kubernetes.client.http.streams import Stream

PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
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
    return Proxy(parts.scheme, parts.hostname or "", parts.port or PORTS[parts.scheme], user, password)


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
    while not answer.begun:
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
