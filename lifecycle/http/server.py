"""Serves a handler on a listening socket, with keep-alive, an orderly stop, and limits for clients.

A connection beyond the limits replaces one that only waits for its client: of the same client if that has
used its share, otherwise of the client with the most connections. So idle, slow and unresponsive clients lose
theirs first, and a probe that sends its request at once is answered among thousands that do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from lifecycle.http.channel import STALL_SECONDS, Channel
from lifecycle.http.connection import Connection
from lifecycle.http.fair_queue import fair_queue_of
from lifecycle.http.in_flight import InFlight
from lifecycle.http.limits import ServerLimits
from lifecycle.http.messages import Handler
from lifecycle.process import Logger
from lifecycle.process.acceptor import QUIET_SECONDS, Acceptor
from lifecycle.process.logs import logger_for

if TYPE_CHECKING:
    import ssl

RECEIVE_BUFFER, SEND_BUFFER = 16 << 10, 64 << 10
"""Kernel buffers of a connection: with automatic sizes, thousands of connections use up TCP's memory."""


class HttpServer:
    """Answers requests with one handler. Serves once; a stop waits ``grace`` seconds for answers.

    With ``tls``, connections use TLS with its context at that moment; it may raise OSError if files are
    unusable: then the client's connection is closed.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        grace: float,
        limits: ServerLimits | None = None,
        log: Logger | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._handler = handler
        self._grace = grace
        self._limits = limits or ServerLimits()
        self._log = log or logger_for("http")
        self._tls = tls
        self._quiet_until = -math.inf
        self._bodies, self._answers = InFlight(self._limits.in_flight), InFlight(self._limits.in_flight)
        self._retry_timer: asyncio.TimerHandle | None = None
        self._acceptor: Acceptor | None = None
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._peers: Counter[Hashable] = Counter()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, which the server then owns."""
        self._loop = asyncio.get_running_loop()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._acceptor = Acceptor(listener, self._accepted, self._log)

    async def close(self) -> None:
        """Stop accepting, close idle connections, and the others after the grace."""
        if self._acceptor is None:
            return
        self._acceptor.close()
        self._acceptor = None
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        tasks = set(self._connections.values())
        for connection, task in self._connections.items():
            connection.last = True
            if not connection.answering:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _accepted(self, connected: socket.socket, peer: Hashable) -> None:
        if not self._admitted(peer):
            connected.close()
            return
        try:
            channel = self._channel(connected, peer)
        except OSError as error:
            self._failed(peer, error)
            connected.close()
            return
        connection = Connection(
            channel,
            self._handler,
            self._limits,
            queue=fair_queue_of(self._loop),
            bodies=self._bodies,
            answers=self._answers,
            make_room=self._make_room,
        )
        self._peers[peer] += 1
        task = self._connections[connection] = self._loop.create_task(self._run(connection))
        task.add_done_callback(lambda _: self._ended(connection))

    def _channel(self, connected: socket.socket, peer: Hashable) -> Channel:
        if self._tls is None:
            return Channel(connected, peer)
        from lifecycle.http.secured import SecuredChannel  # imports OpenSSL only with TLS

        return SecuredChannel(connected, peer, self._tls())

    async def _run(self, connection: Connection) -> None:
        # The client disconnected, was too slow or was replaced, or the server stops.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await connection.run()
            except OSError as error:
                if self._tls is not None and not connection.answered:
                    self._failed(connection.channel.peer, error)

    def _failed(self, peer: Hashable, error: OSError) -> None:
        """Log that a client failed TLS; rate-limited, as any number of clients may try."""
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + QUIET_SECONDS
            self._log.warning(
                "a client failed TLS", client=str(peer), error=str(error) or type(error).__name__
            )

    def _ended(self, connection: Connection) -> None:
        self._forget(connection)
        connection.channel.socket.close()

    def _forget(self, connection: Connection) -> None:
        if self._connections.pop(connection, None) is not None:
            peer = connection.channel.peer
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def _admitted(self, peer: Hashable) -> bool:
        """Whether the client may have a connection, after closing another one if necessary."""
        if self._peers[peer] >= self._limits.per_peer:
            return self._drop_one(
                connection for connection in self._connections if connection.channel.peer == peer
            )
        if len(self._connections) >= self._limits.connections:
            return self._drop_one(self._connections)
        return True

    def _drop_one(self, among: Iterable[Connection]) -> bool:
        """Close the connection that has waited longest, of the client with the most; False if there is none.

        If all are working, one that was answered before and waits for its next turn is closed.
        """
        now = self._loop.time()
        among = list(among)
        if waiting := [connection for connection in among if connection.replaceable(now)]:
            self._drop(
                min(
                    waiting,
                    key=lambda connection: (-self._share(connection), connection.channel.waiting_since),
                )
            )
        elif served := [connection for connection in among if connection.queued and connection.answered]:
            self._drop(max(served, key=lambda connection: (self._share(connection), connection.answered)))
        else:
            return False
        return True

    def _share(self, connection: Connection) -> int:
        return self._peers[connection.channel.peer]

    def _make_room(self) -> None:
        """Close connections without progress while others wait for their memory, until enough is free."""
        now = self._loop.time()
        for connection in list(self._connections):
            if connection.holds and connection.channel.stalled(now):
                self._drop(connection)
        if self._retry_timer is None and self._answers.full:
            self._retry_timer = self._loop.call_later(STALL_SECONDS, self._retry_make_room)

    def _retry_make_room(self) -> None:
        self._retry_timer = None
        if self._answers.has_waiters:
            self._make_room()

    def _drop(self, connection: Connection) -> None:
        task = self._connections[connection]
        self._forget(connection)
        task.cancel()
