"""Connections that are kept for the next request.

Needs: Dialler.   Gives: Pool.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque

import anyio

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http.connection import Connection
from cells.kubernetes.client.http.dial import Dialler


class Pool:
    """So many requests at once; the connection used last is used again first."""

    def __init__(self, dialler: Dialler, *, most: int, within: float, keep_alive: float) -> None:
        """``within``: seconds to wait for a turn. ``keep_alive``: seconds a connection is kept idle."""
        self.dialler = dialler
        self._most = most
        self._within = within
        self._keep_alive = keep_alive
        self._turns = anyio.Semaphore(most)
        self._idle: dict[str, deque[Connection]] = defaultdict(deque)
        self._used: set[Connection] = set()
        self._closed = False

    async def take(self, server: str) -> Connection:
        """A connection to the server, until it is given back. Raises UnreachableError."""
        try:
            self._turns.acquire_nowait()
        except anyio.WouldBlock:
            await self._turn()
        try:
            await self._forget_old()
            idle, found = self._idle[server], None
            while idle and found is None:
                found = idle.pop()
                if found.stale:
                    await found.aclose()
                    found = None
            found = found or await self.dialler.dial(server)
        except BaseException:
            self._turns.release()
            raise
        self._used.add(found)
        return found

    async def give(self, connection: Connection) -> None:
        """It is not used any more."""
        self._used.discard(connection)
        connection.answer.release()
        self._turns.release()
        if connection.reusable and not self._closed:
            connection.idle_since = time.monotonic()
            self._idle[connection.server].append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        """Abort all connections, including those in use."""
        self._closed = True
        idle = [one for each in self._idle.values() for one in each]
        self._idle.clear()
        for one in (*idle, *self._used):
            await one.aclose()

    async def _turn(self) -> None:
        try:
            with anyio.fail_after(self._within):
                await self._turns.acquire()
        except TimeoutError as error:
            raise UnreachableError(
                f"{self._most} requests are under way, and none ended within {self._within:g} s"
            ) from error

    async def _forget_old(self) -> None:
        since = time.monotonic() - self._keep_alive
        old = []
        for idle in self._idle.values():
            while idle and idle[0].idle_since < since:
                old.append(idle.popleft())
        for one in old:  # meanwhile others may come and go
            await one.aclose()
