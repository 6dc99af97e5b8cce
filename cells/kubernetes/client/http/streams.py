"""Bytes to a server and back: over TCP, or TLS on top of that.

Needs: anyio.   Gives: Stream, TcpStream, TlsStream.
Why:   anyio's stream of TLS gives one record at a time; a server that sends an event sends a record.
"""

from __future__ import annotations

import select
import socket
import ssl
from typing import Final, Protocol

import anyio
from anyio.abc import SocketAttribute, SocketStream

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


class TcpStream:
    """A connection of TCP, watched by the kernel while it is silent."""

    def __init__(self, stream: SocketStream, keep_alive: float) -> None:
        self._stream = stream
        self._socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610  # of anyio
        if keep_alive >= 1:
            seconds = int(keep_alive)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED_PROBES)

    @property
    def readable(self) -> bool:
        """See Stream."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def receive(self) -> bytes:
        """See Stream."""
        try:
            return await self._stream.receive(READ)
        except anyio.EndOfStream:
            return b""

    async def send(self, data: bytes) -> None:
        """See Stream."""
        await self._stream.send(data)

    async def aclose(self) -> None:
        """See Stream."""
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()


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
                await self._flush()  # sends the alert that says why
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
