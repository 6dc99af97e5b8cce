"""Sends events to everybody who is connected.

Needs: Events, a path.   Gives: Monitor, MonitorSettings, SOCKET.
Source: Cilium 1.17, the monitor's socket of protocol version 1.2.
"""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio

from cells.observe.events import Events, Lost, Sample, Subscription
from cells.observe.monitor.payload import PREFACE, encode
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings
from lifecycle.http import listen

SOCKET: Final = "monitor1_2.sock"
MOST_CLIENTS: Final = 64
"""Connected at a time; one more is closed at once. Each costs a queue of events and what is being sent."""
IN_FLIGHT: Final = 64 * 1024
"""Bytes handed to a connection before it has to have taken them; the events after them wait in its queue."""
_QUIET: Final = 60.0  # seconds between two lines in the log about too many clients


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
        self._quiet_until = 0.0
        if settings.enable_monitor:
            lifecycle.append(Hook("serve the monitor", self._start, self._stop))

    @property
    def watchers(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    async def _start(self) -> None:
        listener = listen(self.path, group="cilium")
        # Interrupted here, asyncio would leave a listening server that cannot be closed.
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
        if len(self._clients) >= MOST_CLIENTS:
            self._turn_away(writer)
            return
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

    def _turn_away(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        now = anyio.current_time()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET
            self._log.warning("too many clients of the monitor: one is turned away", clients=MOST_CLIENTS)


async def _send(writer: asyncio.StreamWriter, subscription: Subscription) -> None:
    writer.write(PREFACE)
    async for batch in subscription:
        for piece in _pieces(batch):
            writer.write(piece)
            await writer.drain()


def _pieces(batch: Iterable[Sample | Lost]) -> Iterator[bytes]:
    """The events as messages, some IN_FLIGHT bytes at a time."""
    messages: list[bytes] = []
    size = 0
    for event in batch:
        message = encode(event)
        messages.append(message)
        size += len(message)
        if size >= IN_FLIGHT:
            yield b"".join(messages)
            messages, size = [], 0
    yield b"".join(messages)


async def _until_gone(reader: asyncio.StreamReader, scope: anyio.CancelScope) -> None:
    """Read what no client should send, to hear of its end."""
    while await reader.read(4096):
        pass
    scope.cancel()
