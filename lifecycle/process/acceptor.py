"""Accepts connections in slices, and reserves file descriptors for other uses.

Source: accept(2): without descriptors or memory, the connection stays in the queue and the socket readable,
so a loop that continues to accept makes no progress.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Hashable

from lifecycle.process.health import Health
from lifecycle.process.logs import Logger

SHARE_SECONDS = 0.0005
"""Maximum time for accepting in one turn of the loop; other work follows before the next."""
RESERVE = 128
"""Descriptors that are reserved for others, above all for calls of the CNI plugin."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
QUIET_SECONDS = 60.0
"""Minimum time between two log lines about the same failure."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Passes each non-blocking connection to ``take``, with its peer."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket, Hashable], None],
        log: Logger,
        health: Health | None = None,
    ) -> None:
        self._listener = listener
        self._take = take
        self._log = log
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._highest = _highest_descriptor()
        self._pause = 0.0
        self._quiet_until = 0.0
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        until = self._loop.time() + SHARE_SECONDS
        while True:
            try:
                connected, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._back_off(os.strerror(error.errno or 0))
                    return
                continue  # the client has disconnected already
            if connected.fileno() > self._highest:
                connected.close()
                self._back_off("the last descriptors are left for others")
                return
            self._accepts_again()
            connected.setblocking(False)
            try:
                peer = _peer_of(connected, address)
            except OSError:
                connected.close()
                continue
            self._take(connected, peer)
            if self._loop.time() >= until:
                return

    def _accepts_again(self) -> None:
        if self._pause and self._health is not None:
            self._health.ok()
        self._pause = 0.0

    def _back_off(self, why: str) -> None:
        """Pause accepting; the pause grows until a connection is accepted."""
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + QUIET_SECONDS
            self._log.warning("connections have to wait", socket=_name(self._listener), reason=why)
        if self._health is not None:
            self._health.degraded(f"connections have to wait: {why}")
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LAST_PAUSE)
        self._loop.remove_reader(self._listener.fileno())
        self._again = self._loop.call_later(self._pause, self._resume)

    def _resume(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def _highest_descriptor() -> int:
    """The kernel assigns the lowest free descriptor, so one above this means that few are left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - min(RESERVE, soft // 4)


def _peer_of(connected: socket.socket, address: object) -> Hashable:
    """Return the peer: its address without the port, or its process on a unix socket (SO_PEERCRED)."""
    if connected.family == socket.AF_UNIX:
        return connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return address[0] if isinstance(address, tuple) else address


def _name(listener: socket.socket) -> str:
    name = listener.getsockname()
    return ":".join(map(str, name[:2])) if isinstance(name, tuple) else str(name)
