"""HTTP to one of several API servers: reuses connections; the next server replaces one without answers.

The HTTP client is imported with the first request, so an agent without Kubernetes does not load it.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from cells.kubernetes.client.access import Access
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.errors import CredentialsError, DroppedError, UnreachableError

if TYPE_CHECKING:
    from cells.kubernetes.client.dial import ConnectionPool
    from cells.kubernetes.client.http import FullResponse, HttpConnection, Stream

__all__ = ["Transport", "WriteRequest"]


# Whether an API server answers; shared by all tasks that wait for one.
#
# Why: if each task backed off by itself, some would still wait long after a server is back.

SPREAD: Final = 0.2
"""Seconds over which waiting tasks resume, so that they do not all send at once."""
FIRST_PROBE, LONGEST_PROBE = 0.1, 3.0
"""Seconds between two probes for a server: they grow from the first to the longest."""


class Reachability:
    """Whether an API server answers; wakes the tasks that wait for one."""

    def __init__(self) -> None:
        self._recovered: anyio.Event | None = None
        """Set when a server answers again; None while servers answer."""
        self._lost = anyio.Event()

    @property
    def unreachable(self) -> bool:
        """Whether the last request got no answer."""
        return self._recovered is not None

    def record_failure(self) -> None:
        """Record that a request got no answer."""
        if self._recovered is None:
            self._recovered = anyio.Event()
            self._lost.set()

    def record_answer(self) -> None:
        """Record an answer, and wake waiting tasks."""
        if self._recovered is not None:
            self._recovered.set()
            self._recovered = None
            self._lost = anyio.Event()

    async def wait_lost(self) -> None:
        """Wait until a request gets no answer; return at once while no server answers."""
        await self._lost.wait()

    async def pause(self, seconds: float = math.inf) -> None:
        """Sleep for so many seconds; while no server answers, at most until one does."""
        if self._recovered is None:
            if seconds < math.inf:
                await anyio.sleep(seconds)
            return
        with anyio.move_on_after(seconds):
            await self._recovered.wait()
            await anyio.sleep(SPREAD * random.random())  # noqa: S311  # spreads load

    async def probe(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Run forever: probe while no server answers.

        ``ask`` calls record_failure() or record_answer(), and never raises.
        """
        while True:
            await self.wait_lost()
            pause = FIRST_PROBE
            while self.unreachable:
                await anyio.sleep(pause * (0.5 + random.random()))  # noqa: S311
                await ask()
                pause = min(LONGEST_PROBE, 2 * pause)


Headers = list[tuple[bytes, bytes]]
MAX_CONNECTIONS: Final = 64
"""Each watch uses one."""


