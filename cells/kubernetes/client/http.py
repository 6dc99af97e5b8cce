"""HTTP/1.1 as a client: connections that are reused, read by llhttp, over TCP, TLS and proxies.

Why: an event of a watch is a chunk of its own: framing them in Python costs more than decoding them.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from contextlib import ExitStack
from typing import Final, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import SocketAttribute
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from cells.kubernetes.client.errors import UnreachableError

__all__ = ["HttpConnection"]


# What has come of an answer, as llhttp understands it.
#
# Source: RFC 9112 (HTTP/1.1).

MOST_HEAD: Final = 100 * 1024
"""Bytes of a head, or of anything else between two parts of a body."""


class HeadTooLongError(Exception):
    """A head of more bytes than any server sends."""


class Incoming:
    """One answer as it comes in: its head, then parts of its body, which the reader takes away."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.started = False
        """Whether the head is there."""
        self.complete = False
        self.keep_alive = False
        """Whether the connection may be used again after it."""
        self._size = 0
        self._since = 0
        self.on_body = self.parts.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """These bytes came; none at the end of the stream. Raises UnreachableError."""
        if self._parser is None or not data:
            return self._end()
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if isinstance(error.__context__, HeadTooLongError):
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes") from error
            if not self.complete:
                raise UnreachableError(f"an answer that is not HTTP/1.1: {error}") from error
            self.keep_alive = False  # more came than was asked for
        if self.parts or self.complete:
            self._since = 0
        else:
            self._since += len(data)
            if self._since > MOST_HEAD:
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes")
        return None

    def header(self, name: bytes) -> bytes | None:
        """The first of this name, in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def release(self) -> None:
        """Nothing more is read: parser and answer no longer hold each other."""
        self._parser = None

    def _end(self) -> None:
        framed = self.header(b"content-length") or self.header(b"transfer-encoding")
        if self.complete:
            self.keep_alive = False
        elif self.started and not framed:
            self.complete = True  # the body lasts until the connection ends (RFC 9112, 6.3)
        else:
            where = "in the middle of" if self.started else "without"
            raise UnreachableError(f"the server closed the connection {where} an answer")

    # ---- called by llhttp; what is raised here ends in feed()

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpParserError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MOST_HEAD:
            raise HeadTooLongError
        if not self.started:  # what follows the body is not asked for
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  # it is what calls
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.started = True
            self.keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.started:
            self.complete = True
        else:  # an interim one: the answer is yet to come
            self.headers.clear()


# Bytes to a server and back: over TCP, or TLS on top of that.
#
# Why: anyio's stream of TLS gives one record at a time; a server that sends an event sends a record.

READ: Final = 256 * 1024
"""Bytes that are read at once."""


class Stream(Protocol):
    """Both directions of a connection."""

    @property
    def readable(self) -> bool:
        """Whether unexpected data has arrived, most likely the end of the stream."""

    async def receive(self) -> bytes:
        """What has come; nothing at the end. Raises anyio's BrokenResourceError, ssl.SSLError."""

    async def send(self, data: bytes) -> None:
        """Write all of it. Raises anyio's BrokenResourceError."""

    async def aclose(self) -> None:
        """At once, without a word to the other side."""


UNANSWERED_PROBES: Final = 3
"""So many probes without an answer end a silent connection."""


