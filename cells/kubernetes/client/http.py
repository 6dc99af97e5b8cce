"""An HTTP/1.1 client: reusable connections over TCP, TLS and proxies; llhttp parses answers.

Why: each event of a watch is an HTTP chunk; to parse chunks in Python costs more than to decode the events.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import anyio
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from cells.kubernetes.client.errors import DroppedError, UnreachableError

__all__ = ["HttpConnection"]


# One answer, parsed by llhttp while it arrives.
#
# Source: RFC 9112 (HTTP/1.1).

MOST_HEAD: Final = 100 * 1024
"""Maximum bytes of a head, and of other framing between two parts of a body."""


class HeadTooLongError(Exception):
    """A head that is longer than MOST_HEAD."""


class IncomingResponse:
    """An answer while it arrives: its head, then parts of its body, which the reader removes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.started = False
        """Whether the head is complete."""
        self.complete = False
        self.keep_alive = False
        """Whether the connection can be used again after this answer."""
        self._size = 0
        self._since = 0
        self.on_body = self.parts.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse bytes; no bytes mean the end of the stream. Raises UnreachableError."""
        if self._parser is None or not data:
            return self._end()
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if isinstance(error.__context__, HeadTooLongError):
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes") from error
            if not self.complete:
                raise UnreachableError(f"an answer that is not HTTP/1.1: {error}") from error
            self.keep_alive = False  # bytes after the expected answers
        if self.parts or self.complete:
            self._since = 0
        else:
            self._since += len(data)
            if self._since > MOST_HEAD:
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes")
        return None

    @property
    def any_received(self) -> bool:
        """Whether any byte of the answer has arrived."""
        return self.started or self._since > 0

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of this lower-case name."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def release(self) -> None:
        """Drop the parser, so that the parser and the answer do not reference each other."""
        self._parser = None

    def _end(self) -> None:
        framed = self.header(b"content-length") or self.header(b"transfer-encoding")
        if self.complete:
            self.keep_alive = False
        elif self.started and not framed:
            self.complete = True  # the body lasts until the connection ends (RFC 9112, 6.3)
        else:
            where = "in the middle of" if self.started else "without"
            kind = UnreachableError if self.any_received else DroppedError
            raise kind(f"the server closed the connection {where} an answer")

    # ---- called by llhttp; feed() handles the exceptions

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpParserError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MOST_HEAD:
            raise HeadTooLongError
        if not self.started:  # ignore trailers
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  # the parser calls this method
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.started = True
            self.keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.started:
            self.complete = True
        else:  # an interim response (1xx): the final one follows
            self.headers.clear()


# Answers to requests that were pipelined on one connection.
#
# Source: RFC 9112, 9.3.2 (pipelining).
# Why:    most CPU time of a request is spent in the event loop and in system calls; pipelined requests share
#         nearly all of it.

_RETRY_AFTER: Final = b"retry-after"


class FullResponse(NamedTuple):
    """A whole answer."""

    status: int
    retry_after: bytes
    """The Retry-After header; empty without one."""
    body: bytes
    at: float
    """When it was complete, in seconds of the monotonic clock."""


class PipelinedResponses:
    """The answers to pipelined requests, in the order of the requests."""

    def __init__(self, count: int) -> None:
        self.found: list[FullResponse] = []
        self.keep_alive = True
        """Whether the connection can be used again; if not, no more answers follow."""
        self._count = count
        self._size = 0
        self._retry_after = b""
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    @property
    def complete(self) -> bool:
        """Whether every request has an answer."""
        return len(self.found) == self._count

    def feed(self, data: bytes) -> None:
        """Parse bytes; no bytes mean the end of the stream. Raises UnreachableError."""
        if self._parser is None or not data:
            self.keep_alive = False
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.complete:
                raise UnreachableError(f"an answer that is not HTTP/1.1: {error}") from error
            self.keep_alive = False  # bytes after the expected answers

    def release(self) -> None:
        """Drop the parser, so that the parser and the answers do not reference each other."""
        self._parser = None

    # ---- called by llhttp

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpParserError("more answers than requests")
        self._size, self._retry_after = 0, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MOST_HEAD:
            raise HttpParserError(f"a head longer than {MOST_HEAD} bytes")
        if len(name) == len(_RETRY_AFTER) and name.lower() == _RETRY_AFTER:
            self._retry_after = value

    def on_message_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  # the parser calls this method
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response (1xx): the final one follows
        self.found.append(FullResponse(status, self._retry_after, b"".join(self._body), time.monotonic()))
        self._body.clear()
        self.keep_alive &= self._parser.should_keep_alive()


# A stream of bytes, and TLS over it.
#
# Why: anyio's TLS stream returns one record per read, and servers send each event as a record.

READ: Final = 256 * 1024
"""Maximum bytes of one read."""


class Stream(Protocol):
    """A connection, in both directions."""

    @property
    def readable(self) -> bool:
        """Whether bytes or the end of the stream have arrived; on an idle connection most likely the end."""

    async def receive(self) -> bytes:
        """Return what has arrived; empty at the end. Raises anyio's BrokenResourceError, ssl.SSLError."""

    async def send(self, data: bytes) -> None:
        """Write all bytes. Raises anyio's BrokenResourceError."""

    async def aclose(self) -> None:
        """Close at once, without a message to the peer."""


