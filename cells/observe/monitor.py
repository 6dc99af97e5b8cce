"""The monitor socket: forwards events of packets, requests and the agent to clients on the node.

Sends undecoded events to every client of ``<state-dir>/monitor1_2.sock``, such as ``cilium-dbg monitor`` and
``hive monitor``; the table ``monitor-clients`` lists the clients. Without clients, nothing is read from the
datapath.

Source: Cilium 1.17, pkg/monitor/agent. Setting: enable-monitor.
"""

import asyncio
import itertools
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio
import msgspec

from cells.config import AgentConfig
from cells.observe.events import Events, Lost, Sample, Subscription
from cells.observe.events.gob import BYTES, INT, UINT, int_bytes, message, uint_bytes
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings, Table, config, invoke, module, provide
from lifecycle.http import listen

__all__ = [
    "SOCKET",
    "Monitor",
    "MonitorClient",
    "MonitorProtocolError",
    "MonitorSettings",
    "Payloads",
    "cell",
    "monitor_clients",
]


# The protocol of the monitor socket: Go's gob encoding of one struct.
#
# Source: Go's package encoding/gob; Cilium 1.17, version 1.2 of the monitor's protocol: the server sends the
#         type ``Payload{Data []byte; CPU int; Lost uint64; Type int}`` once, then a value for each event; the
#         client sends nothing.

SAMPLE: Final = 9
LOST: Final = 2
_TYPE_ID: Final = 66
_MAX_MESSAGE: Final = 1 << 20
"""Maximum length of a received message; events are shorter than 1 KiB."""


class MonitorProtocolError(ValueError):
    """Received data does not conform to the monitor's protocol."""


def _string(text: str) -> bytes:
    return uint_bytes(len(text)) + text.encode()


_FIELDS: Final = (("Data", BYTES), ("CPU", INT), ("Lost", UINT), ("Type", INT))


def _definition() -> bytes:
    """Return the gob definition of Payload, as a wireType with a structType (its third field).

    Each value is preceded by the distance from the previous field's number; 0 ends a struct.
    """
    fields = b"".join(b"\1" + _string(name) + b"\1" + int_bytes(kind) + b"\0" for name, kind in _FIELDS)
    common = b"\1" + _string("Payload") + b"\1" + int_bytes(_TYPE_ID) + b"\0"
    return int_bytes(-_TYPE_ID) + b"\3\1" + common + b"\1" + uint_bytes(len(_FIELDS)) + fields + b"\0\0"


PREFACE: Final = message(_definition())
"""The type definition, sent at the beginning of a connection."""

_VALUE: Final = int_bytes(_TYPE_ID)
_SAMPLE_END: Final = int_bytes(SAMPLE) + b"\0"
_LOST_END: Final = b"\1" + int_bytes(LOST) + b"\0"


def encode(event: Sample | Lost) -> bytes:
    """Encode an event as a message; fields with zero values are omitted, as in gob."""
    if isinstance(event, Sample):
        cpu = b"\1" + int_bytes(event.cpu) + b"\2" if event.cpu else b"\3"
        content = _VALUE + b"\1" + uint_bytes(len(event.data)) + event.data + cpu + _SAMPLE_END
    else:
        cpu = b"\2" + int_bytes(event.cpu) + b"\1" if event.cpu else b"\3"
        content = _VALUE + cpu + uint_bytes(event.count) + _LOST_END
    return uint_bytes(len(content)) + content


class Payloads:
    """A parser of the monitor's stream, for input of any size."""

    def __init__(self) -> None:
        self._buffer = b""
        self._started = False

    def feed(self, data: bytes) -> Iterator[Sample | Lost]:
        """Yield the events that are complete so far. Raises MonitorProtocolError.

        Payloads of other types are ignored.
        """
        self._buffer += data
        position = 0
        while (found := _length(self._buffer, position)) is not None:
            start, size = found
            if len(self._buffer) < start + size:
                break
            message = self._buffer[start : start + size]
            position = start + size
            if not self._started:
                if message != _definition():
                    raise MonitorProtocolError(
                        "the socket does not speak version 1.2 of the monitor's protocol"
                    )
                self._started = True
            elif (event := _event(message)) is not None:
                yield event
        self._buffer = self._buffer[position:]


def _length(data: bytes, position: int) -> tuple[int, int] | None:
    """Return start and length of a message; None if its length is incomplete."""
    try:
        size, start = _read_uint(data, position)
    except IndexError:
        return None
    if size > _MAX_MESSAGE:
        raise MonitorProtocolError(f"a message of {size} bytes")
    return start, size


def _event(message: bytes) -> Sample | Lost | None:
    try:
        kind, position = _read_uint(message, 0)
        if kind != _TYPE_ID << 1:
            raise MonitorProtocolError(f"a value of an unknown type, number {kind}")
        data, numbers = _read_fields(message, position)
    except IndexError:
        raise MonitorProtocolError("truncated message") from None
    cpu, lost, kind = (numbers.get(field, 0) for field in (1, 2, 3))
    if kind >> 1 == SAMPLE:
        return Sample(cpu >> 1, data)
    return Lost(lost, cpu >> 1) if kind >> 1 == LOST else None


