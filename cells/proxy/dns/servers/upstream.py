"""Asking servers by UDP: sockets that are used again, one query at a time each.

For:    DNSProxy. Needs: the running event loop. Gives: Upstream.
Why:    making, connecting, watching and closing a socket takes longer than the rest of a query. Each one
        serves few queries and short pauses only: an attacker who forges answers must guess its port anew
        (RFC 5452).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from cells.proxy.dns.sockets import Address, upstream

USES: Final = 64
"""Queries that a socket serves."""
IDLE: Final = 2.0
"""Seconds after which one that serves none is closed."""
LARGEST: Final = 65535

Key = tuple[Address, int]
"""The server, and the identity that is asked for."""
Told = Callable[[bytes | OSError], bool]
"""Gets a datagram, or why there is none; whether it was what was waited for."""


class Line:
    """A socket to a server. It waits for one answer at a time."""

    __slots__ = ("_of", "key", "made", "since", "told", "uses")

    def __init__(self, of: Upstream, key: Key, made: socket.socket) -> None:
        self._of = of
        self.key = key
        self.made = made
        self.told: Told | None = None
        self.uses = 0
        self.since = 0.0

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._of.give_up(self)


class Upstream:
    """The sockets of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: dict[Key, list[Line]] = {}
        self._all: set[Line] = set()
        self._sweep = loop.call_later(IDLE, self._close_idle)

    def ask(self, server: Address, identity: int, data: bytes, told: Told) -> Line:
        """Send a query; ``told`` gets what comes back, until it says that this was it. Raises OSError."""
        key = server, identity
        while idle := self._idle.get(key):
            line = idle.pop()
            try:
                return self._send(line, data, told)
            except OSError:  # what became of an earlier query: another socket knows nothing of that
                continue
        return self._send(self._connected(key), data, told)

    def _send(self, line: Line, data: bytes, told: Told) -> Line:
        line.told = told
        line.uses += 1
        try:
            line.made.send(data)
        except OSError:
            self._close(line)
            raise
        return line

    def give_up(self, line: Line) -> None:
        """Nobody waits for the answer any more. What comes late is for nobody."""
        line.told = None
        self._close(line)

    def close(self) -> None:
        """Let go of all sockets."""
        self._sweep.cancel()
        for line in list(self._all):
            self._close(line)

    def _connected(self, key: Key) -> Line:
        (address, port), identity = key
        made = upstream(address.version, identity, socket.SOCK_DGRAM)
        try:
            made.connect((str(address), port))
        except OSError:
            made.close()
            raise
        line = Line(self, key, made)
        self._all.add(line)
        self._loop.add_reader(made, self._ready, line)
        return line

    def _ready(self, line: Line) -> None:
        if line not in self._all:
            return
        said: bytes | OSError
        try:
            said = line.made.recv(LARGEST)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            said = error
        told = line.told
        if told is None:  # of a query that nobody waits for
            if isinstance(said, OSError):
                self._close(line)
            return
        if not told(said):
            return
        line.told = None
        if line not in self._all:
            return
        if isinstance(said, OSError) or line.uses >= USES:
            self._close(line)
            return
        line.since = self._loop.time()
        self._idle.setdefault(line.key, []).append(line)

    def _close(self, line: Line) -> None:
        if line not in self._all:
            return
        self._all.discard(line)
        idle = self._idle.get(line.key)
        if idle is not None and line in idle:
            idle.remove(line)
        self._loop.remove_reader(line.made)
        line.made.close()

    def _close_idle(self) -> None:
        since = self._loop.time() - IDLE
        for key, idle in list(self._idle.items()):
            for line in [one for one in idle if one.since < since]:
                self._close(line)
            if not idle:
                del self._idle[key]
        self._sweep = self._loop.call_later(IDLE, self._close_idle)
