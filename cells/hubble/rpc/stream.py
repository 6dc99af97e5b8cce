"""A client's socket, as the gRPC server reads and writes it."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream


class ClientStream(ByteStream):
    """A connected socket that takes what the system has room for at once, without a round of the event loop.

    anyio's own is not used: it sends in a later round, and when its receive() is cancelled in the turn of the
    loop in which data comes, the loop reports a fault (InvalidStateError).
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._transport = writer.transport
        self._transport.set_write_buffer_limits(0)  # drain() waits until the system has all of it

    @classmethod
    async def of(cls, connected: socket.socket) -> Self:
        """Of a socket, which is the stream's from now on. Raises OSError."""
        if connected.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connected))
        return cls(*await asyncio.open_connection(sock=connected))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """At least one byte. Raises EndOfStream, BrokenResourceError."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    def send_nowait(self, data: bytes) -> bool:
        """Send; whether the system has all of it: if not, wait with send() before there is more to send.

        Raises BrokenResourceError when the client has left.
        """
        if self._transport.is_closing():
            raise anyio.BrokenResourceError
        self._transport.write(data)
        return not self._transport.get_write_buffer_size()

    async def send(self, item: bytes) -> None:
        """Wait until the system takes it, and what was sent before. Raises BrokenResourceError."""
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Nothing more is sent."""
        self._writer.write_eof()

    async def aclose(self) -> None:
        """Close the connection; what a cancelled send() left is lost."""
        self._transport.abort()
        await anyio.lowlevel.checkpoint()