def _read_fields(message: bytes, position: int) -> tuple[bytes, dict[int, int]]:
    data = b""
    numbers: dict[int, int] = {}
    field = -1
    while True:
        step, position = _read_uint(message, position)
        if step == 0:
            return data, numbers
        field += step
        number, position = _read_uint(message, position)
        if field == 0:
            data = message[position : position + number]
            position += number
        elif field < len(_FIELDS):
            numbers[field] = number
        else:
            raise MonitorProtocolError(f"a value with a field number {field}")


def _read_uint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises IndexError if it is incomplete."""
    first = data[position]
    if first < 128:
        return first, position + 1
    end = position + 1 + 256 - first
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[position + 1 : end], "big"), end


# Forwarding of events to all connected clients.
#
# Source: Cilium 1.17, the monitor's socket of protocol version 1.2.

SOCKET: Final = "monitor1_2.sock"
MAX_CLIENTS: Final = 64
"""Maximum number of clients; further connections are closed at once.

Each client has a queue of events and a send buffer.
"""
WRITE_BATCH: Final = 64 * 1024
"""Bytes written to a connection at once; later events wait in the queue until these are sent."""
_WARN_INTERVAL: Final = 60.0  # seconds between two warnings about too many clients


class MonitorSettings(Settings, frozen=True):
    """Settings of the monitor cell."""

    enable_monitor: bool = True
    """Serve the monitor socket."""


class MonitorClient(msgspec.Struct, frozen=True):
    """A row of the table ``monitor-clients``: a connected client."""

    number: int
    """Sequence number since the agent's start."""
    pid: int
    """0 if the process is in a PID namespace that the agent cannot see."""
    uid: int


def monitor_clients() -> Table[int, MonitorClient]:
    """Create the table ``monitor-clients``, by number."""
    return Table("monitor-clients", key=lambda row: row.number)


class Monitor:
    """Serves the monitor socket at ``path``."""

    def __init__(
        self,
        path: Path,
        settings: MonitorSettings,
        clients: Table[int, MonitorClient],
        events: Events,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self.path = path
        self.clients = clients
        """Connected clients."""
        self._numbers = itertools.count(1)
        self._events = events
        self._log = log
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_warning_until = 0.0
        self.enabled = settings.enable_monitor
        """Whether the socket is served."""
        if self.enabled:
            lifecycle.append(Hook("serve the monitor", self._start, self._stop))

    @property
    def watchers(self) -> int:
        """Number of connected clients."""
        return len(self._tasks)

    async def _start(self) -> None:
        listener = listen(self.path, group="cilium")
        # Cancelled here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            self._server = await asyncio.start_unix_server(self._accepted, sock=listener)

    async def _stop(self) -> None:
        if self._server is None:
            return
        self.path.unlink(missing_ok=True)
        self._server.close()
        for client in self._tasks:
            client.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client until either side disconnects."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("asyncio did not accept the connection in a task")
        if len(self._tasks) >= MAX_CLIENTS:
            self._reject(writer)
            return
        self._tasks.add(task)
        number = next(self._numbers)
        self.clients.put(_client(number, writer))
        try:
            with self._events.subscribe() as subscription:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_until_disconnected, reader, tasks.cancel_scope)
                    await _send(writer, subscription)
                    tasks.cancel_scope.cancel()
        except* (ConnectionError, asyncio.CancelledError):
            pass  # the client has disconnected, or the agent stops
        except* HiveError as errors:
            reason = "; ".join(map(str, errors.exceptions))
            self._log.warning("perf event buffers cannot be read", error=reason)
        finally:
            self._tasks.discard(task)
            self.clients.delete(number)
            writer.close()

    def _reject(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        now = anyio.current_time()
        if now >= self._no_warning_until:
            self._no_warning_until = now + _WARN_INTERVAL
            self._log.warning("too many monitor clients, connection rejected", clients=MAX_CLIENTS)


_CREDENTIALS: Final = struct.Struct("iII")


def _client(number: int, writer: asyncio.StreamWriter) -> MonitorClient:
    stream: socket.socket = writer.get_extra_info("socket")
    found = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return MonitorClient(number, pid, uid)


async def _send(writer: asyncio.StreamWriter, subscription: Subscription) -> None:
    writer.write(PREFACE)
    async for batch in subscription:
        for piece in _pieces(batch):
            writer.write(piece)
            await writer.drain()


def _pieces(batch: Iterable[Sample | Lost]) -> Iterator[bytes]:
    """Encode events, and yield them in pieces of about WRITE_BATCH bytes."""
    messages: list[bytes] = []
    size = 0
    for event in batch:
        message = encode(event)
        messages.append(message)
        size += len(message)
        if size >= WRITE_BATCH:
            yield b"".join(messages)
            messages, size = [], 0
    yield b"".join(messages)


async def _until_disconnected(reader: asyncio.StreamReader, scope: anyio.CancelScope) -> None:
    """Read until the client disconnects; clients send nothing."""
    while await reader.read(4096):
        pass
    scope.cancel()


def monitor(
    agent: AgentConfig,
    settings: MonitorSettings,
    clients: Table[int, MonitorClient],
    events: Events,
    *,
    lifecycle: Lifecycle,
    log: Logger,
) -> Monitor:
    """Create the node's monitor."""
    return Monitor(agent.state_dir / SOCKET, settings, clients, events, lifecycle, log)


cell = module(
    "monitor",
    "Events on the monitor socket",
    config(MonitorSettings),
    provide(monitor_clients, monitor),
    invoke(Monitor),
)