class StreamedResponse:
    """An answer after its head was read; the body is read in parts."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.server = connection.server
        self.status: int = connection.answer.status

    def header(self, name: bytes) -> str:
        """Return the first header of this lower-case name, or an empty text."""
        return (self._connection.answer.header(name) or b"").decode("latin-1")

    async def body(self) -> bytes:
        """Read the whole body. Raises UnreachableError."""
        return await self._connection.rest()

    async def part(self) -> bytes:
        """Read what has arrived of the body; empty at its end.

        Raises UnreachableError if it is incomplete.
        """
        return await self._connection.part()


class WriteRequest(NamedTuple):
    """A request with a body."""

    method: str
    target: str
    body: bytes
    media: bytes

    def message(self, before: bytes, after: bytes) -> bytes:
        """Return the bytes to send; ``before`` and ``after`` surround the target, up to the media type."""
        head = b"%b %b%b%b%b\r\n" % (self.method.encode(), before, self.target.encode(), after, self.media)
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(self.body), self.body)


class Transport:
    """Sends requests to the server that answered last."""

    def __init__(
        self, access: Access, credentials: Credentials, *, connect: float, keep_alive: float
    ) -> None:
        self._access = access
        self._credentials = credentials
        self._connect = connect
        self._keep_alive = keep_alive
        self._pool: ConnectionPool | None = None
        self._stamps: tuple[object, ...] = ()
        self._current = 0
        self.reachability = Reachability()

    @property
    def server(self) -> str:
        """The current server."""
        return self._access.servers[self._current]

    def failed(self, server: str) -> None:
        """The server did not answer: switch to the next one, unless another request has already switched."""
        self.reachability.record_failure()
        if server == self.server:
            self._current = (self._current + 1) % len(self._access.servers)

    @asynccontextmanager
    async def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        head: float | None,
        quiet: float | None,
        repeatable: bool,
    ) -> AsyncIterator[StreamedResponse]:
        """Send a request; its head must arrive within ``head`` seconds, each part within ``quiet`` seconds.

        A ``repeatable`` request is sent again if the server closed an idle connection at that moment. Raises
        UnreachableError, CredentialsError.
        """
        pool = await self._connections()
        server = self.server
        message = _message(method, target, headers, body, *pool.dialler.head(server))
        try:
            connection = await self._request(pool, server, message, head, quiet, repeatable=repeatable)
        except UnreachableError:
            self.failed(server)
            raise
        try:
            yield StreamedResponse(connection)
        finally:
            await pool.release(connection)

    async def _request(
        self,
        pool: ConnectionPool,
        server: str,
        message: bytes,
        head: float | None,
        quiet: float | None,
        *,
        repeatable: bool,
    ) -> HttpConnection:
        """Return a connection with the head of the answer; the caller returns it. Raises UnreachableError."""
        while True:
            connection = await pool.acquire(server)
            reused = bool(connection.idle_since)
            try:
                await connection.send_request(message, within=self._connect, head=head, quiet=quiet)
            except DroppedError:
                await pool.release(connection)
                if not (reused and repeatable):
                    raise
            except BaseException:
                await pool.release(connection)
                raise
            else:
                return connection

    async def send_all(
        self, requests: Sequence[WriteRequest], headers: Headers, *, quiet: float | None
    ) -> Sequence[FullResponse]:
        """Pipeline requests on one connection and return their answers; see HttpConnection.ask_all().

        Raises UnreachableError, CredentialsError.
        """
        pool = await self._connections()
        server = self.server
        before, lines = pool.dialler.head(server)
        after = b" HTTP/1.1\r\n" + lines + _lines(headers) + b"Content-Type: "
        messages = b"".join([one.message(before, after) for one in requests])
        try:
            connection = await pool.acquire(server)
            try:
                return await connection.ask_all(messages, len(requests), within=self._connect, quiet=quiet)
            finally:
                await pool.release(connection)
        except UnreachableError:
            self.failed(server)
            raise

    async def stream(self) -> tuple[Stream, str]:
        """Open a separate connection to the current server; also return the prefix of request targets.

        The caller closes the connection. Raises UnreachableError, CredentialsError.
        """
        pool = await self._connections()
        server = self.server
        before, _ = pool.dialler.head(server)
        return await pool.dialler.stream(server), before.decode()

    async def reset(self) -> None:
        """Close every connection: watches end, and later requests use new connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def _connections(self) -> ConnectionPool:
        stamps = self._credentials.stamps()
        if self._pool is not None and stamps == self._stamps:
            return self._pool
        from cells.kubernetes.client.dial import ConnectionPool, Dialler, proxy_of

        context = await self._credentials.context() if self._secure else None
        stamps = self._credentials.stamps()
        if self._pool is not None and stamps == self._stamps:  # another task was faster
            return self._pool
        self._stamps = stamps
        dialler = Dialler(
            context=context,
            server_name=self._access.tls_server_name,
            proxies={
                server: proxy_of(url)
                for server in self._access.servers
                if (url := self._access.proxy_for(server))
            },
            within=self._connect,
            keep_alive=self._keep_alive,
        )
        created = ConnectionPool(
            dialler, most=MAX_CONNECTIONS, within=self._connect, keep_alive=self._keep_alive
        )
        old, self._pool = self._pool, created
        if old is not None:
            await old.aclose()
        return created

    @property
    def _secure(self) -> bool:
        return any(one.startswith("https") for one in self._access.servers)


def _message(
    method: str, target: str, headers: Headers, body: bytes | None, before: bytes, lines: bytes
) -> bytes:
    """Return a request as bytes. Raises CredentialsError for a header with a line break."""
    head = method.encode(), b" ", before, target.encode(), b" HTTP/1.1\r\n", lines
    return b"".join((*head, _lines(headers), b"\r\n", body or b""))


def _lines(headers: Headers) -> bytes:
    """Return header lines as bytes. Raises CredentialsError for a header with a line break."""
    parts: list[bytes] = []
    for name, value in headers:
        line = b"%b: %b" % (name, value)
        if b"\n" in line or b"\r" in line or b"\0" in line:
            raise CredentialsError(f"{name.decode(errors='replace')!r}: a header with a line break")
        parts += (line, b"\r\n")
    return b"".join(parts)
