"""Sends events to everybody who is connected.

Needs: Events, a path.   Gives: Monitor, MonitorSettings, SOCKET.
Source: Cilium 1.17, the monitor's socket of protocol version 1.2.
"""

import asyncio
from pathlib import Path
from typing import Final

import anyio

from cells.observe.events import Events, Subscription
from cells.observe.monitor.payload import PREFACE, encode
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings
from lifecycle.http import listen

SOCKET: Final = "monitor1_2.sock"


class MonitorSettings(Settings, frozen=True):
    """Settings of the monitor cell."""

    enable_monitor: bool = True
    """Serve the monitor socket."""


class Monitor:
    """Serves the monitor socket at ``path`` while the agent runs."""

    def __init__(
        self, path: Path, settings: MonitorSettings, events: Events, lifecycle: Lifecycle, log: Logger
    ) -> None:
        self.path = path
        self._events = events
        self._log = log
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        if settings.enable_monitor:
            lifecycle.append(Hook("serve the monitor", self._start, self._stop))

    @property
    def watchers(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    async def _start(self) -> None:
        listener = listen(self.path, group="cilium")
        # Interrupted in the middle, asyncio would leave a server that listens and that nobody can close.
        with anyio.CancelScope(shield=True):
            self._server = await asyncio.start_unix_server(self._accepted, sock=listener)

    async def _stop(self) -> None:
        if self._server is None:
            return
        self.path.unlink(missing_ok=True)
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either side has gone."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("asyncio accepts in a task")
        self._clients.add(task)
        try:
            with self._events.subscribe() as subscription:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_until_gone, reader, tasks.cancel_scope)
                    await _send(writer, subscription)
                    tasks.cancel_scope.cancel()
        except* (ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or we stop: nobody waits for this connection any more
        except* HiveError as errors:
            reason = "; ".join(map(str, errors.exceptions))
            self._log.warning("events cannot be read from the datapath", error=reason)
        finally:
            self._clients.discard(task)
            writer.close()


async def _send(writer: asyncio.StreamWriter, subscription: Subscription) -> None:
    writer.write(PREFACE)
    async for batch in subscription:
        writer.write(b"".join(map(encode, batch)))
        await writer.drain()


async def _until_gone(reader: asyncio.StreamReader, scope: anyio.CancelScope) -> None:
    """Read what no client should send, to hear of its end."""
    while await reader.read(4096):
        pass
    scope.cancel()
