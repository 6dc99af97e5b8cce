"""A client's socket with TLS.

OpenSSL reads and writes the socket itself, so data that cannot be sent stays where it is, and at most one
record is read ahead, 16 KiB (RFC 8446, section 5.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Hashable

from lifecycle.http.channel import LINGER_SECONDS, LINGER_SIZE, READ_SIZE, Channel
from lifecycle.http.fair_queue import fair_queue_of


class SecuredChannel(Channel):
    """The connection of one client.

    The handshake happens with the first bytes and takes a turn, like a request.
    """

    def __init__(self, connected: socket.socket, peer: Hashable, context: ssl.SSLContext) -> None:
        self._secured = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        super().__init__(self._secured, peer)
        self._shaken = False

    async def read(self, deadline: float | None, *, client_waits: bool = False) -> bytes:
        """See Channel. Raises ssl.SSLError, an OSError, if the client fails TLS."""
        if not self._shaken:
            await fair_queue_of(self._loop).wait(self.peer)
            while True:
                try:
                    self._secured.do_handshake()
                    break
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                    await self._wait_io(blocked, deadline)
            self._shaken = True
        while True:
            try:
                return self._secured.recv(READ_SIZE)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                await self._wait_io(blocked, deadline, client_waits=client_waits)

    async def write(self, data: bytes, deadline: float) -> None:
        """See Channel."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._secured.send(rest) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                await self._wait_io(blocked, deadline)

    async def finish(self) -> None:
        """See Channel.

        Sends close_notify (RFC 8446, section 6.1) and does not wait for that of the client.
        """
        self.idle()
        with contextlib.suppress(OSError):  # its close_notify is outstanding, or it has disconnected
            self._secured.unwrap()
        self._secured.shutdown(socket.SHUT_WR)  # no TLS from here on: received data is discarded
        deadline, left = self._loop.time() + LINGER_SECONDS, LINGER_SIZE
        while left > 0 and (data := await super().read(deadline)):
            left -= len(data)
            await asyncio.sleep(0)

    async def _wait_io(
        self, blocked: ssl.SSLError, deadline: float | None, *, client_waits: bool = False
    ) -> None:
        add, remove = self._loop.add_reader, self._loop.remove_reader
        if isinstance(blocked, ssl.SSLWantWriteError):
            add, remove = self._loop.add_writer, self._loop.remove_writer
        if not client_waits:
            self.idle()
        async with asyncio.timeout_at(deadline):
            await self._until(add, remove)
        self.busy()
