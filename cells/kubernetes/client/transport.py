"""HTTP to one of several API servers: connections kept, the next server tried when one does not answer.

Needs: Access, Credentials.   Gives: Transport, Answer.

httpcore is imported when the first request is made: an agent without Kubernetes does not pay for it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from cells.kubernetes.client.access import Access
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.reach import Reach

if TYPE_CHECKING:
    import httpcore

Headers = list[tuple[bytes, bytes]]
MAX_CONNECTIONS: Final = 64
"""Watches take one each."""


class Answer:
    """An answer whose head is there; the body comes in parts."""

    def __init__(self, response: httpcore.Response) -> None:
        self._response = response
        self.status: int = response.status

    def header(self, name: bytes) -> str:
        """The first header of this name, in lower case, or nothing."""
        for key, value in self._response.headers:
            if key.lower() == name:
                return value.decode("latin-1")
        return ""

    def warnings(self) -> list[str]:
        """What the server wants to be told of."""
        return [value.decode("latin-1") for key, value in self._response.headers if key.lower() == b"warning"]

    async def body(self) -> bytes:
        """All of it. Raises UnreachableError."""
        with _translated():
            return await self._response.aread()

    async def parts(self) -> AsyncIterator[bytes]:
        """As it comes. Raises UnreachableError when it breaks off."""
        stream = self._response.aiter_stream()
        async with aclosing(stream):  # type: ignore[type-var]  # it is an async generator
            while True:
                with _translated():
                    try:
                        part = await anext(stream)
                    except StopAsyncIteration:
                        return
                yield part


class _translated:  # noqa: N801  # reads as a statement
    """Turns what the library raises into UnreachableError."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        import httpcore

        known = (
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            httpcore.ProxyError,
            httpcore.UnsupportedProtocol,
            ssl.SSLError,
            OSError,
        )
        if isinstance(error, known):
            raise UnreachableError(
                f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            ) from error


class Transport:
    """Sends requests to the server that answered last."""

    def __init__(
        self, access: Access, credentials: Credentials, *, connect: float, keep_alive: float
    ) -> None:
        self._access = access
        self._credentials = credentials
        self._connect = connect
        self._keep_alive = keep_alive
        self._pool: Any = None
        self._stamps: tuple[object, ...] = ()
        self._current = 0
        self.reach = Reach()

    @property
    def server(self) -> str:
        """The server in use."""
        return self._access.servers[self._current]

    def failed(self, server: str) -> None:
        """This server did not answer: the next one is in use, unless somebody else has changed it already."""
        self.reach.lost()
        if server == self.server:
            self._current = (self._current + 1) % len(self._access.servers)

    @asynccontextmanager
    async def send(
        self, method: str, target: str, headers: Headers, body: bytes | None, *, quiet: float | None
    ) -> AsyncIterator[Answer]:
        """One request, and the head of its answer, whose parts may be ``quiet`` seconds apart.

        Raises UnreachableError, CredentialsError.
        """
        import httpcore

        pool = await self._connections()
        server = self.server
        limits = {"connect": self._connect, "read": quiet, "write": self._connect, "pool": self._connect}
        extensions: dict[str, Any] = {"timeout": limits}
        if self._access.tls_server_name:
            extensions["sni_hostname"] = self._access.tls_server_name
        request = httpcore.Request(
            method,
            server + target,
            headers=[(b"Host", _host(server)), *headers],
            content=body,
            extensions=extensions,
        )
        try:
            with _translated():
                response = await pool.handle_async_request(request)
        except UnreachableError:
            self.failed(server)
            raise
        try:
            yield Answer(response)
        finally:
            await response.aclose()

    async def reset(self) -> None:
        """Break every connection: watches end, and what follows goes over new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def _connections(self) -> Any:
        stamps = self._credentials.stamps()
        if self._pool is not None and stamps == self._stamps:
            return self._pool
        import httpcore

        context = await self._credentials.context() if self._secure else None
        stamps = self._credentials.stamps()
        if self._pool is not None and stamps == self._stamps:  # somebody else was faster
            return self._pool
        proxy = httpcore.Proxy(self._access.proxy_url) if self._access.proxy_url else None
        self._stamps = stamps
        old, self._pool = (
            self._pool,
            httpcore.AsyncConnectionPool(
                ssl_context=context,
                proxy=proxy,
                max_connections=MAX_CONNECTIONS,
                keepalive_expiry=self._keep_alive,
            ),
        )
        if old is not None:
            await old.aclose()
        return self._pool

    @property
    def _secure(self) -> bool:
        return any(one.startswith("https") for one in self._access.servers)


def _host(server: str) -> bytes:
    return server.split("://", 1)[1].split("/", 1)[0].encode()
