"""A gRPC server over HTTP/2 (h2) with limits on the resources of clients.

Why:    grpclib sends each message in a frame of its own. This server packs many small messages into a frame,
        which makes followers cheaper, and reads no faster than the unsent_data of the agent permits.
Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md); RFC 9113.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import aclosing
from typing import Final

import anyio
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import msgspec
from anyio.abc import ByteStream, TaskGroup

from cells.hubble.rpc.messages import (
    ClientStream,
    MessageReader,
    Method,
    Requests,
    RpcCode,
    RpcError,
    code_name,
    encode_message,
    framed,
    timeout_seconds,
)
from lifecycle import Logger
from lifecycle.http import fair_queue_of

_DATA: Final = b"\0\0"
"""Type and flags of a DATA frame without END_STREAM."""


class GrpcLimits(msgspec.Struct, frozen=True):
    """Limits, as counts, bytes and seconds. Only the client that exceeds one is refused."""

    connections: int = 256
    """Open connections. A further one replaces an idle one, else it is closed."""
    per_peer: int = 128
    """Open connections per peer address, or per process on a unix socket."""
    calls: int = 256
    """Concurrent calls per connection; a relay uses one connection for all its clients."""
    all_calls: int = 1024
    """Concurrent calls on all connections."""
    request: int = 1 << 20
    """Maximum size of a request in bytes."""
    held: int = 8 << 20
    """Maximum size of all incomplete requests in bytes."""
    headers: int = 16 << 10
    read: int = 2 << 10
    """Bytes of frames read in one iteration of the event loop: some milliseconds at worst."""
    queued: int = 64 << 10
    """Bytes of responses queued on a connection before its calls wait for the client."""
    opening_seconds: float = 10.0
    """Timeout of the TLS handshake and of the HTTP/2 preface."""
    cancelled: int = 200
    """Maximum number of calls that a client may cancel in ten seconds."""


class CallCounts:
    """The server's call counters, by (type, service, method); ``handled`` also by code."""

    def __init__(self) -> None:
        self.started: Counter[tuple[str, str, str]] = Counter()
        self.received: Counter[tuple[str, str, str]] = Counter()
        self.sent: Counter[tuple[str, str, str]] = Counter()
        self.handled: Counter[tuple[str, str, str, str]] = Counter()


class GrpcServer:
    """Serves ``methods`` on any number of connections."""

    def __init__(self, methods: Iterable[Method], *, log: Logger, limits: GrpcLimits | None = None) -> None:
        self.methods: Mapping[str, Method] = {f"/{one.service}/{one.name}": one for one in methods}
        self.services = frozenset(one.service for one in self.methods.values())
        self.limits = limits or GrpcLimits()
        self.counts = CallCounts()
        self.log = log
        self.calls = 0
        """Number of current calls on all connections."""
        self.held = 0
        """Total size of incomplete requests in bytes."""
        self._connections: dict[GrpcConnection, asyncio.Event] = {}
        self._peers: Counter[Hashable] = Counter()

    @property
    def clients(self) -> int:
        """Number of connections."""
        return len(self._connections)

    async def serve(self, stream: ByteStream, peer: Hashable) -> None:
        """Serve one client until it disconnects or its connection is replaced; then close the stream."""
        connection = GrpcConnection(self, stream, peer)
        replaced = asyncio.Event()
        async with stream:
            if not self._admitted(peer):
                return
            self._connections[connection] = replaced
            self._peers[peer] += 1
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, replaced, tasks.cancel_scope)
                    await connection.run()
                    tasks.cancel_scope.cancel()
            finally:
                self._connections.pop(connection, None)
                self._peers[peer] -= 1
                if not self._peers[peer]:
                    del self._peers[peer]

    async def _watch(self, replaced: asyncio.Event, scope: anyio.CancelScope) -> None:
        await replaced.wait()
        scope.cancel()

    def _admitted(self, peer: Hashable) -> bool:
        if self._peers[peer] >= self.limits.per_peer:
            return self._replace_idle(one for one in self._connections if one.peer == peer)
        if len(self._connections) >= self.limits.connections:
            return self._replace_idle(self._connections)
        return True

    def _replace_idle(self, among: Iterable[GrpcConnection]) -> bool:
        """Close the connection that has been idle for longest. Return False if none is idle."""
        idle = [one for one in among if not one.calls and not self._connections[one].is_set()]
        if not idle:
            return False
        last = min(idle, key=lambda one: one.idle_since)
        self._connections[last].set()
        return True