class TlsStream:
    """TLS over another stream; a read returns all records that have arrived."""

    def __init__(self, below: Stream, context: ssl.SSLContext, name: str) -> None:
        self._below = below
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=name)

    @property
    def readable(self) -> bool:
        """See Stream."""
        return bool(self._in.pending) or self._below.readable

    async def handshake(self) -> None:
        """Perform the handshake. Raises ssl.SSLError, and the errors of the stream below."""
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
            except ssl.SSLWantReadError:  # the peer renegotiates keys first
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
    """A connection that carries one request at a time."""

    def __init__(self, server: str, stream: Stream) -> None:
        self.server = server
        self.idle_since = 0.0
        """Seconds of the monotonic clock; 0 before its first request has ended."""
        self._stream = stream
        self._answer = IncomingResponse()
        self._answers: PipelinedResponses | None = None
        """The answers to the last requests, if they were pipelined."""
        self._quiet: float | None = None

    @property
    def answer(self) -> IncomingResponse:
        """The current answer."""
        return self._answer

    @property
    def reusable(self) -> bool:
        """Whether the last answers were read completely, and the server keeps the connection open."""
        answer = self._answers or self._answer
        return answer.complete and answer.keep_alive

    def release(self) -> None:
        """Stop parsing the current answers."""
        (self._answers or self._answer).release()

    @property
    def stale(self) -> bool:
        """Whether the server has closed the connection while it was idle."""
        return self._stream.readable

    async def send_request(
        self, message: bytes, *, within: float, head: float | None, quiet: float | None
    ) -> IncomingResponse:
        """Send a request within so many seconds, and read the head of its answer, within ``head`` seconds.

        Later parts of the answer may be ``quiet`` seconds apart. Raises UnreachableError.
        """
        self._answer = answer = IncomingResponse()
        self._answers = None
        self._quiet = head
        await self._send(message, within)
        while not answer.started:
            await self._more()
        self._quiet = quiet
        return answer

    async def ask_all(
        self, messages: bytes, count: int, *, within: float, quiet: float | None
    ) -> Sequence[FullResponse]:
        """Send pipelined requests within so many seconds, and return their complete answers.

        Parts of the answers may be ``quiet`` seconds apart. There are fewer answers if the connection ends
        early. Raises UnreachableError if there is none for another reason.
        """
        self._answers = answers = PipelinedResponses(count)
        self._quiet = quiet
        await self._send(messages, within)
        try:
            while answers.keep_alive and not answers.complete:
                answers.feed(await self._received())
        except DroppedError:
            answers.keep_alive = False
        except UnreachableError:
            if not answers.found:
                raise
        return answers.found

    async def _send(self, messages: bytes, within: float) -> None:
        try:
            with anyio.fail_after(within):
                await self._stream.send(messages)
        except TimeoutError as error:
            raise UnreachableError(f"the request could not be sent within {within:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the server may answer with an error before it has read everything

    async def part(self) -> bytes:
        """Return what has arrived of the body; empty at its end. Raises UnreachableError."""
        answer = self._answer
        while not answer.parts and not answer.complete:
            await self._more()
        found = answer.parts[0] if len(answer.parts) == 1 else b"".join(answer.parts)
        answer.parts.clear()
        return found

    async def rest(self) -> bytes:
        """Return the rest of the body. Raises UnreachableError."""
        answer = self._answer
        while not answer.complete:
            await self._more()
        return await self.part()

    async def aclose(self) -> None:
        """Close the connection at once."""
        (self._answers or self._answer).keep_alive = False
        await self._stream.aclose()

    async def _more(self) -> None:
        self._answer.feed(await self._received())

    async def _received(self) -> bytes:
        try:
            with anyio.fail_after(self._quiet):
                return await self._stream.receive()
        except TimeoutError as error:
            raise UnreachableError(f"the server was silent for {self._quiet:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, ssl.SSLError) as error:
            what = str(error.__cause__ or error) or "broken off"
            kind = UnreachableError if self._answers is None and self._answer.any_received else DroppedError
            raise kind(f"the connection ended: {what}") from error
