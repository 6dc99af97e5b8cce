"""A client's socket: bytes in, bytes out, each with a deadline, and nothing held that the kernel can hold.

asyncio's streams read ahead into the process, up to 128 KiB a client, and copy what cannot be sent at once.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Hashable

READ_SIZE = 16 << 10
STALL_SECONDS = 1.0
"""After so long without a byte sent, or taken, a client may lose its connection to another one."""
LINGER_SECONDS, LINGER_SIZE = 1.0, 256 << 10


class Channel:
    """One client's connection."""

    def __init__(self, connected: socket.socket, peer: Hashable) -> None:
        self.socket = connected
        self.peer = peer
        """Equal for connections of one client."""
        self._loop = asyncio.get_running_loop()
        self._waiting_since = math.inf
        """In the loop's time; infinite while the client waits for us, and until we have first looked."""

    def busy(self) -> None:
        """From now on it is our turn: the connection is not to be closed for another one's sake."""
        self._waiting_since = math.inf

    def idle(self) -> None:
        """From now on it is the client's turn."""
        self._waiting_since = self._loop.time()

    @property
    def waiting_since(self) -> float:
        """Since when all depends on the client, in the loop's time; infinite when it waits for us."""
        return self._waiting_since

    def stalled(self, now: float) -> bool:
        """Whether for STALL_SECONDS nothing was received from the client or sent to it."""
        return self._waiting_since + STALL_SECONDS <= now

    async def read(self, deadline: float | None, *, ours: bool = False) -> bytes:
        """What the client sends, b"" at the end of it. Raises OSError; TimeoutError at the deadline.

        ``ours``: the client waits for us meanwhile. When this is cancelled, what comes stays in the kernel.
        """
        while True:
            try:
                return self.socket.recv(READ_SIZE)
            except (BlockingIOError, InterruptedError):
                if not ours:
                    self.idle()
                async with asyncio.timeout_at(deadline):
                    await self._until(self._loop.add_reader, self._loop.remove_reader)
                self.busy()

    async def write(self, data: bytes, deadline: float) -> None:
        """Hand it to the kernel. Raises OSError; TimeoutError at the deadline."""
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
        """Say that nothing more comes, and discard what does, for a while, so that our last words are read.

        Closed with bytes unread, the kernel would break the connection off (RFC 9112, section 9.6).
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