class GrpcConnection:
    """The server's side of one HTTP/2 connection."""

    def __init__(self, server: GrpcServer, stream: ByteStream, peer: Hashable) -> None:
        self.peer = peer
        self._server = server
        self._limits = server.limits
        self._stream = stream
        self._direct_stream = stream if isinstance(stream, ClientStream) else None
        self._loop = asyncio.get_running_loop()
        self.idle_since = self._loop.time()
        config = h2.config.H2Configuration(
            client_side=False, header_encoding="utf-8", validate_outbound_headers=False
        )
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self._limits.calls,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: self._limits.headers,
                h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self._calls: dict[int, _Call] = {}
        self._frames: list[bytes | memoryview] = []
        """Queued frames of ``_queued`` bytes in total; the first may be sent in part."""
        self._unsent = asyncio.Event()
        self._queued = 0
        self._sending = False
        self._room = asyncio.Event()
        self._cancelled: list[float] = []
        self._closing = False

    @property
    def calls(self) -> int:
        """Number of current calls."""
        return len(self._calls)

    async def run(self) -> None:
        """Serve the client until it disconnects."""
        self._h2.initiate_connection()
        try:
            self._flush()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                await self._read(tasks)
                tasks.cancel_scope.cancel()
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the client has disconnected

    async def close(self) -> None:
        """Send GOAWAY, as far as the socket accepts it without waiting."""
        self._h2.close_connection()
        with anyio.move_on_after(0.2):
            self._queue_h2_frames()
            await self._stream.send(self._take_frames())

    # Receiving.

    async def _read(self, tasks: TaskGroup) -> None:
        queue = fair_queue_of(self._loop)
        seconds = self._limits.opening_seconds
        while not self._closing:
            try:
                with anyio.fail_after(seconds if math.isfinite(seconds) else None):
                    data = await self._stream.receive(self._limits.read)
            except (anyio.EndOfStream, TimeoutError):
                return
            seconds = math.inf
            await queue.wait(self.peer)
            await self._writable()  # also bounds queued acknowledgements of PING and SETTINGS
            try:
                events = self._h2.receive_data(data)
            except h2.exceptions.ProtocolError:
                self._closing = True
                self._flush()
                await self._writable(empty=True)
                return
            for event in events:
                self._handle(event, tasks)
            self._flush()
        await self._writable(empty=True)

    def _handle(self, event: h2.events.Event, tasks: TaskGroup) -> None:
        call = self._calls.get(getattr(event, "stream_id", 0))
        match event:
            case h2.events.RequestReceived():
                self._start_call(event, tasks)
            case h2.events.DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if call is not None:
                    call.receive(event.data)
            case h2.events.StreamEnded() if call is not None:
                call.finish()
            case h2.events.StreamReset():
                if call is not None:
                    call.scope.cancel()
                self._count_reset()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for waiting in self._calls.values():
                    waiting.window.set()
            case h2.events.ConnectionTerminated():
                self._closing = not self._calls

    def _count_reset(self) -> None:
        now = self._loop.time()
        self._cancelled = [reset_at for reset_at in self._cancelled if reset_at > now - 10.0]
        self._cancelled.append(now)
        if len(self._cancelled) > self._limits.cancelled:
            self._h2.close_connection(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            self._closing = True

    def _start_call(self, event: h2.events.RequestReceived, tasks: TaskGroup) -> None:
        headers = {str(name): str(value) for name, value in event.headers or ()}
        call = _Call(self, event.stream_id, headers, self._limits.request)
        self._calls[event.stream_id] = call
        tasks.start_soon(self._run_call, call)

    # Sending.

    def _flush(self) -> None:
        """Send queued frames without waiting if possible, else in the task that waits for the socket.

        Raises BrokenResourceError if the client has disconnected.
        """
        self._queue_h2_frames()
        if self._direct_stream is None or self._sending or self._unsent.is_set():
            self._unsent.set()
        elif self._frames:
            if self._direct_stream.send_nowait(self._take_frames()):
                self._queued = 0
            else:
                self._unsent.set()

    def _queue_h2_frames(self) -> None:
        """Queue the frames that h2 has produced, including PING and SETTINGS acknowledgements."""
        if data := self._h2.data_to_send():
            self._frames.append(data)
            self._queued += len(data)

    def _take_frames(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)

    def _queue_data(self, call: _Call, part: memoryview) -> None:
        """Queue a DATA frame as h2's send_data() does, in a tenth of the time.

        Raises ProtocolError if the stream is closed.
        """
        stream, size = self._h2.streams[call.id], len(part)
        if not stream.open:
            raise h2.exceptions.StreamClosedError(call.id)
        self._h2.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        self._queue_h2_frames()  # the response headers must precede the data
        self._frames += (size.to_bytes(3, "big") + _DATA + call.id.to_bytes(4, "big"), part)
        self._queued += size + 9

    async def _writable(self, *, empty: bool = False) -> None:
        """Wait until there is room for responses; with ``empty``, until all are sent to the kernel."""
        while self._queued > self._limits.queued or (empty and (self._sending or self._unsent.is_set())):
            self._room.clear()
            await self._room.wait()

    async def _write(self) -> None:
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            queued, self._sending = self._queued, True
            data = self._take_frames()
            if data or self._direct_stream is not None:  # its buffer may contain unsent data of send_nowait()
                await self._stream.send(data)
            self._queued -= queued
            self._sending = False
            self._room.set()

    async def send(self, call: _Call, data: bytes) -> None:
        """Send bytes of a call, subject to HTTP/2 flow control."""
        unsent_data = memoryview(data)
        while unsent_data:
            await self._writable()  # before reading the window, which other calls use concurrently
            window_size = min(self._h2.local_flow_control_window(call.id), self._h2.max_outbound_frame_size)
            if window_size <= 0:
                call.window.clear()
                await call.window.wait()
                continue
            part, unsent_data = unsent_data[:window_size], unsent_data[window_size:]
            self._queue_data(call, part)
            self._flush()

    async def _run_call(self, call: _Call) -> None:
        """Run one call and end its stream with the status."""
        server, error = self._server, RpcError(RpcCode.OK, "")
        server.calls += 1
        labels: tuple[str, str, str] | None = None
        try:
            with call.scope:
                try:
                    method = call.method(server)
                    labels = (method.kind, method.service, method.name)
                    server.counts.started[labels] += 1
                    await self._invoke(call, method, labels)
                except RpcError as raised:
                    error = raised
                except TimeoutError:
                    error = RpcError(RpcCode.DEADLINE_EXCEEDED, "context deadline exceeded")
                except (anyio.BrokenResourceError, anyio.ClosedResourceError, h2.exceptions.ProtocolError):
                    error = RpcError(RpcCode.CANCELLED, "the client has left")
                except Exception as raised:  # a fault in one call must not end the connection
                    server.log.exception("a gRPC call failed", method=call.path, error=repr(raised))
                    error = RpcError(RpcCode.INTERNAL, "the agent failed; its log has more")
            if call.scope.cancelled_caught:
                error = RpcError(RpcCode.CANCELLED, "context canceled")
            else:
                self._end(call, error)
        finally:
            server.calls -= 1
            call.release()
            del self._calls[call.id]
            if not self._calls:
                self.idle_since = self._loop.time()
            if labels is not None:
                server.counts.handled[*labels, code_name(error.code)] += 1

    async def _invoke(self, call: _Call, method: Method, labels: tuple[str, str, str]) -> None:
        counts = self._server.counts
        seconds = timeout_seconds(call.headers.get("grpc-timeout"))
        with anyio.fail_after(seconds if math.isfinite(seconds) else None):
            requests = call.requests(lambda: counts.received.update([labels]))
            async with aclosing(requests), aclosing(method.answer(requests)) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    messages = list(batch)
                    self._open(call)
                    await self.send(call, framed(messages))
                    counts.sent[labels] += len(messages)

    def _open(self, call: _Call) -> None:
        if not call.opened:
            call.opened = True
            headers = [
                (":status", "200"),
                ("content-type", "application/grpc"),
                ("grpc-accept-encoding", "identity"),
            ]
            self._h2.send_headers(call.id, headers)
            self._flush()

    def _end(self, call: _Call, error: RpcError) -> None:
        trailers = [("grpc-status", str(int(error.code)))]
        if error.message:
            trailers.append(("grpc-message", encode_message(error.message)))
        if not call.opened:
            trailers[:0] = [(":status", call.http_status), ("content-type", "application/grpc")]
        try:
            self._h2.send_headers(call.id, trailers, end_stream=True)
            if not call.ended:
                self._h2.reset_stream(call.id)  # the request is not read to its end
        except h2.exceptions.ProtocolError:
            return  # the client has reset the stream or disconnected
        self._flush()


class _Call:
    """A call: its received request and the state of its response."""

    def __init__(
        self, connection: GrpcConnection, stream_id: int, headers: dict[str, str], limit: int
    ) -> None:
        self.id = stream_id
        self.headers = headers
        self.path = headers.get(":path", "")
        self.scope = anyio.CancelScope()
        self.window = asyncio.Event()
        self.opened = False
        """Whether the response headers are sent."""
        self.ended = False
        """Whether the request is complete."""
        self.http_status = "200"
        self._server = connection._server  # noqa: SLF001
        self._reader = MessageReader(limit)
        self._held = 0
        self._arrived = asyncio.Event()
        self._refused: RpcError | None = None

    def method(self, server: GrpcServer) -> Method:
        """Return the method of the request path. Raises RpcError if there is none."""
        if self.headers.get(":method") != "POST":
            self.http_status = "405"
            raise RpcError(
                RpcCode.INTERNAL, f'received a method "{self.headers.get(":method")}": expected POST'
            )
        if not self.headers.get("content-type", "").startswith("application/grpc"):
            self.http_status = "415"
            raise RpcError(
                RpcCode.INTERNAL,
                f'invalid gRPC request content-type "{self.headers.get("content-type", "")}"',
            )
        found = server.methods.get(self.path)
        if found is None:
            service, slash, name = self.path.removeprefix("/").rpartition("/")
            if not slash:
                raise RpcError(RpcCode.UNIMPLEMENTED, f'malformed method name: "{self.path}"')
            if service in server.services:
                raise RpcError(RpcCode.UNIMPLEMENTED, f"unknown method {name} for service {service}")
            raise RpcError(RpcCode.UNIMPLEMENTED, f"unknown service {service}")
        if self.headers.get("grpc-encoding", "identity") != "identity":
            raise RpcError(
                RpcCode.UNIMPLEMENTED,
                f'grpc: Decompressor is not installed for grpc-encoding "{self.headers["grpc-encoding"]}"',
            )
        if server.calls > server.limits.all_calls:
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, "too many calls, ask again later")
        return found

    def receive(self, data: bytes) -> None:
        """Append received bytes of the request."""
        if self._refused is not None:
            return
        self._reader.feed(data)
        if self._hold() > self._server.limits.request + 5 or self._server.held > self._server.limits.held:
            self._refused = RpcError(
                RpcCode.RESOURCE_EXHAUSTED, "too many bytes of requests are not answered"
            )
        self._arrived.set()

    def finish(self) -> None:
        """Mark the request as complete."""
        self.ended = True
        self._arrived.set()

    def release(self) -> None:
        """Discard the received bytes of the request."""
        self._server.held -= self._held
        self._held = 0

    def _hold(self) -> int:
        self._server.held += self._reader.held - self._held
        self._held = self._reader.held
        return self._held

    async def requests(self, count: Callable[[], None]) -> Requests:
        """Yield the messages of the request as they arrive. Raises RpcError."""
        while True:
            while (message := self._reader.take()) is not None:
                self._hold()
                count()
                yield message
            if self._refused is not None:
                raise self._refused
            if self.ended:
                return
            self._arrived.clear()
            await self._arrived.wait()
