"""Messages by TCP, and the connection to the server by which a pod's conversation goes on.

For:    DNSProxy. Needs: nothing. Gives: message(), ServerConnection.
Source: RFC 1035, section 4.2.2; RFC 7766, section 6.2.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Final

import anyio

from cells.proxy.dns.sockets import Address, end_at_once, upstream

PATIENCE: Final = 10.0
"""Seconds after which nobody waits for an answer any more."""
TAKEN: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})


async def message(reader: asyncio.StreamReader) -> bytes | None:
    """The next message of a connection; None once there is none for a while. Raises IncompleteReadError."""
    with anyio.move_on_after(PATIENCE):
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
        except asyncio.IncompleteReadError:
            return None
        return await reader.readexactly(size)
    return None


class ServerConnection:
    """To the server that a pod's connection is for: made with the first question, anew if it has ended."""

    def __init__(self, server: Address, identity: int, client: Address | None) -> None:
        """``client``: the address and port to ask from; None for the node's."""
        self._server = server
        self._identity = identity
        self._client = client
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, data: bytes) -> bytes:
        """The answer, or what else comes. Raises OSError, EOFError."""
        used = self._ends is not None
        try:
            return await self._asked(data)
        except (ConnectionError, EOFError):
            self.close()
            if not used:
                raise
        except BaseException:
            self.close()  # an answer may come yet, and would be taken for the next one
            raise
        return await self._asked(data)  # servers end connections that say nothing

    async def _asked(self, data: bytes) -> bytes:
        reader, writer = self._ends = self._ends or await self._connect()
        writer.write(len(data).to_bytes(2, "big") + data)
        answer = await message(reader)
        if answer is None:
            raise EOFError("the server ended the connection")
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await self._connected(self._client)
        except OSError as error:
            if self._client is None or error.errno not in TAKEN:
                raise
        return await self._connected(None)

    async def _connected(self, client: Address | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, port = self._server
        made = upstream(address.version, self._identity, socket.SOCK_STREAM, client)
        try:
            if client is not None:
                end_at_once(made)
            await asyncio.get_running_loop().sock_connect(made, (str(address), port))
            return await asyncio.open_connection(sock=made)
        except BaseException:
            made.close()
            raise

    def close(self) -> None:
        """End the connection, if there is one."""
        ends, self._ends = self._ends, None
        if ends is not None:
            ends[1].close()
