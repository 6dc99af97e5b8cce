"""A client's socket: reads and writes with deadlines, without buffers of its own.

asyncio's streams read up to 128 KiB of each client ahead, and copy what cannot be sent at once.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Hashable

READ_SIZE = 16 << 10
STALL_SECONDS = 1.0
"""Seconds without progress after which a client may lose its connection to another client."""
LINGER_SECONDS, LINGER_SIZE = 1.0, 256 << 10


class Channel:
    """The connection of one client."""

    def __init__(self, connected: socket.socket, peer: Hashable) -> None:
        self.socket = connected
        self.peer = peer
        """Equal for connections of one client."""
        self._loop = asyncio.get_running_loop()
        self._waiting_since = math.inf
        """In the loop's time; infinite while the client waits for the server, and before the first check."""

    def busy(self) -> None:
        """The server works for the client: the connection must not be closed in favour of another."""
        self._waiting_since = math.inf

    def idle(self) -> None:
        """The server waits for the client."""
        self._waiting_since = self._loop.time()

    @property
    def waiting_since(self) -> float:
        """Since when the server waits for the client, in the loop's time; infinite if the client waits."""
        return self._waiting_since

    def stalled(self, now: float) -> bool:
        """Whether nothing was received from the client or sent to it for STALL_SECONDS."""
        return self._waiting_since + STALL_SECONDS <= now

    async def read(self, deadline: float | None, *, client_waits: bool = False) -> bytes:
        """Read from the client; b"" at the end. Raises OSError; TimeoutError at the deadline.

        `client_waits`: the client waits for the server meanwhile. If cancelled, data stays in the kernel.
        """
        while True:
            try:
                return self.socket.recv(READ_SIZE)
            except (BlockingIOError, InterruptedError):
                if not client_waits:
                    self.idle()
                async with asyncio.timeout_at(deadline):
                    await self._until(self._loop.add_reader, self._loop.remove_reader)
                self.busy()

    async def write(self, data: bytes, deadline: float) -> None:
        """Pass data to the kernel. Raises OSError; TimeoutError at the deadline."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest, socket.MSG_NOSIGNAL) :]
            except (BlockingIOError, InterruptedError):
                self.idle()
                async with asyncio.timeout_at(deadline):
                    await self._until(self._loop.add_writer, self._loop.remove_writer)
                self.busy()

    async def finish(self) -> None:
        """Close the sending side, and discard received data for a while, so that the client reads the answer.

        If a socket is closed with unread data, the kernel resets the connection (RFC 9112, section 9.6).
        """
        self.idle()
        self.socket.shutdown(socket.SHUT_WR)
        deadline, left = self._loop.time() + LINGER_SECONDS, LINGER_SIZE
        while left > 0 and (data := await self.read(deadline)):
            left -= len(data)
            await asyncio.sleep(0)

    async def _until(self, add: Callable[..., None], remove: Callable[[int], object]) -> None:
        ready, fd = self._loop.create_future(), self.socket.fileno()
        add(fd, _wake, ready)
        try:
            await ready
        finally:
            remove(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