class Arrivals(asyncio.Protocol):
    """What has come over a connection and is not taken yet.

    Why: a stream of anyio reads only while a task waits, which is two calls of the kernel for every event of
    a watch, and gives way to all other tasks after each write.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.ended = False
        """Whether nothing more comes."""
        self.error: Exception | None = None
        """What broke the connection off."""
        self._size = 0
        self._transport: asyncio.Transport | None = None
        self._reads = True
        self._reader: asyncio.Future[None] | None = None
        self._writable = anyio.Event()
        self._writable.set()

    async def came(self) -> None:
        """Wait until there is something to take, or the end."""
        while not self.parts and not self.ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> bytes:
        """All of it; nothing at the end."""
        found = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self._size = 0
        if not self._reads and self._transport is not None:
            self._reads = True
            self._transport.resume_reading()
        return found

    async def written(self) -> None:
        """Wait while the kernel takes no more."""
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
        if self._size >= READ and self._reads and self._transport is not None:
            self._reads = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self.ended = True
        self._wake()
        return True  # what is written may still arrive

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self.error, self._transport = True, exc, None
        self._writable.set()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = anyio.Event()

    def resume_writing(self) -> None:
        self._writable.set()


class TcpStream:
    """A connection of TCP, watched by the kernel while it is silent."""

    def __init__(self, transport: asyncio.Transport, arrivals: Arrivals, keep_alive: float) -> None:
        self._transport = transport
        self._arrivals = arrivals
        self._socket: socket.socket = transport.get_extra_info("socket")
        if keep_alive >= 1:
            seconds = int(keep_alive)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED_PROBES)

    @classmethod
    async def connect(cls, host: str, port: int, keep_alive: float) -> TcpStream:
        """To an address or a name, of several addresses the one that answers first. Raises OSError."""
        stream = await anyio.connect_tcp(host, port)
        with ExitStack() as unless_it_is_watched:
            try:
                connected = stream.extra(SocketAttribute.raw_socket).dup()  # noqa: S610  # of anyio
                unless_it_is_watched.callback(connected.close)  # also if the next step is cancelled
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()  # the connection lives on in the other descriptor
            loop = asyncio.get_running_loop()
            transport, arrivals = await loop.create_connection(Arrivals, sock=connected)
            unless_it_is_watched.pop_all()
        return cls(transport, arrivals, keep_alive)

    @property
    def readable(self) -> bool:
        """See Stream."""
        if self._arrivals.parts or self._arrivals.ended:
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def receive(self) -> bytes:
        """See Stream."""
        await self._arrivals.came()
        if not self._arrivals.parts:
            self._check()
        return self._arrivals.take()

    async def send(self, data: bytes) -> None:
        """See Stream."""
        self._check()
        self._transport.write(data)
        await self._arrivals.written()
        self._check()

    async def aclose(self) -> None:
        """See Stream."""
        self._transport.abort()
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()  # the loop closes the socket in its next turn

    def _check(self) -> None:
        if self._arrivals.error is not None:
            raise anyio.BrokenResourceError from self._arrivals.error
        if self._transport.is_closing():
            raise anyio.ClosedResourceError


class TlsStream:
    """TLS over another stream; everything that has come is given at once."""

    def __init__(self, below: Stream, context: ssl.SSLContext, name: str) -> None:
        self._below = below
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=name)

    @property
    def readable(self) -> bool:
        """See Stream."""
        return bool(self._in.pending) or self._below.readable

    async def handshake(self) -> None:
        """Raises ssl.SSLError, and what the stream below raises."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()  # sends the alert with the reason
                raise
            else:
                return await self._flush()

    async def receive(self) -> bytes:
        """See Stream."""
        while True:
            found: list[bytes] = []
            try:
                while part := self._tls.read(READ):
                    found.append(part)
            except ssl.SSLWantReadError:
                if not found:
                    await self._flush()
                    await self._fill()
                    continue
            except ssl.SSLZeroReturnError:
                pass
            return found[0] if len(found) == 1 else b"".join(found)

    async def send(self, data: bytes) -> None:
        """See Stream."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._tls.write(rest) :]
            except ssl.SSLWantReadError:  # the other side wants new keys first
                await self._flush()
                await self._fill()
        await self._flush()

    async def aclose(self) -> None:
        """See Stream."""
        await self._below.aclose()

    async def _fill(self) -> None:
        if data := await self._below.receive():
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        if self._out.pending:
            await self._below.send(self._out.read())


# One connection to a server: a request, its answer, and the next one.


class HttpConnection:
    """Carries one request at a time."""

    def __init__(self, server: str, stream: Stream) -> None:
        self.server = server
        self.idle_since = 0.0
        """In seconds of the monotonic clock."""
        self._stream = stream
        self._answer = Incoming()
        self._quiet: float | None = None

    @property
    def answer(self) -> Incoming:
        """The answer that comes in."""
        return self._answer

    @property
    def reusable(self) -> bool:
        """Whether its answer was read to the end, and the server keeps it open."""
        return self._answer.complete and self._answer.keep_alive

    @property
    def stale(self) -> bool:
        """Whether the server has let go of it while it was idle."""
        return self._stream.readable

    async def ask(
        self, message: bytes, *, within: float, head: float | None, quiet: float | None
    ) -> Incoming:
        """Send a request within so many seconds, and read the head of its answer, which may take ``head``.

        Later parts of the answer may be ``quiet`` seconds apart. Raises UnreachableError.
        """
        self._answer = answer = Incoming()
        self._quiet = head
        try:
            with anyio.fail_after(within):
                await self._stream.send(message)
        except TimeoutError as error:
            raise UnreachableError(f"the request could not be sent within {within:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # a server may refuse before it has read all: then its answer has the reason
        while not answer.started:
            await self._more()
        self._quiet = quiet
        return answer

    async def part(self) -> bytes:
        """What has come of the body since; nothing when it is complete. Raises UnreachableError."""
        answer = self._answer
        while not answer.parts and not answer.complete:
            await self._more()
        found = answer.parts[0] if len(answer.parts) == 1 else b"".join(answer.parts)
        answer.parts.clear()
        return found

    async def rest(self) -> bytes:
        """All that is left of the body. Raises UnreachableError."""
        answer = self._answer
        while not answer.complete:
            await self._more()
        return await self.part()

    async def aclose(self) -> None:
        """Break it off."""
        self._answer.keep_alive = False
        await self._stream.aclose()

    async def _more(self) -> None:
        try:
            with anyio.fail_after(self._quiet):
                data = await self._stream.receive()
        except TimeoutError as error:
            raise UnreachableError(f"the server was silent for {self._quiet:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, ssl.SSLError) as error:
            what = str(error.__cause__ or error) or "broken off"
            raise UnreachableError(f"the connection ended: {what}") from error
        self._answer.feed(data)
